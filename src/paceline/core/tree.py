"""The shape of a draft tree: plain functions of its `parents` list.

A node is an index into the proposal; `ROOT` (−1) stands for the last committed token. Parents come before
children, so one pass in index order visits every node after all its ancestors. Trees are small (tens of
nodes) and live on the host; only the mask becomes a tensor.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

ROOT = -1


def check_parents(parents: Sequence[int]) -> None:
    """Raise ValueError unless every node's parent is the root or an earlier node."""
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise ValueError(f"node {node} has parent {parent}: a parent is -1 or an earlier node")


@lru_cache(maxsize=1024)
def chain(length: int) -> tuple[int, ...]:
    """Parents of so many nodes, each under the one before it."""
    return tuple(range(ROOT, length - 1))


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Distance of each node from the root; a child of the root has depth 1 and the first free position."""
    result: list[int] = []
    for parent in parents:
        result.append(1 if parent == ROOT else result[parent] + 1)
    return tuple(result)


def path_to(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """Nodes from the root's child down to `node`, both included; empty for the root itself."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))


def ancestor_lists(parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each node its path from the root, itself included: the draft keys that its query may see."""
    result: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        above = () if parent == ROOT else result[parent]
        result.append((*above, node))
    return tuple(result)


def ancestor_mask(parents: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Boolean [N, N]: entry (i, j) is true when node j is node i or one of its ancestors."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)  # [N, N]
    for node, path in enumerate(ancestor_lists(parents)):
        mask[node, list(path)] = True
    return mask.to(device)


def children_of(parents: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Children of every node that has some, the root (−1) included, in index (that is, draw) order."""
    result: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        result.setdefault(parent, []).append(node)
    return {parent: tuple(nodes) for parent, nodes in result.items()}


def leaves(parents: Sequence[int]) -> tuple[int, ...]:
    """Nodes without children."""
    inner = set(parents)
    return tuple(node for node in range(len(parents)) if node not in inner)


def is_chain(parents: Sequence[int]) -> bool:
    """True when every node hangs under the one before it (also for no nodes at all)."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def closed_under_parents(parents: Sequence[int], nodes: Iterable[int]) -> bool:
    """True when the parent of every node of the set is in the set too, so that the set is again a tree."""
    kept = {ROOT, *nodes}
    return all(parents[node] in kept for node in kept if node != ROOT)
