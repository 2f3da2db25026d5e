"""What the target thought likely after a token the last time is drafted when the token comes again.

Idea: of every token seen, the k likeliest successors of its last occurrence are kept (in a prompt: the one that came).
A tree of fixed shape is filled from them breadth first: the node of rank r under a token takes its r-th successor.
The shape has the nodes that are likeliest to be reached, going by how often each rank is right.
Cost a step: a few dictionary look-ups, and the tree's rows in the target's pass. Pays where rows are cheap.
Lossless under every lossless rule but `block`, which takes chains: drafts are point masses.
Source: Luo et al., 2408.08696; theirs keeps one matrix for all requests, ours one for each.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from paceline.core.proposal import Proposal
from paceline.core.tree import ROOT
from paceline.drafters.base import Drafter, Features, Needs, SequenceView
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.stateless import Stateless
from paceline.models.load import LoadedModel

DEFAULT_SUCCESSORS = 8
# Chance that the successor of rank r is the next token: those of published trees, roughly; only their ratios matter.
RANKS = (0.55, 0.14, 0.07, 0.045, 0.03, 0.022, 0.017, 0.014)


@dataclass(slots=True)
class _State:
    """One request's adjacency lists, likeliest successor first."""

    successors: dict[int, list[int]] = field(default_factory=dict)
    indexed: int = 0  # the text's own pairs that end before this are in

    def learn(self, text: Sequence[int], most: int) -> None:
        """What did follow a token goes first."""
        for end in range(max(self.indexed, 1), len(text)):
            token, successor = text[end - 1], text[end]
            others = [other for other in self.successors.get(token, ()) if other != successor]
            self.successors[token] = [successor, *others][:most]
        self.indexed = max(self.indexed, len(text))


class TokenRecyclingDrafter(Stateless):
    """Keeps `num_successors` of every token, for each request by itself."""

    name = "token_recycling"

    def __init__(self, num_successors: int = DEFAULT_SUCCESSORS) -> None:
        self.num_successors = num_successors
        self.needs = Needs(top_tokens=num_successors, trees=True)
        self._states: dict[int, _State] = {}

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        if features.top_tokens is not None:  # of a prompt nobody asks them: its pairs are learned from the text
            state = self._states.setdefault(sequence.request_id, _State())
            state.learn(sequence.token_ids, self.num_successors)  # first: what is older, whenever it was asked last
            state.successors.update(zip(tokens, features.top_tokens.tolist(), strict=True))

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: SequenceView, budget: int) -> Proposal:
        state = self._states.setdefault(sequence.request_id, _State())
        state.learn(sequence.token_ids, self.num_successors)
        tokens: list[int] = []
        parents: list[int] = []
        filled = {ROOT: (ROOT, sequence.token_ids[-1])}  # nodes of the shape: number in the proposal, token
        for node, place in enumerate(shape(budget, self.num_successors)):
            if place.parent not in filled:
                continue
            parent, token = filled[place.parent]
            successors = state.successors.get(token, ())
            if place.rank < len(successors):
                filled[node] = len(tokens), successors[place.rank]
                tokens.append(successors[place.rank])
                parents.append(parent)
        return Proposal(tuple(tokens), tuple(parents))

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        self.release(sequence)

    def release(self, sequence: SequenceView) -> None:
        self._states.pop(sequence.request_id, None)


@dataclass(frozen=True, slots=True)
class Place:
    """A node of the shape: the successor of this rank under its parent."""

    parent: int
    rank: int


@cache
def shape(num_nodes: int, width: int) -> tuple[Place, ...]:
    """The tree likeliest to hold the next tokens, breadth first: best first is optimal (2402.12374)."""
    tail = RANKS[-1] / 2
    chance = [*RANKS, *(tail / (1 + rank) for rank in range(width))][:width]
    chosen: list[tuple[int, Place]] = []  # depth and place
    heap = [(-chance[0], 1, ROOT, 0)]
    while len(chosen) < num_nodes:
        value, depth, parent, rank = heapq.heappop(heap)
        heapq.heappush(heap, (value * chance[0], depth + 1, len(chosen), 0))
        if rank + 1 < width:
            heapq.heappush(heap, (value / chance[rank] * chance[rank + 1], depth, parent, rank + 1))
        chosen.append((depth, Place(parent, rank)))
    order = sorted(range(num_nodes), key=lambda node: chosen[node][0])
    number = {ROOT: ROOT} | {node: i for i, node in enumerate(order)}
    return tuple(Place(number[chosen[node][1].parent], chosen[node][1].rank) for node in order)


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    return TokenRecyclingDrafter(config.recycled_successors or DEFAULT_SUCCESSORS)
