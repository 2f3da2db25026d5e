"""When lookups rest: of no use to a sequence for a while, they are asked less often, where asking costs something.

A lookup and the choice after it take some tenths of a millisecond. That is nothing beside a large model's pass, and
several per cent of a small one's.
"""

from dataclasses import dataclass

UNUSED = 24  # times in a row that they were asked in vain, before the first rest
LONGEST = 4  # steps: so many tokens at most of a passage that begins to be copied are not drafted
SHARE = 0.005  # of a pass: what asking may cost at every step
SMOOTHING = 0.05


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

    def ends_step(self, used: bool, costly: bool) -> None:
        """Each time that they were asked in vain, once that has become usual, makes the next rest a step longer."""
        if not self.over:
            return
        self.unused = 0 if used else self.unused + 1
        self.left = min(max(self.unused - UNUSED, 0), LONGEST) if costly else 0


@dataclass(slots=True)
class AskingCosts:
    """What asking one sequence's lookups takes, in seconds: a running mean."""

    seconds: float = 0.0

    def saw(self, seconds: float, sequences: int) -> None:
        """So many were asked together."""
        if sequences:
            each = seconds / sequences
            self.seconds += SMOOTHING * (each - self.seconds) if self.seconds else each

    def matter(self, pass_seconds: float, sequences: int) -> bool:
        """Beside a pass of so many sequences."""
        return self.seconds * sequences > SHARE * pass_seconds
