"""Matrices held as their file stores them, and products with them: the native twin of `ops.linear`.

A packed matrix is one tensor of bytes: a header, then the file's own blocks in an order that suits the kernels (see
`native/packed.h`). Quantised weights are multiplied with activations rounded to 8 bits, in groups of 32 that share a
scale: a group's sum of products is an exact integer, and what follows is one sequence of float32 operations. So a row
has the same bits whatever the number of rows and threads, and at every level of instructions; the result is rounded to
bf16 once. bf16 weights are multiplied with bf16 activations as they are, in an order of sums that each level has for
itself.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from paceline.errors import PacelineError
from paceline.ops.dense import PlainLinear, plain_linear
from paceline.ops.native.library import LEVELS, Library, Missing, level, load
from paceline.ops.native.product import multiply
from paceline.ops.native.weights import Weights

BF16 = 30  # ggml's id
GROUP = 32  # activations that share a scale, where weights are quantised
TYPES = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", BF16: "BF16"}
_HEADER = np.dtype([("magic", "<u4"), ("type", "<u4"), ("out", "<u4"), ("inner", "<u4"), ("bytes", "<u8")])
_HEADER_BYTES = 64
_MAGIC = int.from_bytes(b"PACK", "little")


@dataclass(frozen=True, slots=True)
class PackedPart:
    """What one header says."""

    type_id: int
    out: int
    inner: int

    @property
    def type(self) -> str:
        return TYPES[self.type_id]


def pack(rows: torch.Tensor, type_id: int, inner: int) -> torch.Tensor:
    """rows: [out, bytes of a row] uint8 as a GGUF file stores them, or [out, inner] bf16 → bytes, 1-dimensional.

    Packed matrices with the same inner dimension may be joined (`torch.cat`): their outputs stand side by side.
    """
    functions = _library().functions
    size = functions["packed_bytes"](type_id, rows.shape[0], inner)
    if not size:
        raise ValueError(f"{inner} columns do not make blocks of type {type_id}")
    packed = torch.empty(size, dtype=torch.uint8)
    rows = rows.contiguous()
    functions["pack"](type_id, rows.shape[0], inner, rows.data_ptr(), packed.data_ptr(), torch.get_num_threads())
    return packed


def parts(packed: torch.Tensor) -> list[PackedPart]:
    """The matrices joined in `packed`. Raises ValueError if it is none."""
    found, at = [], 0
    while at < packed.numel():
        header = np.frombuffer(packed[at : at + _HEADER.itemsize].numpy(), _HEADER)[0]
        if header["magic"] != _MAGIC or int(header["type"]) not in TYPES or header["bytes"] < _HEADER_BYTES:
            raise ValueError(f"no packed matrix at byte {at}")
        found.append(PackedPart(int(header["type"]), int(header["out"]), int(header["inner"])))
        at += int(header["bytes"])
    if at != packed.numel() or len({part.inner for part in found}) != 1:
        raise ValueError("packed matrices do not fit together")
    return found


class PackedLinear:
    """y = x Wᵀ + b with W packed.

    bias: [out] bf16 or None. `level`: of `native.library.LEVELS`; the best by default.
    """

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None = None, at: str | None = None) -> None:
        self.packed = packed
        self.bias = bias
        self.parts = parts(packed)
        self.out, self.inner = sum(part.out for part in self.parts), self.parts[0].inner
        chosen = at or level()
        library = _library()
        if chosen not in library.levels:
            raise PacelineError(f"this machine has no {chosen}", hint=f"it has: {', '.join(library.levels)}")
        self.level = chosen
        self._number = LEVELS.index(chosen)
        self._linear = library.functions["linear"]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, in] bf16 → [T, out] bf16; `residual` [T, out] is added before the one rounding."""
        weights = self._number, self.packed.data_ptr(), self.packed.numel()
        return multiply(self._linear, weights, (self.out, self.inner), x, self.bias, residual)

    @property
    def arithmetic(self) -> str:
        """What a verdict on it holds for."""
        return f"native {' '.join(part.type for part in self.parts)} {self.level}"

    def native(self) -> Weights:
        return Weights.of(self.packed, self.out, self.inner, self.bias)

    def first(self, size: int) -> "PackedLinear":
        """The first `size` outputs alone: a copy of their rows."""
        if len(self.parts) != 1 or not 1 <= size <= self.out:
            raise ValueError(f"the first {size} of {[part.out for part in self.parts]} outputs")
        (part,) = self.parts
        packed = self.packed[: _library().functions["packed_bytes"](part.type_id, size, part.inner)].clone()
        header = packed[: _HEADER.itemsize].numpy().view(_HEADER)
        header["out"], header["bytes"] = size, packed.numel()
        return PackedLinear(packed, None if self.bias is None else self.bias[:size], self.level)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, dequantised in float32 and rounded to bf16: [n] → [n, in]."""
        return look_up(ids, self.packed)

    def weight(self) -> torch.Tensor:
        """All of W, as `rows`: [out, in]."""
        return self.rows(torch.arange(self.out))


AnyLinear = PlainLinear | PackedLinear


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> AnyLinear:
    """The linear layer of a weight matrix, [out, in] or packed."""
    return PackedLinear(weight, bias) if is_packed(weight) else plain_linear(weight, bias)


def unpacked(linear: AnyLinear) -> PlainLinear:
    """A linear layer whose weights are numbers. Raises PacelineError for a packed one."""
    if isinstance(linear, PackedLinear):
        raise PacelineError("this needs the model's weights as numbers, and they are packed", hint="use --dtype bf16")
    return linear


def is_packed(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.uint8


def shape_of(weight: torch.Tensor) -> tuple[int, ...]:
    """The shape of the matrix that `weight` holds, packed or not."""
    if not is_packed(weight):
        return tuple(weight.shape)
    found = parts(weight)
    return sum(part.out for part in found), found[0].inner


def look_up(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix, [rows, d] or packed (then dequantised in float32 and rounded to bf16): [n] → [n, d]."""
    if not is_packed(table):
        return F.embedding(ids, table)
    ids = ids.to(torch.int64).contiguous()
    out = torch.empty(ids.numel(), shape_of(table)[1], dtype=torch.bfloat16)
    found = _library().functions["rows"](table.data_ptr(), table.numel(), ids.data_ptr(), ids.numel(), out.data_ptr())
    if not found:
        raise IndexError(f"a row beyond the {shape_of(table)[0]} of the matrix")
    return out


def _library() -> Library:
    library = load()
    if isinstance(library, Missing):
        raise PacelineError(f"native operators {library.reason}")
    return library
