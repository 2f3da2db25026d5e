"""Progress bars on stderr, for a person who waits."""

import sys
from typing import Any

from paceline.models.home import Progress


def terminal_progress() -> Progress:
    """A receiver that draws a tqdm bar per activity on stderr, or writes a few lines where that is a log."""
    return _Bar() if sys.stderr.isatty() else _Lines()


class _Bar:
    """One bar at a time; a new activity closes the last one's bar."""

    def __init__(self) -> None:
        self._what: str | None = None
        self._bar: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            from tqdm import tqdm

            self._what = what
            self._bar = tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=True, file=sys.stderr)
        self._bar.update(max(0, done - self._bar.n))
        if done >= total:
            self._bar.close()


class _Lines:
    """For logs: one line when an activity starts and one at each further quarter."""

    def __init__(self) -> None:
        self._what: str | None = None
        self._quarter = -1

    def __call__(self, what: str, done: int, total: int) -> None:
        quarter = 4 * done // max(total, 1)
        if what != self._what or quarter > self._quarter:
            self._what, self._quarter = what, quarter
            print(f"{what}: {25 * quarter} %", file=sys.stderr, flush=True)
