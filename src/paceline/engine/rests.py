"""When lookups rest: where they did not pay for a while, a sequence's are asked less often, if asking costs something.

A lookup and the choice after it take about a tenth of a millisecond for each sequence. That is nothing beside a large
model's pass, and several per cent of a small one's. They pay with a draft of which more tokens were right than its rows
cost: chosen drafts are those whose chances were overrated, so that it is the outcome that counts.
"""

import math
from dataclasses import dataclass, field

SOONEST = 4  # times that they are asked in vain before the first rest, at least
LONGEST = 16  # steps: so many tokens at most of a passage that begins to be copied are not drafted
SHARE = 0.005  # of the time, that asking in vain may take
SMOOTHING = 0.02


@dataclass(slots=True)
class Rest:
    """Of one sequence."""

    in_vain: int = 0  # times in a row that they were asked and did not pay
    left: int = 0  # steps
    over: bool = True

    def begins_step(self) -> bool:
        """Whether the lookups are to be asked in the step that comes."""
        self.over = self.left <= 0
        self.left -= not self.over
        return self.over

    def ends_step(self, patience: int, longest: int) -> None:
        """Beyond `patience`, each time that they were asked in vain makes the next rest a step longer."""
        if self.over:
            self.in_vain += 1
            self.left = min(max(self.in_vain - patience, 0), longest)

    def paid(self) -> None:
        """A draft was worth more than its rows."""
        self.in_vain = self.left = 0


@dataclass(slots=True)
class Returns:
    """What came of asking among so many sequences: running means."""

    used: float = 1.0  # drafts that were used, each time that they were asked
    seconds: float | None = None  # that such a draft saved, wrong ones counted as what they cost


@dataclass(slots=True)
class Asking:
    """What asking a sequence's lookups takes, in seconds, and what it returns.

    The latter by the number of sequences that run (by powers of two): rows become dear where there are many.
    """

    seconds: float = 0.0
    _returns: dict[int, Returns] = field(default_factory=dict)

    def saw(self, seconds: float, sequences: int, num_running: int) -> None:
        """So many sequences' were asked together."""
        each = seconds / sequences
        self.seconds += SMOOTHING * (each - self.seconds) if self.seconds else each
        self._of(num_running).used *= (1 - SMOOTHING) ** sequences

    def returned(self, seconds: float, num_running: int) -> None:
        """A draft that was used saved so much, or so little."""
        returns = self._of(num_running)
        returns.used = min(1.0, returns.used + SMOOTHING)
        mean = seconds if returns.seconds is None else returns.seconds
        returns.seconds = mean + SMOOTHING * (seconds - mean)

    def new_rest(self, num_running: int) -> Rest:
        """Of a sequence that begins among so many: where asking costs more than it returns, with rests."""
        returns = self._of(num_running)
        pays = returns.seconds is None or returns.used * returns.seconds >= self.seconds
        return Rest(0 if pays else self.patience(num_running))

    def patience(self, num_running: int) -> int:
        """Times that they are asked in vain before they rest: it costs as much as a draft saves on average."""
        saved = self._of(num_running).seconds or 0.0
        return SOONEST + round(max(0.0, saved) / self.seconds) if self.seconds else SOONEST

    def longest_rest(self, pass_seconds: float, num_running: int) -> int:
        """Steps, beside passes of so many sequences."""
        share = self.seconds * num_running / pass_seconds
        return min(LONGEST, max(0, math.ceil(share / SHARE) - 1))

    def _of(self, num_running: int) -> Returns:
        return self._returns.setdefault(num_running.bit_length(), Returns())
