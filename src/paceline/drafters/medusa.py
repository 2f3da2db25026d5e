"""Medusa: heads on the target's last hidden state each guess one token further ahead; a tree joins their guesses.

Idea: head k reads the hidden state of the last token the target has processed and predicts the token k + 2 places on,
without a look at those between. The best ranks of all heads are combined in a sparse static tree, and attention along
paths lets one pass verify them all. Cost a step: one small layer and an output layer a head, whatever the tree's size.
Pays where a pass over the tree's rows costs little more than one over a single row.
Lossless under every lossless rule; `typical` is the published lossy one. Source: Cai et al. 2401.10774.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.growth import Growth
from paceline.core.proposal import Proposal
from paceline.core.tree_shapes import MEDUSA_TREE, TreeShape
from paceline.drafters.base import Drafter, Features, Needs, SequenceView
from paceline.drafters.config import SpeculativeConfig
from paceline.errors import PacelineError
from paceline.models.head_checkpoint import load_medusa
from paceline.models.heads import MedusaHeads
from paceline.models.load import LoadedModel
from paceline.models.origin import check_origin
from paceline.models.shipped import shipped_head


@dataclass(frozen=True, slots=True)
class _Seen:
    """How many tokens were observed, and the hidden state [d] of the last; None: of some other place."""

    length: int
    hidden: torch.Tensor | None


class MedusaDrafter:
    """Drafts trees of shape `tree`, as deep as there are heads."""

    name = "medusa"

    def __init__(self, heads: MedusaHeads, tree: TreeShape = MEDUSA_TREE) -> None:
        self.heads = heads
        self.tree = tree.within(len(heads.heads))
        self.needs = Needs(hidden_layers=(-1,), trees=self.tree.branches)
        self._seen: dict[int, _Seen] = {}

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        if tokens:
            before = self._seen.get(sequence.request_id, _Seen(0, None))
            # a copy: a view would keep the whole chunk's states alive
            self._seen[sequence.request_id] = _Seen(before.length + len(tokens), features.hidden[-1][-1].clone())

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        growing: dict[int, Growth] = {}
        states: list[torch.Tensor] = []
        for i, (sequence, budget) in enumerate(zip(sequences, budgets, strict=True)):
            hidden = self._hidden(sequence)
            if hidden is not None and budget > 0:
                states.append(hidden)
                growing[i] = self.tree.growth(sequence.draft_sampler, budget)
        for index in range(len(self.heads.heads)):
            if not any(growth.frontier for growth in growing.values()):
                break
            level = self.heads.logits(index, torch.stack(states))  # [n, V]
            for growth, row in zip(growing.values(), level, strict=True):
                growth.grow([row] * len(growth.frontier))  # a head does not know what was guessed before it
        return [growing[i].proposal() if i in growing else Proposal.empty() for i in range(len(sequences))]

    def _hidden(self, sequence: SequenceView) -> torch.Tensor | None:
        """The state before the last committed token, if it was observed."""
        seen = self._seen.get(sequence.request_id)
        return seen.hidden if seen is not None and seen.length == len(sequence.token_ids) - 1 else None

    def snapshot(self, sequence: SequenceView) -> Any:
        return self._seen.get(sequence.request_id)

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        """At another length than the snapshot's the hidden state is missing: drafts begin after the next token."""
        exact = snapshot is not None and snapshot.length == length
        self._seen[sequence.request_id] = snapshot if exact else _Seen(length, None)

    def discard(self, snapshot: Any) -> None:
        pass

    def mend(self, snapshots: Sequence[Any]) -> None:
        pass

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        seen = self._seen.get(sequence.request_id)
        if seen is not None:
            self._seen[child.request_id] = seen

    def release(self, sequence: SequenceView) -> None:
        self._seen.pop(sequence.request_id, None)


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    model = config.model or shipped_head("medusa", target)
    if model is None:
        raise PacelineError("method 'medusa' needs its heads", hint='"model": a folder or a Hub id')
    check_origin(model, target)
    heads, tree = load_medusa(model, target.decoder, config.draft_dtype), config.tree(MEDUSA_TREE)
    if tree is config.speculative_token_tree and tree.within(len(heads.heads)) != tree:
        raise PacelineError(
            f"speculative_token_tree has paths of more tokens than {model} has heads, {len(heads.heads)}",
            hint="a path takes a head a token",
        )
    return MedusaDrafter(heads, tree)
