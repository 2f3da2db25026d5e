"""What the training loop asks of a recipe, and what recipes have in common."""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from paceline.models.decoder import Decoder
from paceline.ops.linear import Linear
from paceline.ops.packed import AnyLinear, unpacked
from paceline.train.batch import Batch

UNSURE = 0.2  # of the size that an output norm should have: what is certain and wrong at first takes long to unlearn
Parameters = dict[str, torch.Tensor]
"""Trained tensors by the name that they have in the finished checkpoint."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a batch taught. loss: a sum over `tokens` tokens, differentiable.

    counts: [depth, 3], for a draft's first token, its second, …: how many there were, on how many draft and target
    agree in their arg-max, and Σ min(p, q) over them.
    """

    loss: torch.Tensor
    tokens: int
    counts: torch.Tensor


class Recipe(Protocol):
    """How one kind of drafter is trained. `method`: what the result drafts with."""

    method: str
    layers: tuple[int, ...]
    """The target's states that a batch must hold."""
    parameters: Parameters
    depth: int
    """Rows of an outcome's counts."""
    drafting: Mapping[str, Any] = MappingProxyType({})
    """Keys of speculative_config that it is measured with; `model` is what was written, unless it is among them."""
    own_target: str | None = None
    """Where, in what is written, the target lies that is drafted for; None: it is the one that was trained on."""
    rates: Mapping[str, float] = MappingProxyType({})
    """Of single parameters: by what their learning rate differs from the run's."""

    def learn(self, batch: Batch) -> Outcome: ...

    def guesses(self, batch: Batch, steps: int) -> torch.Tensor:
        """[steps, T]: the draft's likeliest token `step` + 2 places after each one, on the text as it is; −1: none."""

    def write(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """The drafter as it now is, into an existing folder: config.json and model.safetensors."""

    def describe(self) -> dict[str, Any]:
        """Its settings, for the provenance."""


def trainable(tensors: Mapping[str, torch.Tensor]) -> Parameters:
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}


def in_one_call(linears: Iterable[AnyLinear]) -> None:
    """Training needs no rows that are the same in any company: a product over all rows at once is far cheaper."""
    for linear in linears:
        if isinstance(linear, Linear):
            linear.rows, linear.padded = sys.maxsize, False


def float_rows(linear: AnyLinear, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of a frozen output layer, as numbers. Raises PacelineError if it is packed."""
    weight = unpacked(linear).weight
    return weight if ids is None else weight[ids]


def next_token_guesses(after: torch.Tensor, batch: Batch, steps: int) -> torch.Tensor:
    """`Recipe.guesses` of a drafter that reads the text alone: after[t] [T] is its guess of the token after token t."""
    guesses = torch.full((steps, len(after)), -1)
    for step in range(steps):
        rows = batch.answers(step + 2).cpu().nonzero().flatten()
        guesses[step, rows] = after[rows + step + 1]
    return guesses


def stored_dtype(target: Decoder) -> torch.dtype:
    """Of a finished head: bf16 for a target that runs in it."""
    return torch.bfloat16 if target.dtype == torch.bfloat16 else working_dtype(target)


def working_dtype(target: Decoder) -> torch.dtype:
    """Of trained tensors: float32, or the target's where that is wider."""
    return torch.promote_types(target.dtype, torch.float32)


class Initial:
    """Random weights, the same for the same seed."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        """Normal with variance scale² / columns, drawn in float32."""
        drawn = torch.randn(rows, columns, generator=self._generator) * (scale / math.sqrt(columns))
        return drawn.to(self.device, self.dtype)

    def ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device, self.dtype).clone()
