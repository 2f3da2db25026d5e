"""Keys and values of running sequences, in blocks of 64 positions.

Committed row t of a sequence lies at slot t. The rows of a step are written after them in row order, so a tree's
nodes lie scattered; `commit(path)` keeps one path and moves it into place. Blocks are shared by forks and copied on
the first write.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig
from paceline.ops.attention import BLOCK
from paceline.ops.operators import AttentionRows

FIRST_BLOCKS = 16


class CacheFull(PacelineError):
    """No block is free; nothing was changed."""


class KVPool:
    """The blocks of all sequences of one model: [layers, blocks, kv_heads, 64, head_dim] each for keys and values.

    It may hold `num_blocks`; memory is taken as they are needed, doubling each time.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_blocks = num_blocks
        shape = (config.num_layers, 0, config.num_kv_heads, BLOCK, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self._references: list[int] = []
        self._free: list[int] = []

    @property
    def blocks_in_use(self) -> int:
        return len(self._references) - len(self._free)

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.blocks_in_use

    def holders(self, block: int) -> int:
        """How many sequences (and prefix-cache entries) share a block."""
        return self._references[block]

    def _grow(self) -> None:
        held = len(self._references)
        total = min(self.num_blocks, max(FIRST_BLOCKS, 2 * held))
        self.keys, self.values = (_larger(store, total) for store in (self.keys, self.values))
        self._references.extend([0] * (total - held))
        self._free.extend(range(total - 1, held - 1, -1))

    def new_sequence(self) -> "SequenceCache":
        return SequenceCache(self)

    def take(self) -> int:
        """A free block, zeroed: what an earlier owner left (a NaN, say) must not reach a masked product."""
        if not self._free and len(self._references) < self.num_blocks:
            self._grow()
        if not self._free:
            raise CacheFull(
                f"all {self.num_blocks} KV blocks are in use",
                hint="allow a longer --max-context or fewer requests",
            )
        block = self._free.pop()
        self.keys[:, block].zero_()
        self.values[:, block].zero_()
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        self._references[block] += 1

    def give_back(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)

    def recount(self, holdings: Iterable[Iterable[int]]) -> None:
        """Set the counts to what is held in fact, each holding the blocks of one sequence or prefix-cache entry.

        An interruption may have come between taking a block and noting it.
        """
        holders = Counter(block for blocks in holdings for block in blocks)
        references = [holders[block] for block in range(len(self._references))]
        self._references, self._free = references, [block for block, held in enumerate(references) if not held][::-1]

    def writable(self, block: int) -> int:
        """The block itself if nobody else holds it, else a copy."""
        if self._references[block] == 1:
            return block
        copy = self.take()
        self.keys[:, copy] = self.keys[:, block]
        self.values[:, copy] = self.values[:, block]
        self.give_back(block)
        return copy


class SequenceCache:
    """One sequence's rows: `length` committed ones, and after them those of the step in flight."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.length = 0
        self.blocks: list[int] = []

    def blocks_to_take(self, rows: int) -> int:
        """Free blocks that `reserve(rows)` would take: new ones, and copies of shared ones about to be written."""
        needed = -(-(self.length + rows) // BLOCK)
        written = self.blocks[self.length // BLOCK : needed]
        return max(0, needed - len(self.blocks)) + sum(self.pool.holders(block) > 1 for block in written)

    def share_prefix(self, blocks: Sequence[int]) -> None:
        """Begin an empty sequence with full blocks that somebody else holds too."""
        if self.blocks:
            raise ValueError(f"{len(self.blocks)} blocks are held already")
        for block in blocks:
            self.pool.share(block)
        self.blocks = list(blocks)
        self.length = len(self.blocks) * BLOCK

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows after the committed ones. Raises CacheFull, leaving every row as it was."""
        needed = -(-(self.length + rows) // BLOCK)
        while len(self.blocks) < needed:
            self.blocks.append(self.pool.take())
        for index in range(self.length // BLOCK, needed):
            self.blocks[index] = self.pool.writable(self.blocks[index])

    def slots(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pool block and offset of `count` slots from `first` on: two index tensors [count]."""
        index = torch.arange(first, first + count)
        blocks = torch.tensor(self.blocks)[index // BLOCK]
        device = self.pool.keys.device
        return blocks.to(device), (index % BLOCK).to(device)

    def rows(self, count: int, paths: Sequence[Sequence[int]] | None = None, first: int = 0) -> AttentionRows:
        """`count` reserved slots, from `first` behind the committed rows on, as a step's rows (see there)."""
        return AttentionRows(self.pool.keys, self.pool.values, self.blocks, self.length, count, paths, first)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the step's rows `path` (a root-to-node path, ascending), in this order; forget its other rows."""
        if any(row != i for i, row in enumerate(path)):
            rows = torch.tensor(path)
            blocks, offsets = self.slots(self.length, int(rows[-1]) + 1)
            source = blocks[rows], offsets[rows]
            target = blocks[: len(path)], offsets[: len(path)]
            for store in (self.pool.keys, self.pool.values):
                store[:, target[0], :, target[1]] = store[:, source[0], :, source[1]]
        self.length += len(path)

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on, and give back blocks that hold nothing else."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} rows to {length}")
        self.length = length
        kept = -(-length // BLOCK)
        for block in self.blocks[kept:]:
            self.pool.give_back(block)
        del self.blocks[kept:]

    def fork(self) -> "SequenceCache":
        """A second sequence with the same committed rows, sharing their blocks."""
        other = SequenceCache(self.pool)
        other.length = self.length
        other.blocks = self.blocks[: -(-self.length // BLOCK)]
        for block in other.blocks:
            self.pool.share(block)
        return other

    def beyond(self, rows: int = 0) -> "SequenceCache":
        """The same blocks, with the first `rows` rows of the step in flight counted as committed.

        What goes on in it lies behind the owner's committed rows, in place; blocks that it takes are the owner's.
        """
        view = SequenceCache(self.pool)
        view.length, view.blocks = self.length + rows, self.blocks
        return view

    def release(self) -> None:
        self.truncate(0)


def _larger(store: torch.Tensor, blocks: int) -> torch.Tensor:
    layers, held, *block = store.shape
    with torch.inference_mode(False):  # born in a forward, but written outside of one too
        larger = store.new_empty(layers, blocks, *block)
        larger[:, :held] = store
    return larger
