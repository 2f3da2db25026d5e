"""Gated activations of the feed-forward sublayer."""

import torch
import torch.nn.functional as F


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) · up, with gate and up side by side: [T, 2 I] → [T, I]. Source: Shazeer 2002.05202."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up
