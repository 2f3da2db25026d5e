"""One call of a native product, whatever its weights are held as."""

from collections.abc import Callable

import torch


def multiply(
    call: Callable[..., bool],
    weights: tuple[int, ...],
    shape: tuple[int, int],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """y = x Wᵀ + bias + residual, rounded once: x [T, in] bf16 → [T, out] bf16.

    call, weights: a function of the library, and its arguments up to x. shape: (out, in). Raises ValueError for
    operands that do not fit.
    """
    out, inner = shape
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != inner:
        raise ValueError(f"activations are {x.dtype} {list(x.shape)}, not bf16 [T, {inner}]")
    if x.stride(1) != 1:
        x = x.contiguous()
    y = x.new_empty(x.shape[0], out)
    if residual is not None:
        if residual.shape != y.shape or residual.dtype != y.dtype:
            raise ValueError(f"residual is {residual.dtype} {list(residual.shape)}, not bf16 {list(y.shape)}")
        residual = residual.contiguous()
    done = call(
        *weights,
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    if not done:
        raise MemoryError("the native product could not be computed")
    return y
