"""When lookups rest: of no use to a sequence for a while, they are asked less often, where asking costs something.

A lookup and the choice after it take some tenths of a millisecond for each sequence. That is nothing beside a large
model's pass, and several per cent of a small one's.
"""

import math
from dataclasses import dataclass, field

UNUSED = 8  # times in a row that they were asked in vain, before the first rest
LONGEST = 16  # steps: so many tokens at most of a passage that begins to be copied are not drafted
SHARE = 0.005  # of the time, that asking in vain may take
SELDOM = 0.05  # of the lookups that were asked: if fewer were used, a new sequence begins with rests
SMOOTHING = 0.02


@dataclass(slots=True)
class Rest:
    """Of one sequence."""

    unused: int = 0
    left: int = 0  # steps
    over: bool = True

    def begins_step(self) -> bool:
        """Whether the lookups are to be asked in the step that comes."""
        self.over = self.left <= 0
        self.left -= not self.over
        return self.over

    def ends_step(self, used: bool, longest: int) -> None:
        """Each time that they were asked in vain, once that has become usual, makes the next rest a step longer."""
        if not self.over:
            return
        self.unused = 0 if used else self.unused + 1
        self.left = min(max(self.unused - UNUSED, 0), longest)


@dataclass(slots=True)
class Asking:
    """What asking the lookups of a sequence takes, in seconds, and how often they are used: running means.

    The latter by the number of sequences that run (by powers of two): rows become dear where there are many.
    """

    seconds: float = 0.0
    _used: dict[int, float] = field(default_factory=dict)

    def saw(self, seconds: float, sequences: int, num_used: int, num_running: int) -> None:
        """So many sequences' were asked together, and those of some were used."""
        each = seconds / sequences
        self.seconds += SMOOTHING * (each - self.seconds) if self.seconds else each
        group, keep = num_running.bit_length(), (1 - SMOOTHING) ** sequences
        self._used[group] = keep * self._used.get(group, 1.0) + (1 - keep) * num_used / sequences

    def new_rest(self, num_running: int) -> Rest:
        """Of a sequence that begins among so many."""
        seldom = self._used.get(num_running.bit_length(), 1.0) < SELDOM
        return Rest(UNUSED if seldom else 0)

    def longest_rest(self, pass_seconds: float, num_running: int) -> int:
        """Steps, beside passes of so many sequences."""
        share = self.seconds * num_running / pass_seconds
        return min(LONGEST, max(0, math.ceil(share / SHARE) - 1))
