"""Where an answer ends: the limit it starts with, and the cut of a run of tokens."""

from collections.abc import Iterable, Set

from paceline.core.params import SamplingParams
from paceline.errors import PacelineError
from paceline.values import is_whole, shown


def token_limit(prompt_length: int, params: SamplingParams, max_context: int) -> int:
    """How many tokens may be generated. Raises PacelineError where it is none."""
    if prompt_length == 0:
        raise PacelineError("the prompt is empty", hint="give at least one token")
    room = max_context - prompt_length
    if room <= 0:
        raise PacelineError(
            f"the prompt has {prompt_length} tokens but the context holds {max_context}, one of them for the answer",
            hint="shorten the prompt, or raise --max-context if the model allows",
        )
    return room if params.max_tokens is None else min(room, params.max_tokens)


def check_end_tokens(token_ids: Iterable[object], vocab_size: int) -> None:
    """Raise PacelineError unless all are ids of the vocabulary: no other can ever be the end."""
    for token in token_ids:
        if not is_whole(token) or not 0 <= token < vocab_size:
            raise PacelineError(
                f"eos_token_ids holds {shown(token)}, which is no end-of-sequence token of this model",
                hint=f"give token ids: whole numbers from 0 to {vocab_size - 1}",
            )


def cut(tokens: tuple[int, ...], left: int, stop_ids: Set[int]) -> tuple[tuple[int, ...], str | None]:
    """The run up to its first stop token or its limit, and why it ended there (None if it goes on)."""
    for count, token in enumerate(tokens[:left], start=1):
        if token in stop_ids:
            return tokens[:count], "stop"
    return (tokens[:left], "length") if len(tokens) >= left else (tokens, None)
