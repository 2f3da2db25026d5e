"""Which nodes a draft tree has: static trees as lists of paths, the best one for measured acceptance, dynamic ones.

A path lists ranks from the root down: (0, 2) is the third child of the first child. Ranks are draw order, so a node
comes with its elder siblings as well as with its parent: a tree then never drops a draw, and any rule may take it.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from paceline.core.drafting import DraftSampler
from paceline.core.growth import DynamicGrowth, Growth, StaticGrowth
from paceline.errors import PacelineError
from paceline.values import shown

Path = tuple[int, ...]


class TreeShape(Protocol):
    """How a method's trees grow."""

    def growth(self, sampler: DraftSampler, budget: int) -> Growth:
        """A tree to be grown after one committed token, of at most `budget` nodes."""

    def within(self, depth: int) -> Self:
        """The same with at most `depth` levels."""

    @property
    def branches(self) -> bool:
        """Whether its trees are anything but chains."""


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A fixed tree. `paths` are ordered so that the first n of them are a tree too, the best of n nodes."""

    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> "StaticTree":
        """From paths in order of worth. Raises PacelineError where a parent or an elder sibling is not listed."""
        listed = [tuple(path) for path in paths]
        known, ordered = set(listed), dict[Path, None]()
        for path in listed:
            if not path or min(path) < 0:
                raise PacelineError(f"a draft tree's path is {shown(list(path))}; it lists ranks, counted from 0")
            for needed in _on_the_way(path):
                if needed not in known:
                    raise PacelineError(
                        f"the draft tree has {shown(list(path))} but not {shown(list(needed))}",
                        hint="a node comes with its parent and with its siblings of lower rank",
                    )
                ordered.setdefault(needed)
        return cls(tuple(ordered))

    @classmethod
    def chain(cls, length: int) -> "StaticTree":
        """The likeliest token, `length` times."""
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    def first(self, count: int) -> "StaticTree":
        """Its best `count` nodes."""
        return self if count >= len(self.paths) else StaticTree(self.paths[:count])

    def within(self, depth: int) -> "StaticTree":
        return StaticTree(tuple(path for path in self.paths if len(path) <= depth))

    @property
    def branches(self) -> bool:
        return any(path[-1] for path in self.paths)

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    def widths(self) -> dict[Path, int]:
        """Number of children of every node that has some; () is the root."""
        result: dict[Path, int] = {}
        for path in self.paths:
            result[path[:-1]] = result.get(path[:-1], 0) + 1
        return result

    def growth(self, sampler: DraftSampler, budget: int) -> Growth:
        return StaticGrowth(sampler, self.first(budget).widths())


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """EAGLE-2's tree (2406.16858): expand the likeliest `top_k` nodes of each level, keep the likeliest of all.

    Defaults: EAGLE's code, whose `depth` does not count the root's children. Tokens that may not be dropped again
    grow `unpruned` instead.
    """

    top_k: int = 10
    depth: int = 8
    unpruned: StaticTree = StaticTree(())

    def within(self, depth: int) -> "DynamicTree":
        return replace(self, depth=min(depth, self.depth), unpruned=self.unpruned.within(depth))

    @property
    def branches(self) -> bool:
        return self.top_k > 1 or self.unpruned.branches

    def growth(self, sampler: DraftSampler, budget: int) -> Growth:
        if not sampler.prunable:
            return self.unpruned.within(self.depth).growth(sampler, budget)
        return DynamicGrowth(sampler, budget, self.top_k, self.depth)


def optimal_tree(acceptance: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """The static tree of `num_nodes` nodes that yields most tokens a pass.

    `acceptance[d][r]`: how often the child of rank r is accepted under a node that was, at depth d + 1 and over all
    passes (Medusa's accuracy of head and rank; one row repeated is Sequoia's positional acceptance). A node is worth
    the product along its path, a sum over nodes is the tokens beyond the first: nodes are taken best first, which is
    optimal because worth falls along a path and from sibling to sibling. A rank that measured better than the one
    before it counts as that one. Sources: 2401.10774, §3.4; 2402.12374, §4.1.
    """
    rows = [_falling(row) for row in acceptance]
    heap: list[tuple[float, Path]] = []

    def offer(path: Path, worth_of_parent: float) -> None:
        depth, rank = len(path), path[-1]
        if depth <= len(rows) and rank < len(rows[depth - 1]):
            heapq.heappush(heap, (-worth_of_parent * rows[depth - 1][rank], path))

    worths: dict[Path, float] = {(): 1.0}
    offer((0,), 1.0)
    while heap and len(worths) <= num_nodes:
        negative, path = heapq.heappop(heap)
        worths[path] = -negative
        offer((*path, 0), worths[path])
        offer((*path[:-1], path[-1] + 1), worths[path[:-1]])
    return StaticTree(tuple(path for path in worths if path))


def _falling(row: Sequence[float]) -> list[float]:
    result: list[float] = []
    for value in row:
        if not 0 <= value <= 1:
            raise PacelineError(f"an acceptance is {value}; it must be from 0 to 1")
        result.append(min([value, *result[-1:]]))
    return result


def _on_the_way(path: Path) -> Iterable[Path]:
    """The node's ancestors from the root down, each after its elder siblings; last the node itself."""
    for depth in range(1, len(path) + 1):
        for rank in range(path[depth - 1] + 1):
            yield (*path[: depth - 1], rank)


def _parsed(text: str) -> StaticTree:
    return StaticTree.of(tuple(int(rank) for rank in path) for path in text.split())


# Medusa's published tree for Vicuna 7B ("mc_sim_7b_63"), best node first.
MEDUSA_TREE = _parsed(
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 "
    "011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
)

# EAGLE-1's published tree; its order, which was not, is that of worth at acceptances .6, .2, .08, .04 by rank.
EAGLE_TREE = _parsed("0 00 000 1 0000 01 10 2 00000 001 010 100 02 20 0001 11 3 002 020 00001 011 30 0002 21 021")
