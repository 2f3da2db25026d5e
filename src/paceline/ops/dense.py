"""Products with plain bf16 weights on the CPU, natively: the twin of `ops.linear` for any number of rows.

An element's sum follows from its own rows of x and W alone, so no call has to be of a fixed size. bf16 in and out,
float32 sums, one rounding, after bias and residual.
"""

import torch

from paceline.errors import PacelineError
from paceline.ops.linear import Linear
from paceline.ops.native.library import LEVELS, Missing, level, load
from paceline.ops.native.product import multiply
from paceline.ops.native.weights import Weights


class DenseLinear:
    """y = x Wᵀ + b with W as a checkpoint holds it.

    weight: [out, in] bf16, bias: [out] bf16 or None. `at`: of `native.library.LEVELS`; the best by default.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, at: str | None = None) -> None:
        library, chosen = load(), at or level()
        if isinstance(library, Missing) or chosen not in library.levels:
            raise PacelineError(f"this machine has no native operators at level {chosen}")
        self.weight = weight.contiguous()
        self.bias = None if bias is None else bias.contiguous()
        self.level = chosen
        self._number = LEVELS.index(chosen)
        self._dense = library.functions["dense"]

    @property
    def arithmetic(self) -> str:
        """What a verdict on it holds for."""
        return f"native bf16 {self.level}"

    def native(self) -> Weights:
        out, inner = self.weight.shape
        return Weights.of(self.weight, out, inner, self.bias)

    def first(self, size: int) -> "DenseLinear":
        """The first `size` outputs alone; the weights are shared."""
        return DenseLinear(self.weight[:size], None if self.bias is None else self.bias[:size], self.level)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, in] bf16 → [T, out] bf16; `residual` [T, out] is added before the one rounding."""
        out, inner = self.weight.shape
        weights = self._number, self.weight.data_ptr(), out, inner
        return multiply(self._dense, weights, (out, inner), x, self.bias, residual)


PlainLinear = Linear | DenseLinear


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PlainLinear:
    """The linear layer of a weight matrix of numbers [out, in]: native where there are operators for it."""
    native = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and level() is not None
    return DenseLinear(weight, bias) if native else Linear(weight, bias)
