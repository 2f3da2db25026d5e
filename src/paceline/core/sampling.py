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
from paceline.core.rows import ScannedRow, total
from paceline.core.support import AnySupport, Support, Tempered
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
    """`token_support` as a whole row [V]."""
    return token_support(logits, params, history, end_tokens, allowed).dense(len(logits))


def token_support(
    logits: Tensor | ScannedRow,
    params: SamplingParams,
    history: History,
    end_tokens: Set[int] = frozenset(),
    allowed: Tensor | None = None,
) -> AnySupport:
    """Unnormalised target probabilities in float64 of the token after `history`; the largest is 1.

    `logits` [V] in any float dtype, looked at already or not, never changed. `end_tokens` are banned before
    min_tokens. `allowed` [V] is boolean. A greedy request has one possible token. Raises BadLogitsError (NaN, +inf,
    or nothing but −inf in the row) or NoTokenAllowedError.
    """
    row = adjusted_row(logits, params, history, end_tokens, allowed)
    if params.is_greedy:
        return Support(row.values.new_ones(1, dtype=torch.float64), row.first_largest())
    row = row.wide()
    if 0 < params.top_k < len(row.values):
        ids = row.top(params.top_k)
        return _filtered(ids, Tempered(row.values[ids], row.peak, params.temperature).weights, params)
    everything = Tempered(row.values, row.peak, params.temperature)
    if params.min_p == 0 and params.top_p == 1:
        return everything
    weights = ScannedRow.of(everything.weights)
    if params.min_p == 0:
        ids, mass = _nucleus_and_more(weights, params.top_p)
    else:
        ids, mass = weights.at_least(params.min_p), None
    # By logit: a high temperature ties nothing there.
    ids = ids[row.values[ids].sort(descending=True, stable=True).indices]
    return _filtered(ids, weights.values[ids], params, mass)


def adjusted_row(
    logits: Tensor | ScannedRow,
    params: SamplingParams,
    history: History,
    end_tokens: Set[int] = frozenset(),
    allowed: Tensor | None = None,
) -> ScannedRow:
    """Logits [V] after all that can change their order, and what a look at them tells; not a copy if nothing does."""
    scanned = ScannedRow.of(logits)
    peak = float(scanned.peak)  # NaN goes before all else, so that one look checks the row
    if not math.isfinite(peak):
        culprit = "nothing but -inf" if peak == -math.inf else f"{peak}"
        raise BadLogitsError(f"the logits at generated position {history.position} hold {culprit}", history.position)
    banned = _banned_tokens(params, history, end_tokens)
    if allowed is None and not banned and not params.logit_bias and not params.has_penalties:
        return scanned
    row = scanned.values.to(torch.float64, copy=True)  # [V]
    if allowed is not None:
        row.masked_fill_(~allowed.to(row.device), -math.inf)
    if banned:
        row[banned] = -math.inf
    if params.logit_bias:
        row[list(params.logit_bias)] += row.new_tensor(list(params.logit_bias.values()))
    if params.has_penalties:
        _penalise(row, params, history)
    scanned = ScannedRow.of(row)
    if scanned.peak == -math.inf:
        raise NoTokenAllowedError(history.position)
    return scanned


def _banned_tokens(params: SamplingParams, history: History, end_tokens: Set[int]) -> list[int]:
    banned = {word[-1] for word in params.bad_word_ids if history.ends_with(tuple(word[:-1]))}
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


def _filtered(ids: Tensor, weights: Tensor, params: SamplingParams, mass: Tensor | None = None) -> Support:
    """What min-p and top-p keep of `ids` [M], likeliest first: the first few. `mass`: what the nucleus must reach."""
    count = int((weights >= params.min_p).sum())  # a count of booleans is exact
    if params.top_p < 1:
        kept = weights[:count]
        count = _nucleus_size(kept, params.top_p * total(kept) if mass is None else mass)
    ids, order = ids[:count].sort()
    return Support(weights[:count][order], ids)


def _nucleus_and_more(weights: ScannedRow, top_p: float) -> tuple[Tensor, Tensor]:
    """Ascending ids that hold at least the nucleus of `weights` [V], and the mass it must reach."""
    mass, floor = top_p * total(weights.values), 0.01
    while total(weights.values[ids := weights.at_least(floor)]) < mass:  # how deep it goes: sorting all of V is slow
        floor /= 32
    return ids, mass


def _nucleus_size(descending: Tensor, mass: Tensor) -> int:
    """How many of the likeliest tokens it takes to reach `mass`: those with less than `mass` before them."""
    before = descending.cumsum(0) - descending
    return int((before < mass).sum())  # a count of booleans is exact
