"""Attention over a block cache, with bits that depend on a row's own path alone.

Floating-point sums depend on the order of their terms, and a library's matrix product on its shape. So keys are
reduced in blocks of 64 that are aligned to absolute position; a block's products have one fixed call shape; the
blocks' partial sums are added pairwise along a tree that is aligned to absolute position too, so that blocks further
on (all masked, exact zeros) change nothing. A block that holds an uncommitted tree node is gathered for each row along
the row's own path: siblings never stand between its keys. Prefill, decoding, chains and trees all come through here.
What a row may not see does not reach it, be it NaN: a rejected draft's row harms nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 64
WIDEST_TILE = 32  # rows a call takes at most: bounds the partial sums' memory


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """How many rows one product takes: exactly `rows`, or (shown invariant by a probe) any number from `rows` on."""

    rows: int
    flexible: bool = False


def attention_calls(group: int) -> AttentionCalls:
    """`group` query heads share a key head and stand in the product's rows: 16 or more, no matrix-vector product."""
    return AttentionCalls(rows=-(-16 // group))


@dataclass(frozen=True, slots=True)
class OpenBlocks:
    """The blocks from `first` on hold uncommitted nodes of a tree: every row reads its own path.

    slots: [n, open · 64], for each row and position of the open blocks its slot counted from block `first`'s start.
    """

    first: int
    slots: torch.Tensor

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], length: int, blocks: int, device: torch.device) -> "OpenBlocks":
        """Behind `length` committed rows: each row's path there, itself last, as slots counted from the first free one.

        `blocks`: of positions, up to the deepest row's.
        """
        first = length // BLOCK
        base, width = length - first * BLOCK, (blocks - first) * BLOCK
        slots = torch.arange(width).repeat(len(paths), 1)  # committed rows stand at their own slot
        slots[:, base:] = 0  # beyond a path's end: masked, any row will do
        for row, path in enumerate(paths):
            slots[row, base : base + len(path)] = torch.tensor(path) + base
        return cls(first, slots.to(device))


def block_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    reach: Sequence[int],
    open_blocks: OpenBlocks | None,
    calls: AttentionCalls,
) -> torch.Tensor:
    """softmax(q kᵀ) v over the keys that are not hidden, head by head.

    q: [n, heads, head_dim], scaled. keys, values: [blocks, kv_heads, 64, head_dim] of one sequence, q's precision.
    hidden: [n, blocks, 64] bool by absolute position; each row sees at least one key, and none from block
    `reach[row]` on. With `open_blocks` it may cover fewer blocks than are stored (a tree needs more slots than
    positions). Returns [n, heads, head_dim].
    """
    n, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.view(n, kv_heads, heads // kv_heads, head_dim)
    opened = _gather_open(keys, values, open_blocks) if open_blocks is not None else None
    width = calls.rows
    if calls.flexible:
        width = max(width, min(n, WIDEST_TILE))
    tiles = []
    for start in range(0, n, width):
        rows = slice(start, min(start + width, n))
        size = rows.stop - rows.start if calls.flexible else calls.rows
        size = max(size, calls.rows)
        own = None if opened is None else opened.rows(rows)
        # blocks that no row of the tile reaches would only add zeros
        unseen = hidden[rows, : max(reach[rows])] if opened is None else hidden[rows]
        tiles.append(_tile(grouped[rows], keys, values, unseen, own, size, calls.rows))
    out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    return out.reshape(n, heads, head_dim)


@dataclass(frozen=True, slots=True)
class _Opened:
    """Keys and values of the open blocks along every row's path: [n, open, kv_heads, 64, head_dim]."""

    first: int
    keys: torch.Tensor
    values: torch.Tensor

    def rows(self, rows: slice) -> "_Opened":
        return _Opened(self.first, self.keys[rows], self.values[rows])


def _gather_open(keys: torch.Tensor, values: torch.Tensor, open_blocks: OpenBlocks) -> _Opened:
    first, slots = open_blocks.first, open_blocks.slots
    n, (kv_heads, head_dim) = slots.shape[0], (keys.shape[1], keys.shape[3])

    def gather(store: torch.Tensor) -> torch.Tensor:
        by_slot = store[first:].transpose(1, 2).reshape(-1, kv_heads, head_dim)  # [slots, kv_heads, head_dim]
        return by_slot[slots].view(n, -1, BLOCK, kv_heads, head_dim).transpose(2, 3)

    return _Opened(first, gather(keys), gather(values))


def _tile(
    q: torch.Tensor,  # [m, kv_heads, group, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,  # [m, blocks, 64]
    opened: _Opened | None,
    size: int,
    open_size: int,
) -> torch.Tensor:
    """One call's rows, padded to `size`; open blocks take one row a call, padded to `open_size`."""
    m = q.shape[0]
    shared = hidden.shape[1] if opened is None else opened.first
    keys, values = keys[:shared], values[:shared]
    scores = _shared_scores(_pad_rows(q, size), keys)[:, :, :m] if shared else None  # [shared, kv, m, group, 64]
    if opened is not None:
        own = _own_scores(q, opened.keys, open_size)
        scores = own if scores is None else torch.cat((scores, own))
    assert scores is not None
    scores = scores.masked_fill(hidden.transpose(0, 1)[:, None, :, None], -torch.inf)
    weights = torch.exp(scores - scores.amax(dim=(0, -1), keepdim=True))  # [blocks, kv, m, group, 64]
    total = _aligned_sum(weights.sum(-1))[..., None]  # [kv, m, group, 1]

    def mixed(values: torch.Tensor, own_values: torch.Tensor | None) -> torch.Tensor:  # → [kv, m, group, head_dim]
        parts = _shared_values(_pad_rows(weights[:shared], size, dim=2), values)[:, :, :m] if shared else None
        if own_values is not None:
            own = _own_values(weights[shared:], own_values, open_size)
            parts = own if parts is None else torch.cat((parts, own))
        assert parts is not None
        return _aligned_sum(parts) / total

    own_values = None if opened is None else opened.values
    out = mixed(values, own_values)
    if not out.isfinite().all():  # 0 · NaN is NaN: what is hidden counts as zero, what is seen stays as it is
        seen = ~hidden.transpose(0, 1)[:, None]  # [blocks, 1, m, 64]
        spoilt = (_not_finite(values)[:, :, None] & seen[:shared]).any(0).any(-1)  # [kv, m]
        if own_values is not None:
            spoilt |= (_not_finite(own_values).permute(1, 2, 0, 3) & seen[shared:]).any(0).any(-1)
            own_values = own_values.nan_to_num(0, 0, 0)
        out = torch.where(spoilt[..., None, None], out, mixed(values.nan_to_num(0, 0, 0), own_values))
    return out.transpose(0, 1)


def _not_finite(values: torch.Tensor) -> torch.Tensor:
    """Positions whose value holds NaN or infinity: [..., head_dim] → [...]."""
    return ~values.isfinite().all(-1)


def _pad_rows(x: torch.Tensor, size: int, dim: int = 0) -> torch.Tensor:
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim=dim)


