"""How speculation went, counted over the tokens that were kept. Every report of it uses these definitions."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class SpeculationStatistics:
    """Sums over the target passes of one request, or of many.

    A pass yields the drafted tokens it accepts and one of the target's own; a run cut at a stop or at a limit
    is counted as cut, so that `num_tokens` is exactly what was returned.
    """

    num_steps: int = 0  # target passes
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # [k]: passes that accepted k drafted tokens

    def add(self, num_tokens: int, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one pass."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        missing = num_accepted_tokens + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram.extend([0] * missing)
        self.acceptance_histogram[num_accepted_tokens] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass, the target's own included: 1 is plain decoding. 0 before the first pass."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted of the drafted tokens; 0 if none was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def acceptance_by_position(self, count: int) -> list[float]:
        """Of chains that are always `count` tokens long: how often each was accepted where all before it were."""
        right = [sum(self.acceptance_histogram[i:]) for i in range(count + 1)]  # passes that accepted so many, or more
        return [more / tried if tried else 0.0 for tried, more in pairwise(right)]

    def merge(self, other: "SpeculationStatistics") -> None:
        """Add another's sums."""
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        missing = len(other.acceptance_histogram) - len(self.acceptance_histogram)
        self.acceptance_histogram.extend([0] * missing)
        for accepted, passes in enumerate(other.acceptance_histogram):
            self.acceptance_histogram[accepted] += passes
