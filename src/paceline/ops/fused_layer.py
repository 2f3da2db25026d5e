"""A decoder layer's halves in one native call each: the same operators in the same order, so the same bits."""

import ctypes

import torch

from paceline.ops.fused import EVERYTHING, NativeOperators, NativeStep
from paceline.ops.layer import Layer
from paceline.ops.native.library import LEVELS
from paceline.ops.native.weights import Weights
from paceline.ops.operators import Operators, Step


class _NormWeight(ctypes.Structure):
    """`NormWeight` of layer.cpp."""

    _fields_ = (("data", ctypes.c_void_p), ("wide", ctypes.c_bool))

    @classmethod
    def of(cls, weight: torch.Tensor | None) -> "_NormWeight":
        return cls(None, False) if weight is None else cls(weight.data_ptr(), weight.dtype == torch.float32)


_NORMS = ("attention_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm", "q_norm", "k_norm")
_MATRICES = ("qkv", "output", "gate_up", "down")


class _Layer(ctypes.Structure):
    """`Layer` of layer.cpp."""

    _fields_ = (
        *((name, Weights) for name in _MATRICES),
        *((name, _NormWeight) for name in _NORMS),
        ("index", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("gelu", ctypes.c_bool),
    )


class FusedLayer:
    """A layer whose matrices and operators are native, all of one level."""

    def __init__(self, layer: Layer, operators: NativeOperators) -> None:
        self.layer = layer
        self._level, self._functions = operators.level, operators.functions
        attention = layer.attention
        self._native = _Layer(
            *(getattr(layer, name).native() for name in _MATRICES),
            *(_NormWeight.of(getattr(layer, name)) for name in _NORMS),
            attention.index,
            EVERYTHING if attention.window is None else attention.window,
            attention.scale,
            layer.eps,
            layer.activation != "silu",
        )
        self._reference = ctypes.byref(self._native)

    def attend(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`Layer.attend`."""
        assert isinstance(step, NativeStep)
        x = x.contiguous()
        y = torch.empty_like(x)
        cos, sin = step.rotary(self.layer.attention.rope)
        done = self._functions["attention_half"](
            self._level, self._reference, step.reference, cos, sin, x.data_ptr(), y.data_ptr(), torch.get_num_threads()
        )
        return _checked(y, done)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """`Layer.feed_forward`."""
        x = x.contiguous()
        y = torch.empty_like(x)
        done = self._functions["mlp_half"](
            self._level, self._reference, x.data_ptr(), x.shape[0], y.data_ptr(), torch.get_num_threads()
        )
        return _checked(y, done)


def _checked(y: torch.Tensor, done: bool) -> torch.Tensor:
    if not done:
        raise MemoryError("the native layer could not be computed")
    return y


def fuse(layer: Layer, operators: Operators) -> FusedLayer | None:
    """None unless all of the layer is native, at one level."""
    if not isinstance(operators, NativeOperators):
        return None
    levels = {getattr(layer, name).level for name in _MATRICES}
    return FusedLayer(layer, operators) if levels == {LEVELS[operators.level]} else None
