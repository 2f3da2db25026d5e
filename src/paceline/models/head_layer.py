"""A draft head's one transformer layer, on a cache of its own: committed rows, behind them a tree level by level."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.models.cache import KVPool, SequenceCache
from paceline.models.config import ModelConfig, inverse_frequencies
from paceline.models.head_matrices import HeadMatrices
from paceline.ops.attention import BLOCK
from paceline.ops.fused import operators_for
from paceline.ops.operators import AttentionLayer, Operators, Step
from paceline.ops.packed import AnyLinear
from paceline.ops.rotary import Rope
from paceline.ops.twins import TorchOperators, queries_keys_values

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


class HeadLayer:
    """Attention and feed-forward; what they read and what they are added to is the head's business.

    weights: the checkpoint's, without the layer's prefix. Biases and q/k norms are used where there are some. What is
    around the attention (`project`, `finish`) is in torch's operators, and differentiable where matrices are numbers:
    training puts another attention between.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], matrices: HeadMatrices) -> None:
        def linear(*names: str) -> AnyLinear:
            biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
            weight = torch.cat([weights[f"{name}.weight"] for name in names])
            return matrices.linear(weight, torch.cat(biases) if biases else None)

        def norm(name: str) -> torch.Tensor | None:
            return matrices.numbers(weights[name]) if name in weights else None

        dtype, device = matrices.dtype, matrices.device
        self.config, self.dtype, self.device = config, dtype, device
        self.compute_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        self.operators, self._twins = operators_for(dtype, device), TorchOperators(dtype)
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.output = linear("self_attn.o_proj")
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")
        self.mlp_norm = matrices.numbers(weights["post_attention_layernorm.weight"])
        self.q_norm, self.k_norm = norm("self_attn.q_norm.weight"), norm("self_attn.k_norm.weight")
        frequencies, factor = inverse_frequencies(config.rope, config.head_dim, config.max_context)
        self.attention = AttentionLayer(
            0,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_scale,
            config.rms_norm_eps,
            self.q_norm,
            self.k_norm,
            config.sliding_windows[0],
            Rope(frequencies.to(device), factor),
        )

    @property
    def window(self) -> int | None:
        return self.attention.window

    def new_pool(self, positions: int) -> KVPool:
        return KVPool(self.config, -(-positions // BLOCK), self.dtype, self.device)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.operators.norm(x, weight, self.config.rms_norm_eps)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, rows: Sequence[HeadRows]) -> torch.Tensor:
        """Attention over x [T, ·] added to `residual` [T, d], then the feed-forward added to that: [T, d].

        Keys and values are written behind each cache's committed rows. CacheFull, before anything is written, if a
        pool has no room.
        """
        step = self._step(rows)
        mixed = step.attention(self.qkv(x), self.attention)
        return self._finish(mixed, residual, self.operators)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (scaled), keys and values of rows x [T, ·] at `positions` [T]: each [T, its heads, head_dim]."""
        rotary = self.attention.rope.table(positions, self.compute_dtype)
        return queries_keys_values(self.qkv(x), self.attention, rotary)

    def finish(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What attention yields [T, heads, head_dim], added to `residual` [T, d], and the feed-forward to that."""
        return self._finish(mixed.to(self.dtype).flatten(1), residual, self._twins)

    def _finish(self, mixed: torch.Tensor, residual: torch.Tensor, operators: Operators) -> torch.Tensor:
        c, hidden = self.config, self.output(mixed, residual)
        y = self.gate_up(operators.norm(hidden, self.mlp_norm, c.rms_norm_eps))
        return self.down(operators.gated(y, c.activation), hidden)

    def _step(self, rows: Sequence[HeadRows]) -> Step:
        paths = [own.paths or [tuple(range(i + 1)) for i in range(len(own.tokens))] for own in rows]
        for own, ways in zip(rows, paths, strict=True):
            own.cache.reserve(ways[-1][-1] + 1)
        return self.operators.step(
            [
                own.cache.rows(len(ways), ways, ways[-1][-1] + 1 - len(ways))
                for own, ways in zip(rows, paths, strict=True)
            ],
            self.config.num_heads,
        )
