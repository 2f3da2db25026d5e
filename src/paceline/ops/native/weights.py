"""A matrix as `native/layer.cpp` reads it."""

import ctypes

import torch


class Weights(ctypes.Structure):
    """`Weights` of layer.cpp. What it points to is somebody else's to hold."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("packed_bytes", ctypes.c_int64),
        ("out", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, data: torch.Tensor, out: int, inner: int, bias: torch.Tensor | None) -> "Weights":
        """data: rows of bf16, or bytes if the matrix is packed."""
        packed = data.numel() if data.dtype == torch.uint8 else 0
        return cls(data.data_ptr(), packed, out, inner, None if bias is None else bias.data_ptr())
