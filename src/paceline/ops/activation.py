"""Gated activations of the feed-forward sublayer.

torch's own `silu`, `gelu` and `sigmoid` give an element other last bits in a vector register than in the scalar loop
that does the rest of a range, and where that begins depends on the number of rows and threads. `exp` and `tanh` do
not, nor do the four operations; so the activations are written in these.
"""

import math

import torch


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) · up, with gate and up side by side: [T, 2 I] → [T, I]. Source: Shazeer 2002.05202.

    bf16 is computed in float32 and rounded once.
    """
    wide = gate_up.float() if gate_up.dtype == torch.bfloat16 else gate_up
    gate, up = wide.chunk(2, dim=-1)
    active = _silu(gate) if activation == "silu" else _gelu_tanh(gate)
    return (active * up).to(gate_up.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(−x)), element by element; bf16 is computed in float32 and rounded once."""
    wide = x.float() if x.dtype == torch.bfloat16 else x
    return _silu(wide).to(x.dtype)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Hendrycks & Gimpel 1606.08415, the tanh form."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1 + torch.tanh(inner))
