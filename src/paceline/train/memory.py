"""Freed memory is kept: a step's largest tensors come and go, and fresh pages cost more than the sums in them."""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt(3)


def keep_freed_memory() -> None:
    """For the rest of the process; without effect where the C library is not GNU's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
