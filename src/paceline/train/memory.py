"""Freed memory is kept: a step's largest tensors come and go, and fresh pages cost more than the sums in them."""

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # mallopt(3)
_EVER = -1  # as the C library reads it: more than there is


def keep_freed_memory() -> None:
    """For the rest of the process; without effect where the C library is not GNU's. In large pages, if nothing was
    computed yet."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch looks at its first tensor
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _EVER)
        mallopt(_TOP_PAD, 2**28)