def _shared_scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[size, kv, group, d] · [blocks, kv, 64, d] → [blocks, kv, size, group, 64]."""
    size, kv_heads, group, head_dim = q.shape
    blocks = keys.shape[0]
    rows = q.transpose(0, 1).reshape(1, kv_heads, size * group, head_dim)
    rows = rows.expand(blocks, -1, -1, -1).reshape(blocks * kv_heads, size * group, head_dim)
    scores = torch.bmm(rows, keys.reshape(blocks * kv_heads, BLOCK, head_dim).transpose(1, 2))
    return scores.view(blocks, kv_heads, size, group, BLOCK)


def _shared_values(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[blocks, kv, size, group, 64] · [blocks, kv, 64, d] → [blocks, kv, size, group, d]."""
    blocks, kv_heads, size, group, _ = weights.shape
    head_dim = values.shape[-1]
    rows = weights.reshape(blocks * kv_heads, size * group, BLOCK)
    out = torch.bmm(rows, values.reshape(blocks * kv_heads, BLOCK, head_dim))
    return out.view(blocks, kv_heads, size, group, head_dim)


def _own_scores(q: torch.Tensor, keys: torch.Tensor, size: int) -> torch.Tensor:
    """Each row against its own blocks, in calls of the same shape: → [open, kv, m, group, 64]."""
    m, kv_heads, group, head_dim = q.shape
    opened = keys.shape[1]
    rows = q[:, None, :, None].expand(m, opened, kv_heads, size, group, head_dim)
    rows = rows.reshape(m * opened * kv_heads, size * group, head_dim)
    scores = torch.bmm(rows, keys.reshape(m * opened * kv_heads, BLOCK, head_dim).transpose(1, 2))
    scores = scores.view(m, opened, kv_heads, size, group, BLOCK)[:, :, :, 0]
    return scores.permute(1, 2, 0, 3, 4)


def _own_values(weights: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    """[open, kv, m, group, 64] with each row's own values → [open, kv, m, group, d]."""
    opened, kv_heads, m, group, _ = weights.shape
    head_dim = values.shape[-1]
    rows = weights.permute(2, 0, 1, 3, 4)[:, :, :, None].expand(m, opened, kv_heads, size, group, BLOCK)
    rows = rows.reshape(m * opened * kv_heads, size * group, BLOCK)
    out = torch.bmm(rows, values.reshape(m * opened * kv_heads, BLOCK, head_dim))
    out = out.view(m, opened, kv_heads, size, group, head_dim)[:, :, :, 0]
    return out.permute(1, 2, 0, 3, 4)


def _aligned_sum(parts: torch.Tensor) -> torch.Tensor:
    """Sum over dim 0 along the tree (0+1)+(2+3)…, so that zeros appended further on leave every bit alone."""
    while parts.shape[0] > 1:
        if parts.shape[0] % 2:
            parts = torch.cat((parts, torch.zeros_like(parts[:1])))
        parts = parts[0::2] + parts[1::2]
    return parts[0]
