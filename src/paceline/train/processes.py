"""Several processes that train together: each takes some packs of a step, and gradients are summed.

Started by `accelerate launch` (or torchrun); alone, nothing is ever sent.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from paceline.errors import PacelineError

T = TypeVar("T")


class Processes:
    """One process alone."""

    rank = 0
    count = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def share(self, packs: Sequence[T]) -> list[T]:
        """This process's of a step's packs."""
        return list(packs[self.rank :: self.count])

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add up each tensor over all processes, in place."""

    def sum_numbers(self, counts: torch.Tensor, *numbers: float) -> tuple[torch.Tensor, tuple[float, ...]]:
        """The same for a table of counts and for numbers."""
        flat = torch.tensor(numbers, dtype=torch.float64)
        self.sum([counts, flat])
        return counts, tuple(flat.tolist())

    def wait(self) -> None:
        """Until all processes have come here."""


class Accelerated(Processes):
    """Those that `accelerate launch` started."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.rank, self.count = accelerator.process_index, accelerator.num_processes

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(self._accelerator.reduce(tensor, reduction="sum"))

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()


def launched() -> Processes:
    """The processes that this one was started among. Raises PacelineError if `accelerate` is not installed."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise PacelineError(
            f"{os.environ['WORLD_SIZE']} processes were started, and accelerate is not installed",
            hint="pip install accelerate",
        ) from error
    return Accelerated(Accelerator(cpu=not torch.cuda.is_available()))
