"""A draft tree growing level by level: the drafter brings logits, the sampler picks, the shape says where to go on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from paceline.core.drafting import DraftSampler, Draw
from paceline.core.proposal import DenseDraftProbs, Proposal, Row
from paceline.core.tree import ROOT


@dataclass(slots=True)
class Nodes:
    """The nodes so far, in the order they were drawn: parents before children, siblings together."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)  # by parent, what its children were sampled from

    def hang(self, parent: int, drawn: Draw) -> range:
        """Hang siblings under `parent`; the new nodes."""
        added = range(len(self.tokens), len(self.tokens) + len(drawn.tokens))
        self.tokens.extend(drawn.tokens)
        self.parents.extend(parent for _ in added)
        if drawn.probs is not None and added:
            self.rows[parent] = drawn.probs
        return added


class Growth(Protocol):
    """One tree in the making."""

    nodes: Nodes
    frontier: list[int]
    """Nodes whose children are drawn next; the root (−1) at first, none when the tree is done."""
    most_rows: int
    """How many nodes but the root will stand there, at most: known before anything is drawn."""

    def grow(self, logits: Sequence[Tensor]) -> None:
        """Draw the children of every frontier node from its row [V_draft], and move the frontier on."""

    def proposal(self) -> Proposal:
        """The tree so far."""


class StaticGrowth:
    """Grows a tree whose nodes have set numbers of children, by path (ranks from the root down)."""

    def __init__(self, sampler: DraftSampler, widths: Mapping[tuple[int, ...], int]) -> None:
        self.nodes = Nodes()
        self.frontier = [ROOT] if widths else []
        self.most_rows = max(len(widths) - 1, 0)
        self._widths = widths
        self._paths: dict[int, tuple[int, ...]] = {ROOT: ()}
        self._samplers = {ROOT: sampler}

    def grow(self, logits: Sequence[Tensor]) -> None:
        parents, self.frontier = self.frontier, []
        for parent, row in zip(parents, logits, strict=True):
            path, sampler = self._paths[parent], self._samplers.pop(parent)
            for rank, node in enumerate(self.nodes.hang(parent, sampler.draw(row, self._widths[path]))):
                self._paths[node] = (*path, rank)
                if self._paths[node] in self._widths:
                    self.frontier.append(node)
                    self._samplers[node] = sampler.advance(self.nodes.tokens[node])

    def proposal(self) -> Proposal:
        nodes = self.nodes
        draft_probs = DenseDraftProbs(tuple(nodes.rows), tuple(nodes.rows.values())) if nodes.rows else None
        return Proposal(tuple(nodes.tokens), tuple(nodes.parents), draft_probs)


class DynamicGrowth:
    """Grows where the draft is surest: a node's score is the sum of its path's (2406.16858, §4).

    Every frontier node gets `top_k` children, the `top_k` best of a level are the next frontier, and of all nodes the
    `budget` best make the tree. What is drawn is dropped again, so the sampler must be `prunable`.
    """

    def __init__(self, sampler: DraftSampler, budget: int, top_k: int, depth: int) -> None:
        self.nodes = Nodes()
        self.frontier = [ROOT] if budget > 0 and depth > 0 else []
        self.most_rows = max(depth - 1, 0) * min(top_k, budget)
        self._budget, self._top_k, self._levels_left = budget, top_k, depth
        self._scores: list[float] = []
        self._samplers = {ROOT: sampler}

    def grow(self, logits: Sequence[Tensor]) -> None:
        level: dict[int, DraftSampler] = {}  # new nodes, each with its parent's sampler
        for parent, row in zip(self.frontier, logits, strict=True):
            sampler = self._samplers[parent]
            drawn = sampler.scored(row, self._top_k)
            before = 0.0 if parent == ROOT else self._scores[parent]
            level.update(dict.fromkeys(self.nodes.hang(parent, drawn), sampler))
            self._scores.extend(before + min(score, 0.0) for score in drawn.scores)  # rounding may leave log 1 above 0
        self._levels_left -= 1
        # Under a node that is not among the best already nothing can be: a score only falls along a path.
        best = self._best(range(len(self._scores)), self._budget) if self._levels_left > 0 else []
        self.frontier = sorted(self._best([node for node in best if node in level], self._top_k))
        self._samplers = {node: level[node].advance(self.nodes.tokens[node]) for node in self.frontier}

    def _best(self, nodes: Sequence[int], count: int) -> list[int]:
        """Of equals the earlier, so a parent goes before its child."""
        return sorted(nodes, key=lambda node: (-self._scores[node], node))[:count]

    def proposal(self) -> Proposal:
        kept = sorted(self._best(range(len(self._scores)), self._budget))
        index = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        tokens, parents = self.nodes.tokens, self.nodes.parents
        return Proposal(tuple(tokens[node] for node in kept), tuple(index[parents[node]] for node in kept))
