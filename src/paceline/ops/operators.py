"""What a decoder computes beside its matrix products: one set of operators, torch's (`twins`) or native (`fused`).

It is chosen once, when a model is loaded. Every set has bits of its own; in each a row's are its own affair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.ops.rotary import Rope


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """The rows that one sequence adds to a step.

    keys, values: the cache, [layers, blocks, kv_heads, 64, head_dim]; the sequence's slots lie in `blocks`, 64 in each,
    committed row t at slot t. Row i of this step goes to slot `length + first + i`, behind the `length` committed ones.
    `paths[i]`: the slots behind the committed ones that row i sees, counted from `length`, itself last; None: a chain.
    """

    keys: torch.Tensor
    values: torch.Tensor
    blocks: Sequence[int]
    length: int
    count: int
    paths: Sequence[Sequence[int]] | None = None
    first: int = 0

    @property
    def is_straight(self) -> bool:
        """Every row sees all those before its own: the paths lie in the cache as if they were committed."""
        return self.paths is None or all(path[-1] == len(path) - 1 for path in self.paths)

    @property
    def depths(self) -> list[int]:
        """How far behind the committed rows each row stands; with `length` added, its position."""
        return list(range(self.count)) if self.paths is None else [len(path) - 1 for path in self.paths]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """A layer's attention: its `index` in the cache, its shape, and what is done to queries and keys.

    q_norm, k_norm: [head_dim] or None. window: how many positions a row sees at most, itself included.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    window: int | None
    rope: Rope


class Step(Protocol):
    """One forward's rows, worked out once and used by every layer."""

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Queries, keys and values side by side [T, (heads + 2 kv_heads) · head_dim] → [T, heads · head_dim].

        Queries and keys are normed and turned; keys and values are written into the cache.
        """


class Operators(Protocol):
    """A set of operators that share their arithmetic."""

    @property
    def name(self) -> str:
        """Which set: a verdict on one does not hold for another."""

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`ops.norm.rms_norm` of x [T, d], added to `residual` [T, d] where there is one."""

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """`ops.activation.gated`: [T, 2 I] → [T, I]."""

    def maxima(self, x: torch.Tensor) -> torch.Tensor:
        """Of each 128 numbers of a row the largest, NaN if they hold one: [T, n] → [T, ⌈n / 128⌉], float32 or wider."""

    def step(self, rows: Sequence[AttentionRows], num_heads: int) -> Step:
        """The rows of a forward, sequence after sequence; their slots are there to be written."""

    def trusting(self, flexible: bool) -> "Operators":
        """The same set; `flexible`: its calls may be of any size, as a probe has shown."""
