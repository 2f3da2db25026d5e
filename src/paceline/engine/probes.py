"""When a method that is off gets another chance: seldom, and for little of the time spent."""

from collections.abc import Collection
from dataclasses import dataclass, field

SHARE = 0.01  # of all time spent, at most
FIRST_INTERVAL, LONGEST_INTERVAL = 16, 1024  # steps; doubled with each probe that changes nothing


@dataclass(slots=True)
class _Turn:
    interval: int = FIRST_INTERVAL
    since: int = 0  # steps


@dataclass(slots=True)
class Probes:
    """Turns of all methods. A method that is used by itself needs none, and begins anew when it goes off."""

    share: float = SHARE
    num_tokens: int = 3  # drafted in a probe
    seconds: float = 0.0  # of all steps
    seconds_probing: float = 0.0  # what probes have cost, as far as the cost table knows
    _turns: dict[str, _Turn] = field(default_factory=dict)

    def spent(self, seconds: float) -> None:
        """A step took so long."""
        self.seconds += seconds

    def next_due(self, offered: Collection[str], used: Collection[str]) -> str | None:
        """Of the methods that could draft in this step and do not, the one that has waited longest over its time."""
        for method in used:
            self._turns.pop(method, None)
        due: str | None = None
        for method in offered:
            if method in used:
                continue
            turn = self._turns.setdefault(method, _Turn())
            turn.since += 1
            if turn.since >= turn.interval and (due is None or turn.since > self._turns[due].since):
                due = method
        return due

    def afford(self, method: str, seconds: float) -> bool:
        """Whether a probe at this price fits into the share; if so it is charged, and the next one is further off."""
        if self.seconds_probing + seconds > self.share * self.seconds:
            return False
        self.seconds_probing += seconds
        turn = self._turns[method]
        turn.interval, turn.since = min(2 * turn.interval, LONGEST_INTERVAL), 0
        return True
