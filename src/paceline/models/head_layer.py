"""A draft head's one transformer layer, on a cache of its own: committed rows, behind them a tree level by level."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.models.cache import KVPool, SequenceCache
from paceline.models.config import ModelConfig, inverse_frequencies
from paceline.ops.activation import gated
from paceline.ops.attention import BLOCK, OpenBlocks, attention_calls, block_attention
from paceline.ops.linear import Linear
from paceline.ops.norm import rms_norm
from paceline.ops.rotary import RotaryTable, rotary_table, rotate

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows that one sequence adds to a head's pass: row i reads `tokens[i]` and the feature before it.

    `paths` is None for rows that follow the committed ones in a chain. For nodes of a tree it lists each one's way
    there, itself last: numbers count the rows behind the committed ones, and those of this pass are consecutive.
    """

    cache: SequenceCache
    tokens: Sequence[int]
    features: torch.Tensor  # [n, d]
    paths: Sequence[Path] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What one sequence's attention needs."""

    cache: SequenceCache
    rows: slice
    blocks: torch.Tensor | slice
    write_to: tuple[torch.Tensor, torch.Tensor]
    positions: torch.Tensor  # [n]
    reach: list[int]
    open_blocks: OpenBlocks | None
    hidden: torch.Tensor  # [n, blocks, 64] bool


class HeadLayer:
    """Attention and feed-forward; what they read and what they are added to is the head's business.

    weights: the checkpoint's, without the layer's prefix. Biases and q/k norms are used where there are some. What is
    around the attention (`project`, `finish`) is differentiable: training puts another attention between.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        held = {name: tensor.to(device, dtype) for name, tensor in weights.items()}

        def linear(*names: str) -> Linear:
            biases = [held[f"{name}.bias"] for name in names if f"{name}.bias" in held]
            return Linear(torch.cat([held[f"{name}.weight"] for name in names]), torch.cat(biases) if biases else None)

        self.config, self.dtype, self.device = config, dtype, device
        self.compute_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        self.calls = attention_calls(config.num_heads // config.num_kv_heads)
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.output = linear("self_attn.o_proj")
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")
        self.mlp_norm = held["post_attention_layernorm.weight"]
        self.q_norm, self.k_norm = held.get("self_attn.q_norm.weight"), held.get("self_attn.k_norm.weight")
        self.window = config.sliding_windows[0]
        self.frequencies, self.rope_factor = inverse_frequencies(config.rope, config.head_dim, config.max_context)

    def new_pool(self, positions: int) -> KVPool:
        return KVPool(self.config, -(-positions // BLOCK), self.dtype, self.device)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, rows: Sequence[HeadRows]) -> torch.Tensor:
        """Attention over x [T, ·] added to `residual` [T, d], then the feed-forward added to that: [T, d].

        Keys and values are written behind each cache's committed rows. CacheFull, before anything is written, if a
        pool has no room.
        """
        plans = self._plans(rows)
        q, k, v = self.project(x, torch.cat([plan.positions for plan in plans]))
        mixed = torch.cat([self._attend(q[plan.rows], k[plan.rows], v[plan.rows], plan) for plan in plans])
        return self.finish(mixed, residual)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (scaled), keys and values of rows x [T, ·] at `positions` [T]: each [T, its heads, head_dim]."""
        c = self.config
        heads = self.qkv(x).view(x.shape[0], -1, c.head_dim)
        q, k, v = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)  # [T, heads, head_dim]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.norm(q, self.q_norm), self.norm(k, self.k_norm)
        rotary = self._rotary(positions)
        q = rotate(q.to(self.compute_dtype), rotary) * c.attention_scale
        k = rotate(k.to(self.compute_dtype), rotary).to(self.dtype)
        return q, k, v

    def finish(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What attention yields [T, heads, head_dim], added to `residual` [T, d], and the feed-forward to that."""
        hidden = residual + self.output(mixed.to(self.dtype).flatten(1))
        return hidden + self.down(gated(self.gate_up(self.norm(hidden, self.mlp_norm)), self.config.activation))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        pool = plan.cache.pool
        pool.keys[0][plan.write_to[0], :, plan.write_to[1]] = k
        pool.values[0][plan.write_to[0], :, plan.write_to[1]] = v
        keys = pool.keys[0][plan.blocks].to(self.compute_dtype)  # [blocks, kv_heads, 64, head_dim]
        values = pool.values[0][plan.blocks].to(self.compute_dtype)
        return block_attention(q, keys, values, plan.hidden, plan.reach, plan.open_blocks, self.calls)

    def _rotary(self, positions: torch.Tensor) -> RotaryTable:
        return rotary_table(positions, self.frequencies.to(self.device), self.rope_factor, self.compute_dtype)

    def _plans(self, rows: Sequence[HeadRows]) -> list[Plan]:
        paths = [own.paths or [tuple(range(i + 1)) for i in range(len(own.tokens))] for own in rows]
        for own, ways in zip(rows, paths, strict=True):
            own.cache.reserve(ways[-1][-1] + 1)
        plans, start = [], 0
        for own, ways in zip(rows, paths, strict=True):
            plans.append(self._plan(own.cache, ways, slice(start, start + len(ways))))
            start += len(ways)
        return plans

    def _plan(self, cache: SequenceCache, paths: Sequence[Path], rows: slice) -> Plan:
        n, last = len(paths), paths[-1][-1]
        positions = torch.tensor([cache.length + len(path) - 1 for path in paths], device=self.device)
        blocks = -(-(cache.length + max(map(len, paths))) // BLOCK)  # of positions
        stored = -(-(cache.length + last + 1) // BLOCK)
        # a path of rows 0, 1, 2, … lies in the cache as if it were committed
        scattered = any(path[-1] != len(path) - 1 for path in paths)
        places = torch.arange(blocks * BLOCK, device=self.device)
        hidden = places > positions[:, None]
        if self.window is not None:
            hidden |= places <= positions[:, None] - self.window
        return Plan(
            cache=cache,
            rows=rows,
            blocks=cache.block_index(stored if scattered else blocks),
            write_to=cache.slots(cache.length + last + 1 - n, n),
            positions=positions,
            reach=[(cache.length + len(path) - 1) // BLOCK + 1 for path in paths],
            open_blocks=OpenBlocks.of(paths, cache.length, blocks, self.device) if scattered else None,
            hidden=hidden.view(n, blocks, BLOCK),
        )
