"""`Support`: the tokens that a distribution leaves possible, and their weights."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Support:
    """Unnormalised probabilities: `weights` [M] float64 of the tokens `ids` [M], ascending; None: of all tokens."""

    weights: Tensor
    ids: Tensor | None = None

    @classmethod
    def of(cls, weights: "Tensor | Support") -> "Support":
        """A dense row [V] as a support of all tokens."""
        return weights if isinstance(weights, Support) else cls(weights)

    def dense(self, vocab_size: int) -> Tensor:
        """The row [V], zero where nothing is possible."""
        if self.ids is None:
            return self.weights
        row = torch.zeros(vocab_size, dtype=self.weights.dtype, device=self.weights.device)
        return row.index_put_((self.ids,), self.weights)
