"""What a drafter hands over (`Proposal`) and what verification hands back (`Verdict`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import index
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from paceline.core import tree
from paceline.core.tree import ROOT

# A row over the vocabulary: torch float64 [V] in the product, numpy objects (fractions) in exact tests.
Row = Any


class DraftProbs(Protocol):
    """The distributions that sampled children were drawn from: one row per parent, shared by the siblings."""

    @property
    def parents(self) -> tuple[int, ...]:
        """Nodes (or the root, −1) whose children were sampled."""

    def row(self, parent: int) -> Row:
        """Row [V] that the first child of `parent` was drawn from, before any sibling was taken out."""

    def renumbered(self, new_index: Mapping[int, int]) -> Self:
        """The rows of the parents that are keys of `new_index`, under their new numbers."""


@dataclass(frozen=True, slots=True)
class DenseDraftProbs:
    """One full row per sampled-from parent."""

    parents: tuple[int, ...]
    rows: Sequence[Row] | Tensor  # [P, V]

    def __post_init__(self) -> None:
        _check_rows(self.parents, len(self.rows))

    def row(self, parent: int) -> Row:
        return self.rows[self.parents.index(parent)]

    def renumbered(self, new_index: Mapping[int, int]) -> "DenseDraftProbs":
        kept = [i for i, parent in enumerate(self.parents) if parent in new_index]
        return DenseDraftProbs(tuple(new_index[self.parents[i]] for i in kept), tuple(self.rows[i] for i in kept))


@dataclass(frozen=True, slots=True)
class SparseDraftProbs:
    """Ids and probabilities of the few tokens each parent's children could have been (zero elsewhere)."""

    parents: tuple[int, ...]
    token_ids: Tensor  # [P, S] int64
    probs: Tensor  # [P, S]
    vocab_size: int

    def __post_init__(self) -> None:
        _check_rows(self.parents, len(self.token_ids))
        if self.token_ids.shape != self.probs.shape:
            raise ValueError(f"{tuple(self.token_ids.shape)} ids with {tuple(self.probs.shape)} probabilities")

    def row(self, parent: int) -> Row:
        i = self.parents.index(parent)
        row = torch.zeros(self.vocab_size, dtype=torch.float64, device=self.probs.device)  # [V]
        return row.index_put_((self.token_ids[i],), self.probs[i].double(), accumulate=True)

    def renumbered(self, new_index: Mapping[int, int]) -> "SparseDraftProbs":
        kept = [i for i, parent in enumerate(self.parents) if parent in new_index]
        parents = tuple(new_index[self.parents[i]] for i in kept)
        return SparseDraftProbs(parents, self.token_ids[kept], self.probs[kept], self.vocab_size)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What is known of a tree from the parents of its verified nodes. siblings: parents of several, and these."""

    children: Mapping[int, tuple[int, ...]]
    siblings: tuple[tuple[int, tuple[int, ...]], ...]
    is_chain: bool
    depth: int


@lru_cache(maxsize=4096)
def _shape_of(parents: tuple[int, ...], num_verified: int) -> _Shape:
    """Shapes are few, and come again step after step. Raises ValueError for what is no tree."""
    tree.check_parents(parents)
    verified = parents[:num_verified]
    children = tree.children_of(verified)
    siblings = tuple((parent, nodes) for parent, nodes in children.items() if len(nodes) > 1)
    return _Shape(children, siblings, tree.is_chain(verified), max(tree.depths(verified), default=0))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree of drafted tokens under the last committed one; siblings stand in the order they were drawn.

    `draft_probs` is None when every token is a point mass (chosen by rule, not by chance); otherwise it has a
    row for each parent whose children were *sampled without replacement*. The last `num_scratch` nodes are
    forwarded but never verified. `pruned` says that sampled nodes were dropped or re-ranked after they were
    drawn. `hidden` [m, d]: states at an early layer of the step's first m rows (the root, then nodes in order), where
    the drafter computed them on the target's own cache. `score`: how good the drafter thinks it is, on a
    scale of its own; more is better.
    Tokens and parents of any integer type (numpy's, a 0-d tensor's) become int.
    Raises ValueError or TypeError where the invariants do not hold: that is a drafter's fault, not a user's.
    """

    tokens: tuple[int, ...] = ()  # [N]
    parents: tuple[int, ...] = ()  # [N]
    draft_probs: DraftProbs | None = None
    num_scratch: int = 0
    pruned: bool = False
    hidden: Tensor | None = field(default=None, compare=False)
    score: float = field(default=0.0, compare=False)
    _shape: "_Shape" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("tokens", "parents"):
            object.__setattr__(self, name, tuple(map(int, map(index, getattr(self, name)))))
        object.__setattr__(self, "num_scratch", int(index(self.num_scratch)))
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        if min(self.tokens, default=0) < 0:
            raise ValueError(f"token id {min(self.tokens)} is negative")
        if not 0 <= self.num_scratch <= len(self.tokens):
            raise ValueError(f"{self.num_scratch} scratch nodes among {len(self.tokens)} nodes")
        if self.hidden is not None and len(self.hidden) > 1 + len(self.tokens):
            raise ValueError(f"{len(self.hidden)} hidden states for the root and {len(self.tokens)} nodes")
        if self.hidden is not None and not tree.is_chain(self.parents):
            raise ValueError("hidden states of a tree: only a chain can be gone on with")
        if self.draft_probs is not None and any(
            not ROOT <= parent < self.num_verified for parent in self.draft_probs.parents
        ):
            raise ValueError(f"draft_probs name {self.draft_probs.parents} among {self.num_verified} nodes")
        shape = _shape_of(self.parents, self.num_verified)
        for parent, siblings in shape.siblings:
            drawn = [self.tokens[node] for node in siblings]
            if len(set(drawn)) != len(drawn):
                raise ValueError(f"two children of node {parent} hold the same token: {drawn}")
        object.__setattr__(self, "_shape", shape)

    @classmethod
    def empty(cls) -> "Proposal":
        """No draft: verification then is plain decoding."""
        return _EMPTY

    @classmethod
    def chain(
        cls,
        tokens: Iterable[int],
        rows: Sequence[Row] | Tensor | None = None,
        hidden: Tensor | None = None,
        score: float = 0.0,
    ) -> "Proposal":
        """Tokens one after another; `rows` [N, V]: what each was drawn from, None for point masses."""
        tokens = tuple(tokens)
        parents = tree.chain(len(tokens))
        draft_probs = None if rows is None else DenseDraftProbs(parents, rows)
        return cls(tokens, parents, draft_probs, hidden=hidden, score=score)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_verified(self) -> int:
        """Nodes that verification may accept: all but the scratch nodes at the end."""
        return len(self.tokens) - self.num_scratch

    @property
    def is_chain(self) -> bool:
        """True when the verified nodes form one path (the empty proposal does)."""
        return self._shape.is_chain

    @property
    def depth(self) -> int:
        """Most tokens that can be accepted."""
        return self._shape.depth

    def children(self, node: int) -> tuple[int, ...]:
        """Verified children of a node (or of the root, −1), in draw order."""
        return self._shape.children.get(node, ())

    def child_with(self, node: int, token: int) -> int | None:
        """The verified child of `node` that holds `token`."""
        return next((child for child in self.children(node) if self.tokens[child] == token), None)

    def draft_row(self, node: int) -> Row | None:
        """Row [V] that the children of `node` were sampled from; None where they are point masses."""
        if self.draft_probs is None or node not in self.draft_probs.parents:
            return None
        return self.draft_probs.row(node)

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Tokens from the root's child down to `node`."""
        return tuple(self.tokens[n] for n in tree.path_to(self.parents, node))

    def prune(self, keep: Iterable[int]) -> "Proposal":
        """Only the nodes of `keep`, in index order; marked as pruned if any token was sampled.

        Dropping a sampled node skews the law of those that stay (EAGLE-2's re-ranking is for point masses),
        so the rules that rely on draft_probs refuse the result. Raises ValueError if a kept node loses its
        parent.
        """
        kept = sorted(set(keep))
        if not tree.closed_under_parents(self.parents, kept):
            raise ValueError(f"nodes {kept} do not form a tree: a kept node loses its parent")
        if len(kept) == len(self):
            return self
        new_index = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        return replace(
            self,
            tokens=tuple(self.tokens[node] for node in kept),
            parents=tuple(new_index[self.parents[node]] for node in kept),
            draft_probs=None if self.draft_probs is None else self.draft_probs.renumbered(new_index),
            num_scratch=sum(node >= self.num_verified for node in kept),
            pruned=self.pruned or self.draft_probs is not None,
            hidden=self.hidden[: 1 + len(kept)] if self.hidden is not None and kept == [*range(len(kept))] else None,
        )


