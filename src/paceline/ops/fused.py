"""The native operators: bf16 on the CPU, a call each for all rows of a step (see `native/step.h`)."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.errors import PacelineError
from paceline.ops.native.library import LEVELS, Missing, level, load
from paceline.ops.operators import AttentionLayer, AttentionRows, Operators
from paceline.ops.rotary import Rope, RotaryTables
from paceline.ops.twins import TorchOperators

_VERSION = 1  # of their arithmetic: a change of it voids kept verdicts
_WIDEST = 1024  # a head, as attention.h has room for
EVERYTHING = 1 << 40  # a window wider than any context


def operators_for(dtype: torch.dtype, device: torch.device) -> Operators:
    """Native ones where there are some for this precision, else torch's."""
    at = level() if dtype == torch.bfloat16 and device.type == "cpu" else None
    return TorchOperators(dtype) if at is None else NativeOperators.at(at)


class _Step(ctypes.Structure):
    """`Step` of step.h."""

    _fields_ = (
        ("sequences", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class NativeOperators:
    """functions: of `native.library`. level: an index of its LEVELS."""

    functions: Mapping[str, Any]
    level: int
    name: str

    @classmethod
    def at(cls, level: str) -> "NativeOperators":
        """Those of one level, which this machine must have."""
        library = load()
        if isinstance(library, Missing) or level not in library.levels:
            raise PacelineError(f"this machine has no native operators at level {level}")
        return cls(library.functions, LEVELS.index(level), f"native {_VERSION} {level}")

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        y = torch.empty_like(x)
        self.functions["norm"](
            self.level,
            x.data_ptr(),
            x.shape[0],
            x.shape[1],
            weight.data_ptr(),
            weight.dtype == torch.float32,
            eps,
            None if residual is None else residual.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = gate_up.new_empty(rows, width)
        gate_up = gate_up.contiguous()
        self.functions["gated"](
            self.level, gate_up.data_ptr(), rows, width, activation != "silu", y.data_ptr(), torch.get_num_threads()
        )
        return y

    def maxima(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        x, y = x.contiguous(), torch.empty(rows, -(-width // 128))
        self.functions["maxima"](self.level, x.data_ptr(), rows, width, y.data_ptr(), torch.get_num_threads())
        return y

    def step(self, rows: Sequence[AttentionRows], num_heads: int) -> "NativeStep":
        return NativeStep(self, rows, num_heads)

    def trusting(self, flexible: bool) -> "NativeOperators":
        return self


class NativeStep:
    """The rows' places in the cache, as `native/step.h` wants them."""

    def __init__(self, operators: NativeOperators, rows: Sequence[AttentionRows], num_heads: int) -> None:
        self._call, self._level = operators.functions["attention"], operators.level
        self._threads = torch.get_num_threads()
        places: list[tuple[int, int, int, int]] = []  # of each row: sequence, position, slot, path
        slots: list[int] = []
        for index, own in enumerate(rows):
            written = own.length + own.first
            for i, depth in enumerate(own.depths):
                straight = own.paths is None or own.paths[i][-1] == depth
                places.append((index, own.length + depth, written + i, -1 if straight else len(slots)))
                if own.paths is not None and not straight:
                    slots.extend(own.length + slot for slot in own.paths[i])
        blocks = [np.array(own.blocks, dtype=np.int64) for own in rows]
        sequences = [
            (own.keys.data_ptr(), own.values.data_ptr(), own.keys.stride(0), table.ctypes.data, own.length)
            for own, table in zip(rows, blocks, strict=True)
        ]
        held = [np.array(table, dtype=np.int64) for table in (sequences, places, slots)]
        self._held = (held, blocks, [(own.keys, own.values) for own in rows])  # what the pointers point to
        self._tables = RotaryTables(torch.from_numpy(held[1])[:, 1], torch.float32)
        _, _, kv_heads, _, head_dim = rows[0].keys.shape
        if head_dim > _WIDEST:
            raise ValueError(f"heads of {head_dim}: the native attention takes at most {_WIDEST}")
        self._step = _Step(*(table.ctypes.data for table in held), len(places), num_heads, kv_heads, head_dim)
        self.reference = ctypes.byref(self._step)

    def rotary(self, rope: Rope) -> tuple[int, int]:
        """Addresses of cos and sin, [rows, head_dim] float32, valid as long as the step is."""
        table = self._tables.of(rope)
        return table.cos.data_ptr(), table.sin.data_ptr()

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        qkv = qkv.contiguous()
        out = qkv.new_empty(qkv.shape[0], layer.num_heads * layer.head_dim)
        norms = (layer.q_norm, layer.k_norm)
        done = self._call(
            self._level,
            self.reference,
            layer.index,
            EVERYTHING if layer.window is None else layer.window,
            layer.scale,
            layer.eps,
            *(None if norm is None else norm.data_ptr() for norm in norms),
            layer.q_norm is not None and layer.q_norm.dtype == torch.float32,
            *self.rotary(layer.rope),
            qkv.data_ptr(),
            out.data_ptr(),
            self._threads,
        )
        if not done:
            raise MemoryError("the native attention could not be computed")
        return out
