"""The tokens that a distribution leaves possible, and their weights: listed, or worked out where they are asked for."""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny  # a temperature below it would be 0 in float32


@dataclass(frozen=True, slots=True)
class Support:
    """Unnormalised probabilities: `weights` [M] float64 of the tokens `ids` [M], ascending; None: of all tokens."""

    weights: Tensor
    ids: Tensor | None = None

    @classmethod
    def of(cls, weights: "Tensor | AnySupport") -> "AnySupport":
        """A dense row [V] as a support of all tokens."""
        return cls(weights) if isinstance(weights, Tensor) else weights

    def coarse(self) -> Tensor:
        """The weights [M], each to 1 part in 10⁵ or better."""
        return self.weights

    def at(self, index: Tensor) -> Tensor:
        """Some of the weights, exactly."""
        return self.weights[index]

    def dense(self, vocab_size: int) -> Tensor:
        """The row [V], zero where nothing is possible."""
        if self.ids is None:
            return self.weights
        row = torch.zeros(vocab_size, dtype=self.weights.dtype, device=self.weights.device)
        return row.index_put_((self.ids,), self.weights)


@dataclass(frozen=True, slots=True)
class Tempered:
    """exp((x − peak)/T) of every token: at most 1, and 1 at the peak for every T, however small.

    `logits` [V] in float32 or float64. A race looks at all coarsely and at few exactly: float64 over a large vocabulary
    would cost more than anything else in it.
    """

    logits: Tensor
    peak: Tensor
    temperature: float
    ids: ClassVar[None] = None

    @property
    def weights(self) -> Tensor:
        """All of them [V], in float64."""
        return self._exactly(self.logits)

    def coarse(self) -> Tensor:
        """In float32: of weights that matter (above 10⁻¹², so exponents above −28), rounding moves 1 part in 10⁵."""
        weights = (self.logits - self.peak).float()
        if self.temperature != 1:
            weights.div_(max(self.temperature, _TINY))
        return weights.exp_()

    def at(self, index: Tensor) -> Tensor:
        return self._exactly(self.logits[index])

    def dense(self, vocab_size: int) -> Tensor:
        return self.weights

    def _exactly(self, logits: Tensor) -> Tensor:
        weights = logits.to(torch.float64, copy=True).sub_(self.peak)
        if self.temperature != 1:
            weights.div_(self.temperature)
        return weights.exp_()


AnySupport: TypeAlias = Support | Tempered
