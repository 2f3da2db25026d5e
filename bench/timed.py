"""Where the time goes: drafters and targets that know how much of it was spent in them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.core.proposal import Proposal
from paceline.drafters.base import Drafter, Features, SequenceView
from paceline.models.decoder import Decoder, ForwardOutput

Clock = Callable[[], float]


class TimedDrafter:
    """A drafter; `seconds`: what it took to observe and to propose."""

    def __init__(self, inner: Drafter, now: Clock = time.perf_counter) -> None:
        self.inner, self.name, self.needs = inner, inner.name, inner.needs
        self.now = now
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        start = self.now()
        self.inner.observe(sequence, tokens, features)
        self.seconds += self.now() - start

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        start = self.now()
        proposals = self.inner.propose(sequences, budgets)
        self.seconds += self.now() - start
        return proposals


class TimedTarget:
    """A target; `seconds`: its passes, output layer included. A drafter that runs its layers holds the inner one."""

    def __init__(self, inner: Decoder, now: Clock = time.perf_counter) -> None:
        self.inner = inner
        self.now = now
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, *args: Any, **kwargs: Any) -> ForwardOutput:
        start = self.now()
        out = self.inner.forward(*args, **kwargs)
        self.seconds += self.now() - start
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        start = self.now()
        rows = self.inner.logits(hidden)
        self.seconds += self.now() - start
        return rows
