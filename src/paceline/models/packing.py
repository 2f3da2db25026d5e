"""Precisions whose matrices stay packed (`ops.packed`): the file's own blocks, or blocks made from wider weights."""

from collections.abc import Iterable, Iterator

import torch

from paceline.errors import PacelineError
from paceline.ops.native import library
from paceline.ops.packed import BF16, pack

_Q4_1, _Q8_0 = 3, 8
# precision → the type that matrices are made into; embeddings and output keep 8 bits, which they need most
PACKED = {"file": BF16, "int8": _Q8_0, "int4": _Q4_1}
_FINE = ("model.embed_tokens.weight", "lm_head.weight")
_GROUP = 32
_CHUNK = 1 << 20  # elements quantised at a time


def check_packed_runs(precision: str, device: torch.device) -> None:
    """Raise PacelineError where `precision` holds matrices packed and there are no operators for them."""
    if precision not in PACKED:
        return
    if device.type != "cpu":
        raise PacelineError(f"dtype {precision} runs on the CPU alone, not on {device}", hint="use bf16 there")
    if (reason := library.why_not()) is not None:
        raise PacelineError(
            f"dtype {precision} needs native operators, which {reason}", hint="use bf16, or install again"
        )


def packed_runs(device: torch.device) -> bool:
    """Whether there are operators for packed matrices there."""
    return device.type == "cpu" and library.level() is not None


def pack_weights(weights: Iterable[tuple[str, torch.Tensor]], precision: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices as `precision` holds them, all else as it comes; "file" packs unquantised weights as bf16."""
    for name, tensor in weights:
        yield name, tensor if tensor.dim() != 2 else pack_matrix(tensor, precision, name in _FINE)


def pack_matrix(weight: torch.Tensor, precision: str, finely: bool = False) -> torch.Tensor:
    """[out, inner] as `precision` holds it, `finely` in 8 bits at least; in bf16 where rows make no whole groups."""
    inner, kind = weight.shape[1], PACKED[precision]
    if kind != BF16:
        kind = BF16 if inner % _GROUP else _Q8_0 if finely else kind
    return pack(weight.to(torch.bfloat16) if kind == BF16 else quantise(weight, kind), kind, inner)


def quantise(weight: torch.Tensor, type_id: int) -> torch.Tensor:
    """[out, in] → rows of blocks as in a GGUF file, by gguf-py's reference: to the nearest, one scale for 32."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    kind, step = GGMLQuantizationType(type_id), max(1, _CHUNK // weight.shape[1])
    chunks = torch.split(weight, step)
    return torch.cat([torch.from_numpy(quantize(chunk.float().numpy(), kind)) for chunk in chunks])