_EMPTY = Proposal()


def check_proposal(proposal: Proposal, budget: int, vocab_size: int) -> None:
    """Raises ValueError, a drafter's fault, for more than `budget` nodes or a token outside the vocabulary."""
    if len(proposal) > max(budget, 0):
        raise ValueError(f"{len(proposal)} drafted nodes, {budget} were asked for")
    if proposal.tokens and max(proposal.tokens) >= vocab_size:
        raise ValueError(f"token {max(proposal.tokens)} was drafted, the vocabulary has {vocab_size}")


def check_states(hidden: Tensor | None, like: Tensor) -> None:
    """Raises ValueError, a drafter's fault, for early states [m, d] that no pass with rows `like` [0, d] takes up."""
    if hidden is None:
        return
    if (hidden.shape[1:], hidden.dtype, hidden.device) != (like.shape[1:], like.dtype, like.device):
        raise ValueError(
            f"hidden states {tuple(hidden.shape)}, {hidden.dtype} on {hidden.device}; "
            f"the target's have {like.shape[1]} values, {like.dtype} on {like.device}"
        )
    if not hidden.isfinite().all():
        raise ValueError("hidden states hold a value that is not finite")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was accepted: the path (node indices from the root down) and the target's own token after it."""

    path: tuple[int, ...]
    next_token: int

    def tokens(self, proposal: Proposal) -> tuple[int, ...]:
        """The tokens this step yields, in order: the accepted ones, then `next_token`. Never empty."""
        return (*(proposal.tokens[node] for node in self.path), self.next_token)


class ProposalBuilder:
    """Collects a tree draw by draw and remembers which draws were sampled."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, tokens: Iterable[int], probs: Row | None = None) -> range:
        """Hang `tokens` under `parent` in draw order; `probs`: their draft row. Returns the new nodes."""
        first = len(self._tokens)
        self._tokens.extend(tokens)
        added = range(first, len(self._tokens))
        if parent in self._parents[:first] and added:
            raise ValueError(f"node {parent} already has children: all siblings come from one draw")
        self._parents.extend(parent for _ in added)
        if probs is not None and added:
            self._rows[parent] = probs
        return added

    def build(self, num_scratch: int = 0, hidden: Tensor | None = None) -> Proposal:
        """The proposal collected so far."""
        draft_probs = DenseDraftProbs(tuple(self._rows), tuple(self._rows.values())) if self._rows else None
        return Proposal(tuple(self._tokens), tuple(self._parents), draft_probs, num_scratch, hidden=hidden)


def _check_rows(parents: tuple[int, ...], num_rows: int) -> None:
    if len(parents) != num_rows or len(set(parents)) != num_rows:
        raise ValueError(f"{num_rows} draft rows for parents {parents}: one row for each parent")
