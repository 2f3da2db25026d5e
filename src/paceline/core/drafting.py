"""How a drafter picks tokens from its own logits: it is handed a `DraftSampler` and decides nothing itself.

Which kind depends on the request and the rule: a greedy request takes the arg-max, a coupled one races the
draft's distribution on the target's noise, the others sample without replacement and keep the distribution.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from paceline.core.path import PathSampler
from paceline.core.proposal import Row
from paceline.core.rng import Draws, without_replacement
from paceline.core.rows import ScannedRow, fit_vocabulary, normalised
from paceline.core.sampling import NoTokenAllowedError, adjusted_row


@dataclass(frozen=True, slots=True)
class Draw:
    """Siblings in draw order, and the row [V] they were sampled from if the rule needs it.

    `scores`, where asked for: of each sibling the log of the chance, as far as the draft knows, that it is accepted.
    """

    tokens: tuple[int, ...]
    probs: Row | None = None
    scores: tuple[float, ...] = ()


class DraftSampler(Protocol):
    """Picks drafted tokens after one path.

    `prunable`: what was drawn may be dropped or re-ranked. Of tokens drawn by chance of their own none may be.
    """

    prunable: ClassVar[bool]

    def draw(self, logits: Tensor, k: int = 1) -> Draw:
        """Up to k distinct siblings from the draft's logits; ids the target lacks are never drawn.

        `logits` [V_draft] may be longer or shorter than the target's vocabulary (padding). Fewer than k come
        back, or none, where fewer are possible. Raises BadLogitsError on NaN.
        """

    def scored(self, logits: Tensor, k: int) -> Draw:
        """`draw` with scores."""

    def advance(self, *tokens: int) -> Self:
        """The sampler after `tokens`, for the next level."""


@dataclass(frozen=True, slots=True)
class TopDrafts:
    """The k likeliest tokens: point masses. Scores: log q."""

    path: PathSampler
    prunable: ClassVar[bool] = True

    def draw(self, logits: Tensor, k: int = 1) -> Draw:
        row = self._row(logits)
        return Draw(()) if row is None else Draw(tuple(_likeliest(row, k).tolist()))

    def scored(self, logits: Tensor, k: int) -> Draw:
        row = self._row(logits)
        if row is None:
            return Draw(())
        ids = _likeliest(row, k)
        scores = row.values[ids].double() - row.values.double().logsumexp(0)
        return Draw(tuple(ids.tolist()), scores=tuple(scores.tolist()))

    def _row(self, logits: Tensor) -> ScannedRow | None:
        path = self.path
        logits = fit_vocabulary(logits, path.vocab_size)
        allowed = path.constraint.allowed(path.state)
        try:
            return adjusted_row(logits, path.params, path.history, path.end_tokens, allowed)
        except NoTokenAllowedError:
            return None

    def advance(self, *tokens: int) -> "TopDrafts":
        return TopDrafts(self.path.advance(*tokens))


@dataclass(frozen=True, slots=True)
class CoupledDrafts:
    """The first k finishers of the race the target will run: same noise, the draft's weights.

    Scores: log softmax of log q + g, since the race that the target runs differs from this one in log p − log q alone.
    """

    path: PathSampler
    prunable: ClassVar[bool] = True

    def draw(self, logits: Tensor, k: int = 1) -> Draw:
        path = self.path
        try:
            support = path.support(fit_vocabulary(logits, path.vocab_size))
        except NoTokenAllowedError:
            return Draw(())
        if k == 1:
            return Draw((path.noise.race(support),))
        return Draw(tuple(path.noise.race_top(support.dense(path.vocab_size), k)))

    def scored(self, logits: Tensor, k: int) -> Draw:
        weights = _weights(self.path, logits)
        if weights is None:
            return Draw(())
        finish = self.path.noise.finish(weights, k)
        return Draw(finish.tokens, scores=finish.log_shares)

    def advance(self, *tokens: int) -> "CoupledDrafts":
        return CoupledDrafts(self.path.advance(*tokens))


@dataclass(frozen=True, slots=True)
class SampledDrafts:
    """Sampled without replacement with a chance of their own; the row goes along for the ratio p/q. Scores: log q."""

    path: PathSampler
    draws: Draws = field(compare=False)
    prunable: ClassVar[bool] = False

    def draw(self, logits: Tensor, k: int = 1) -> Draw:
        weights = _weights(self.path, logits)
        if weights is None:
            return Draw(())
        return Draw(tuple(without_replacement(weights, k, self.draws)), normalised(weights))

    def scored(self, logits: Tensor, k: int) -> Draw:
        drawn = self.draw(logits, k)
        if drawn.probs is None:
            return drawn
        return replace(drawn, scores=tuple(drawn.probs[list(drawn.tokens)].log().tolist()))

    def advance(self, *tokens: int) -> "SampledDrafts":
        return SampledDrafts(self.path.advance(*tokens), self.draws)


def _likeliest(row: ScannedRow, k: int) -> Tensor:
    """Ids [≤ k] of the possible tokens, likeliest first."""
    ids = row.first_largest() if k == 1 else row.top(k)
    return ids[row.values[ids] > -torch.inf]


def _weights(path: PathSampler, logits: Tensor) -> Tensor | None:
    """q [V] by the request's own parameters; None where a constraint leaves the draft no token."""
    try:
        return path.weights(fit_vocabulary(logits, path.vocab_size))
    except NoTokenAllowedError:
        return None
