"""Where a step's time went."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step before anything is drafted: what decodes, and the prompts' chunks beside it.

    context: tokens before the rows of what decodes, on average.
    """

    num_turns: int
    num_chunks: int = 0
    num_chunk_rows: int = 0
    context: float = 0.0

    @property
    def num_sequences(self) -> int:
        return self.num_turns + self.num_chunks

    @property
    def num_rows(self) -> int:
        return self.num_turns + self.num_chunk_rows


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step afterwards. Seconds: drafting; the target's pass with its output layer; all else."""

    shape: StepShape
    num_draft_rows: int
    num_tokens: int  # that came out
    draft_s: float
    target_s: float
    rest_s: float

    @property
    def seconds(self) -> float:
        return self.draft_s + self.target_s + self.rest_s


@dataclass(slots=True)
class TimeTotals:
    """Sums over the steps of an engine."""

    num_steps: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    rest_s: float = 0.0

    def add(self, step: StepTimes) -> None:
        self.num_steps += 1
        self.draft_s += step.draft_s
        self.target_s += step.target_s
        self.rest_s += step.rest_s
