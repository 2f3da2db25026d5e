"""What the scripts here share: Ctrl-C is one line and no traceback, and how long a long run has still to go.

Import it before anything else: Ctrl-C while torch is being imported is an interrupt, too.
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _excepthook  # Python then ends by the signal itself: status 130 in a shell


@contextmanager
def resumable() -> Iterator[None]:
    """Around what a second run takes up."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; run it again to go on", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


class Remaining:
    """An estimate from the mean time of what this run has done."""

    def __init__(self, total: int) -> None:
        self._left = total
        self._done = 0
        self._start = time.perf_counter()

    def after_one_more(self) -> str:
        """In words, when another of the parts is done."""
        self._left, self._done = max(self._left - 1, 0), self._done + 1
        return in_words(self._left * (time.perf_counter() - self._start) / self._done)


def in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min left"
