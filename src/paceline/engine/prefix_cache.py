"""KV blocks of finished and running requests, found again by the tokens they were computed from.

A trie of full blocks: a node is 64 tokens and the pool block with their rows, under the node of the 64 before.
Bits of a row depend on its own path alone, so a hit changes nothing but time. What a drafter knew goes along:
a snapshot taken at a sequence's end serves every prefix of it.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.drafters.base import Drafter
from paceline.models.cache import KVPool
from paceline.ops.attention import BLOCK

logger = logging.getLogger("paceline.engine")


@dataclass(slots=True, eq=False)
class Snapshot:
    """A drafter's state, held by the nodes of the sequence it was taken from."""

    drafter: Drafter
    state: Any = None
    holders: int = 0


@dataclass(slots=True, eq=False)
class _Node:
    tokens: tuple[int, ...]
    parent: "_Node | None"
    block: int
    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)  # by the drafter's identity


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest known prefix: its blocks, and the drafter's state there (None: it has none)."""

    blocks: tuple[int, ...] = ()
    snapshot: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * BLOCK


class PrefixCache:
    """At most `max_blocks` blocks of `pool`; the least recently used goes first. 0 blocks: it holds nothing."""

    def __init__(self, pool: KVPool, max_blocks: int) -> None:
        self._pool = pool
        self._max_blocks = max_blocks
        self._root = _Node((), None, -1)
        # Least recent first. A path is touched from its end upwards, so a parent is always newer than its children.
        self._recency: OrderedDict[_Node, None] = OrderedDict()
        self._snapshots: set[Snapshot] = set()  # that some node holds

    @property
    def num_blocks(self) -> int:
        return len(self._recency)

    @property
    def num_evictable(self) -> int:
        """How many blocks `evict_one` could give back, one after another."""
        count, kept = 0, set[_Node | None]()
        for node in self._recency:  # children first
            if node in kept or self._pool.holders(node.block) > 1:
                kept.add(node.parent)
            else:
                count += 1
        return count

    def lookup(self, token_ids: Sequence[int], drafter: Drafter | None) -> Hit:
        """What is known of `token_ids`. A drafter that lives on the target's features must know the prefix, too."""
        path = self._path(token_ids)
        if drafter is not None and drafter.needs.hidden_layers:
            while path and id(drafter) not in path[-1].snapshots:
                path.pop()
        self._touch(path)
        snapshot = path[-1].snapshots.get(id(drafter)) if path else None
        return Hit(tuple(node.block for node in path), None if snapshot is None else snapshot.state)

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Keep the full blocks of `token_ids`, whose rows lie in `blocks`."""
        path, node = [], self._root
        for number in range(min(len(token_ids) // BLOCK, self._max_blocks)):
            key = tuple(token_ids[number * BLOCK : (number + 1) * BLOCK])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, None if node is self._root else node, blocks[number])
                self._pool.share(child.block)
            path.append(child)
            node = child
        self._touch(path)
        while len(self._recency) > self._max_blocks:
            self._drop(next(iter(self._recency)))

    def attach(self, token_ids: Sequence[int], drafter: Drafter, take: Callable[[], Any]) -> None:
        """Let the nodes of `token_ids` know the drafter's state at their end, if it has one; the latest is kept."""
        path = self._path(token_ids)
        if not path:
            return
        snapshot = Snapshot(drafter)
        self._snapshots.add(snapshot)
        snapshot.state = take()
        if snapshot.state is None:
            self._snapshots.remove(snapshot)
            return
        for node in path:
            self._detach(node, id(drafter))
            node.snapshots[id(drafter)] = snapshot
            snapshot.holders += 1

    def evict_one(self) -> bool:
        """Give one block back to the pool; False if none is held by the cache alone."""
        for node in self._recency:
            if not node.children and self._pool.holders(node.block) == 1:
                self._drop(node)
                return True
        return False

    def drop_snapshots(self, drafter: Drafter) -> bool:
        """Discard all states of a drafter that has run out of room; whether there were any."""
        holding = [node for node in self._recency if id(drafter) in node.snapshots]
        for node in holding:
            self._detach(node, id(drafter))
        return bool(holding)

    def clear(self) -> None:
        """Forget everything."""
        while self._recency:
            self._drop(next(iter(self._recency)))

    def snapshots(self, drafter: Drafter) -> list[Any]:
        """A drafter's states that it holds."""
        return [s.state for s in self._snapshots if s.drafter is drafter and s.state is not None]

    def held(self) -> list[int]:
        """The blocks that it holds a reference to."""
        return [node.block for node in self._nodes()]

    def mend(self) -> None:
        """Make all agree with the trie again, after an interruption; the pool's counts are its caller's to mend."""
        nodes = self._nodes()[::-1]  # children first
        ranks = {node: rank for rank, node in enumerate(self._recency)}
        for node in nodes:
            ranks[node] = max([ranks.get(node, 0), *(ranks[child] for child in node.children.values())])
        self._recency = OrderedDict.fromkeys(sorted(nodes, key=ranks.__getitem__))
        holders = Counter(snapshot for node in nodes for snapshot in node.snapshots.values())
        for snapshot in list(self._snapshots):
            snapshot.holders = holders[snapshot]
            self._discard_unheld(snapshot)

    def _nodes(self) -> list[_Node]:
        """All of them, parents first."""
        nodes = list(self._root.children.values())
        for node in nodes:
            nodes += node.children.values()
        return nodes

    def _path(self, token_ids: Sequence[int]) -> list[_Node]:
        path, node = [], self._root
        for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
            child = node.children.get(tuple(token_ids[start : start + BLOCK]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._recency[node] = None
            self._recency.move_to_end(node)

    def _drop(self, node: _Node) -> None:
        """Remove a node without children."""
        for identity in list(node.snapshots):
            self._detach(node, identity)
        del self._recency[node]
        del (node.parent or self._root).children[node.tokens]
        self._pool.give_back(node.block)

    def _detach(self, node: _Node, identity: int) -> None:
        snapshot = node.snapshots.pop(identity, None)
        if snapshot is not None:
            snapshot.holders -= 1
            self._discard_unheld(snapshot)

    def _discard_unheld(self, snapshot: Snapshot) -> None:
        if snapshot.holders > 0:
            return
        try:
            if snapshot.state is not None:
                snapshot.drafter.discard(snapshot.state)
        except Exception:  # a drafter's fault is nobody else's
            logger.exception("method %s could not discard a snapshot", snapshot.drafter.name)
        self._snapshots.discard(snapshot)
