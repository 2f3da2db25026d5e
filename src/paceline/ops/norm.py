"""Root-mean-square normalisation."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) · weight over the last dimension; the statistics are taken in float32.

    The product is taken in the weight's own precision: the model's for Llama, float32 for Gemma.
    x: [..., d], weight: [d]. Source: Zhang & Sennrich 1910.07467.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(weight.dtype)).to(x.dtype)
