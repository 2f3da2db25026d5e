"""The one function that turns logits into a distribution: for drafters, plain decoding and verification.

Order of processing, that of vLLM's sampler: constraint mask, bad words, min_tokens, logit bias, penalties
(repetition, frequency, presence), then greedy or: temperature, min-p, top-k, top-p. top-k keeps exactly k
tokens (ties go to the lowest id; vLLM keeps all ties), so that top_k 1 is greedy.

A step is paid for only if its parameter is on. Nothing reduces over a row with `sum` or `logsumexp`: their
bits depend on the number of threads, and the same row must always give the same weights.
"""

import math
from collections.abc import Set

import torch
from torch import Tensor

from paceline.core.history import History
from paceline.core.params import SamplingParams
from paceline.core.rows import top_ids, total
from paceline.errors import PacelineError


class BadLogitsError(PacelineError):
    """The model gave no usable row at a position. It ends that request and no other."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message, hint="the model's weights or its precision are at fault; try --dtype fp32")
        self.position = position


class NoTokenAllowedError(PacelineError):
    """Mask, bad words and min_tokens together leave no token. It ends that request and no other."""

    def __init__(self, position: int) -> None:
        super().__init__(
            f"no token is allowed at generated position {position}",
            hint="loosen the constraint, bad_words, or min_tokens with stop_token_ids",
        )
        self.position = position


def token_weights(
    logits: Tensor,
    params: SamplingParams,
    history: History,
    end_tokens: Set[int] = frozenset(),
    allowed: Tensor | None = None,
) -> Tensor:
    """Unnormalised target probabilities [V] in float64 of the token after `history`; the largest is 1.

    `logits` [V] in any float dtype, never changed. `end_tokens` are banned before min_tokens. `allowed` [V]
    is boolean. A greedy request gets a one-hot row. Raises BadLogitsError (NaN, +inf, or nothing but −inf
    in the row) or NoTokenAllowedError.
    """
    row = adjusted_logits(logits, params, history, end_tokens, allowed)
    if params.is_greedy:
        weights = torch.zeros(len(row), dtype=torch.float64, device=row.device)
        weights[row.argmax()] = 1  # argmax takes the first of equals
        return weights
    if 0 < params.top_k < len(row):
        return _few_weights(row, top_ids(row, params.top_k), params)
    weights = _tempered(row, row.max(), params.temperature)
    if params.min_p > 0:
        weights.masked_fill_(weights < params.min_p, 0)
    if params.top_p < 1:
        return _nucleus(row, weights, params.top_p)
    return weights


def adjusted_logits(
    logits: Tensor,
    params: SamplingParams,
    history: History,
    end_tokens: Set[int] = frozenset(),
    allowed: Tensor | None = None,
) -> Tensor:
    """Logits [V] after all that can change their order: the same tensor if nothing is on, else a copy."""
    peak = float(logits.max())  # max hands on NaN, so that one pass checks the row
    if not math.isfinite(peak):
        culprit = "nothing but -inf" if peak == -math.inf else f"{peak}"
        raise BadLogitsError(f"the logits at generated position {history.position} hold {culprit}", history.position)
    banned = _banned_tokens(params, history, end_tokens)
    if allowed is None and not banned and not params.logit_bias and not params.has_penalties:
        return logits
    row = logits.to(torch.float64, copy=True)  # [V]
    if allowed is not None:
        row.masked_fill_(~allowed.to(row.device), -math.inf)
    if banned:
        row[banned] = -math.inf
    if params.logit_bias:
        row[list(params.logit_bias)] += row.new_tensor(list(params.logit_bias.values()))
    if params.has_penalties:
        _penalise(row, params, history)
    if row.max() == -math.inf:
        raise NoTokenAllowedError(history.position)
    return row


def _banned_tokens(params: SamplingParams, history: History, end_tokens: Set[int]) -> list[int]:
    banned = {word[-1] for word in params.bad_words if history.ends_with(tuple(word[:-1]))}
    if history.position < params.min_tokens:
        banned |= end_tokens
    return sorted(banned)


def _penalise(row: Tensor, params: SamplingParams, history: History) -> None:
    if params.repetition_penalty != 1:
        seen = sorted(history.seen())
        value = row[seen]
        scaled = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
        row[seen] = scaled
    counts = history.output_counts()
    if counts and (params.frequency_penalty or params.presence_penalty):
        ids = list(counts)
        row[ids] -= params.frequency_penalty * row.new_tensor(list(counts.values())) + params.presence_penalty


def _tempered(row: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """exp((x − peak)/T) in float64: at most 1, and 1 at the peak for every T, however small."""
    weights = row.to(torch.float64, copy=True).sub_(peak)
    if temperature != 1:
        weights.div_(temperature)
    return weights.exp_()


def _few_weights(row: Tensor, ids: Tensor, params: SamplingParams) -> Tensor:
    """Weights [V] of the top k alone: `ids` [k], likeliest first, so min-p and top-p keep the first few."""
    few = _tempered(row[ids], row[ids[0]], params.temperature)  # [k]
    few.masked_fill_(few < params.min_p, 0)
    if params.top_p < 1:
        few[_nucleus_size(few, params.top_p * total(few)) :] = 0
    return torch.zeros(len(row), dtype=torch.float64, device=row.device).index_put_((ids,), few)


def _nucleus(row: Tensor, weights: Tensor, top_p: float) -> Tensor:
    """`weights` [V], zero outside the nucleus. Ordered by `row`, in which a high temperature ties nothing."""
    mass, floor = top_p * total(weights), 0.01
    while total(weights.masked_select(weights >= floor)) < mass:  # how deep it goes: sorting all of V is slow
        floor /= 32
    candidates = (weights >= floor).nonzero().flatten()
    ids = candidates[row[candidates].sort(descending=True, stable=True).indices]
    kept = ids[: _nucleus_size(weights[ids], mass)]
    return torch.zeros_like(weights).index_put_((kept,), weights[kept])


def _nucleus_size(descending: Tensor, mass: Tensor) -> int:
    """How many of the likeliest tokens it takes to reach `mass`: those with less than `mass` before them."""
    before = descending.cumsum(0) - descending
    return int((before < mass).sum())  # a count of booleans is exact
