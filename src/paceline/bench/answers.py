"""What an arm gives back, and the protocol that every arm implements: a drafting method of ours, or another engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.params import SamplingParams
from paceline.engine.statistics import SpeculationStatistics


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; seconds count from when its prompt was handed in."""

    token_ids: tuple[int, ...]
    seconds: float
    first_s: float | None = None  # until its first token; None where an engine does not tell
    num_first: int = 1  # tokens that came with the first
    text: str = ""
    cached_tokens: int = 0  # of its prompt
    speculation: SpeculationStatistics | None = None  # None where an engine does not tell
    drafts_of_depth: tuple[int, ...] = ()  # [i]: drafts that went more than i tokens deep

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first that were shown."""
        return len(self.token_ids) - self.num_first

    @property
    def decode_s(self) -> float | None:
        return None if self.first_s is None else self.seconds - self.first_s


@dataclass(slots=True)
class StepCosts:
    """Where the seconds of the engine's steps went, prompts apart."""

    draft_s: float = 0.0
    target_s: float = 0.0
    rest_s: float = 0.0
    passes: int = 0  # steps that yielded tokens
    prompt_s: float = 0.0  # of the other steps

    def add(self, other: "StepCosts") -> None:
        self.draft_s += other.draft_s
        self.target_s += other.target_s
        self.rest_s += other.rest_s
        self.passes += other.passes
        self.prompt_s += other.prompt_s


@dataclass(frozen=True, slots=True)
class Measured:
    """What an arm made of some prompts that were handed in together."""

    answers: tuple[Answer, ...]
    seconds: float  # until all were answered
    costs: StepCosts | None = None  # None where an engine does not tell
    peak_memory: int | None = None  # bytes

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


class Arm(Protocol):
    """Something that answers prompts."""

    @property
    def label(self) -> str:
        """As the tables show it."""

    @property
    def most_at_once(self) -> int | None:
        """Prompts that it takes together; None: any number."""

    def warm_up(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        """As `answer`, and nothing is kept of it."""

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
        """Answer all prompts, begun together."""

    def forget(self) -> None:
        """What was said so far will not be gone on with: a prompt begins from nothing."""
