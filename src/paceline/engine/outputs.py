"""What a request gives back: vLLM's names, as values."""

from dataclasses import dataclass

from paceline.core.logprobs import PositionLogprobs
from paceline.engine.statistics import SpeculationStatistics


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. All of it is of the cut run: text, ids, logprobs and statistics end at the same token."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None  # one a token, where asked for
    finish_reason: str  # "stop", "length", "abort" (cancelled) or "error"
    stop_reason: int | str | None  # the stop string, or the id of `stop_token_ids`, that ended it
    error: str | None
    speculation: SpeculationStatistics

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole choice; None where logprobs were not asked for."""
        return None if self.logprobs is None else sum(position.chosen.logprob for position in self.logprobs)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out, all choices together; the prompt is counted once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds on the clock of this request; what never happened is None."""

    queued_s: float | None  # until it was first scheduled
    prefill_s: float | None  # from then to its prompt's end
    decode_s: float | None  # from then to its end
    num_put_back: int  # how often it lost its KV blocks and was computed again
    speculation: SpeculationStatistics  # all choices together


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request that has ended."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]  # one a choice, in order
    seed: int
    usage: Usage
    metrics: RequestMetrics
    lossless: bool  # whether the request's rule was

    @property
    def finished(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Update:
    """What one step added to one choice. Nothing shown is ever taken back, and all of it joined is the output."""

    request_id: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    output: RequestOutput | None = None  # with the request's last update
