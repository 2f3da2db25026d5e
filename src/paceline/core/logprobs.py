"""Log-probabilities to report: of the raw logits, before any parameter, as vLLM does by default."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.rows import top_ids


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability and rank (1 is the likeliest) of one token."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token of one position, and the likeliest alternatives in order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


def position_logprobs(logits: Tensor, token: int, num_top: int) -> PositionLogprobs:
    """From the raw row [V] that the token was drawn after: drafted or not, each position has its own row."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)  # [V]
    rank = int((logits > logits[token]).sum()) + 1
    ids = top_ids(logits, num_top) if num_top else logits.new_empty(0, dtype=torch.int64)
    pairs = zip(ids.tolist(), logprobs[ids].tolist(), strict=True)
    top = tuple(TokenLogprob(token_id, value, rank) for rank, (token_id, value) in enumerate(pairs, start=1))
    return PositionLogprobs(TokenLogprob(token, float(logprobs[token]), rank), top)
