"""A decoder layer: its weights, and its two halves as a set of operators computes them."""

from dataclasses import dataclass

import torch

from paceline.ops.operators import AttentionLayer, Operators, Step
from paceline.ops.packed import AnyLinear


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """qkv: queries, keys and values side by side; gate_up: gate and up. `post_…`: norms of what a half adds."""

    qkv: AnyLinear
    output: AnyLinear
    gate_up: AnyLinear
    down: AnyLinear
    attention: AttentionLayer
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    post_attention_norm: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None
    eps: float
    activation: str

    @property
    def q_norm(self) -> torch.Tensor | None:
        return self.attention.q_norm

    @property
    def k_norm(self) -> torch.Tensor | None:
        return self.attention.k_norm

    @property
    def window(self) -> int | None:
        return self.attention.window

    def attend(self, x: torch.Tensor, step: Step, operators: Operators) -> torch.Tensor:
        """x + attention(norm(x)): [T, d] → [T, d]; keys and values are written into the cache."""
        qkv = self.qkv(operators.norm(x, self.attention_norm, self.eps))
        mixed = step.attention(qkv, self.attention)  # [T, heads · head_dim]
        if self.post_attention_norm is None:
            return self.output(mixed, x)
        return operators.norm(self.output(mixed), self.post_attention_norm, self.eps, x)

    def feed_forward(self, x: torch.Tensor, operators: Operators) -> torch.Tensor:
        """x + down(gated(gate_up(norm(x)))): [T, d] → [T, d]."""
        y = operators.gated(self.gate_up(operators.norm(x, self.mlp_norm, self.eps)), self.activation)
        if self.post_mlp_norm is None:
            return self.down(y, x)
        return operators.norm(self.down(y), self.post_mlp_norm, self.eps, x)
