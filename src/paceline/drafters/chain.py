"""A chain in the making, and chains drafted by a part of the target itself. Not a method: drafters share it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.drafting import DraftSampler
from paceline.core.proposal import Proposal
from paceline.drafters.base import SequenceView
from paceline.models.cache import SequenceCache
from paceline.models.decoder import Decoder, LayerStep, Segment

DEFAULT_CONFIDENCE = 0.4  # transformers' too


@dataclass(slots=True)
class Chain:
    """Drafted tokens, and the rows [V] they were sampled from if the rule needs them.

    It ends after the token with which the product of its rows' largest probabilities falls below `least_chance`:
    settled by distributions alone, and the token drawn is kept, so what is drafted stays unbiased.
    """

    sampler: DraftSampler
    budget: int
    least_chance: float = 0.0
    tokens: list[int] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    chance: float = 1.0
    open: bool = True

    def draw(self, logits: torch.Tensor) -> None:
        drawn = self.sampler.draw(logits)
        if not drawn.tokens:  # a constraint leaves the draft's vocabulary no token
            self.open = False
            return
        self.tokens.append(drawn.tokens[0])
        if drawn.probs is not None:
            self.rows.append(drawn.probs)
        self.sampler = self.sampler.advance(drawn.tokens[0])
        if self.least_chance > 0:
            self.chance *= confidence(logits)
        self.open = len(self.tokens) < self.budget and self.chance >= self.least_chance

    def proposal(self, hidden: torch.Tensor | None = None) -> Proposal:
        return Proposal.chain(self.tokens, self.rows or None, hidden)


@dataclass(slots=True)
class OwnDraft:
    """A chain drafted in the target's own cache; hidden: after the last layer that drafts, of each row it was fed."""

    chain: Chain
    cache: SequenceCache
    last: int
    hidden: list[torch.Tensor] = field(default_factory=list)

    def take(self, hidden: torch.Tensor, logits: torch.Tensor, min_confidence: float) -> None:
        """What came of feeding `last`. Whether to go on is settled by the distribution, before anything is drawn."""
        self.cache.commit([0])
        self.hidden.append(hidden)
        if min_confidence > 0 and confidence(logits) < min_confidence:
            self.chain.open = False
            return
        self.chain.draw(logits)
        self.last = self.chain.tokens[-1] if self.chain.tokens else self.last

    def proposal(self) -> Proposal:
        return self.chain.proposal()

    def early_proposal(self) -> Proposal:
        """With the hidden states, for verification to go on from."""
        return self.chain.proposal(torch.stack(self.hidden) if self.hidden else None)


def draft_in_place(
    target: Decoder,
    layers: Sequence[LayerStep],
    read: Callable[[torch.Tensor], torch.Tensor],
    sequences: Sequence[SequenceView],
    budgets: Sequence[int],
    min_confidence: float,
) -> list[OwnDraft]:
    """Draft with `layers` of the target, for all sequences together; `read` makes logits [n, V] of their states [n, d].

    They read the target's committed rows as if those were their own, and write only behind them: the root's row and
    those of drafted tokens, all of which the next target pass writes again.
    """
    drafts = [
        OwnDraft(Chain(sequence.draft_sampler, budget), sequence.cache.beyond(), sequence.token_ids[-1])
        for sequence, budget in zip(sequences, budgets, strict=True)
    ]
    live = [draft for draft in drafts if draft.chain.budget > 0]
    while live:
        out = target.forward([Segment(draft.cache, [draft.last]) for draft in live], layers=layers)
        for draft, hidden, logits in zip(live, out.hidden, read(out.hidden), strict=True):
            draft.take(hidden, logits, min_confidence)
        live = [draft for draft in live if draft.chain.open]
    return drafts


def confidence(logits: torch.Tensor) -> float:
    """The likeliest token's probability, at temperature 1."""
    row = logits.float()
    return float(1 / (row - row.max()).exp().sum())
