"""Random matrices of every type that is held packed, with the values that gguf-py reads from them."""

from dataclasses import dataclass

import gguf
import numpy as np
import torch

from paceline.ops.packed import BF16, TYPES

QUANTISED = {number: name for number, name in TYPES.items() if number != BF16}
# where a block's float16 numbers stand, and of what size they are typically
HALVES = {2: [0], 3: [0, 2], 6: [0], 7: [0, 2], 8: [0], 12: [0, 2], 13: [0, 2], 14: [208]}


@dataclass(frozen=True)
class Sample:
    """rows: as in a file. weight: [out, in] float32. size: an upper bound of scale · |code| + |minimum|, [out, in]."""

    type_id: int
    rows: torch.Tensor
    weight: torch.Tensor
    size: torch.Tensor


def sample(type_id: int, out: int, inner: int, seed: int = 0, scale: float = 0.02) -> Sample:
    """Every code is as likely as any other, scales are of both signs and any of ±scale."""
    rng = np.random.default_rng(seed)
    if type_id == BF16:
        weight = torch.from_numpy(rng.standard_normal((out, inner))).to(torch.bfloat16)
        return Sample(type_id, weight, weight.float(), weight.float().abs())
    kind = gguf.GGMLQuantizationType(type_id)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = rng.integers(0, 256, (out, inner // block, size), dtype=np.uint8)
    for at in HALVES[type_id]:
        halves = rng.uniform(-scale, scale, (out, inner // block)).astype(np.float16)
        rows[:, :, at : at + 2] = halves[..., None].view(np.uint8)
    rows = rows.reshape(out, -1)
    weight = torch.from_numpy(gguf.quants.dequantize(rows, kind).astype(np.float32))
    return Sample(type_id, torch.from_numpy(rows), weight, torch.full_like(weight, 128 * 63 * scale))


def activations(rows: int, inner: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inner, generator=generator).to(torch.bfloat16)


def as_multiplied(x: torch.Tensor, type_id: int) -> torch.Tensor:
    """Activations as they meet weights of the type, float64: [T, in] bf16; but for bf16 weights, 8 bits by group of 32.

    Largest / 127 is a group's scale; codes are to nearest, ties to even.
    """
    if type_id == BF16:
        return x.double()
    groups = x.float().view(x.shape[0], -1, 32)
    largest = groups.abs().amax(2, keepdim=True)
    # not `127 / largest`, which torch takes for a product with the reciprocal
    factor = torch.full_like(largest, 127).div(largest).clamp(max=torch.finfo(torch.float32).max)
    codes = (groups * factor).round()
    return (codes.double() * (largest / 127).double()).view(x.shape)
