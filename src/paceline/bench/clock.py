"""Where the time of an engine's steps goes, watched from outside."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.bench.answers import StepCosts
from paceline.core.proposal import Proposal
from paceline.engine.engine import Engine
from paceline.engine.outputs import Update
from paceline.engine.scheduler import Turn

DRAFTING = ("propose", "observe", "begin", "fork", "snapshot", "release")  # of `Speculation`
PASSES = ("forward", "logits")  # of the target
Shape = tuple[tuple[int, ...], int]  # a proposal's parents, and how many of its nodes are verified


class StepClock:
    """Splits the steps of an engine: its drafters, the target's passes, and the rest (verifying, text, bookkeeping).

    A drafter that runs the target's own layers is drafting, not verifying. On CUDA the clock waits for the device.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cuda = engine.target.device.type == "cuda"
        self._inside = False  # a watched call
        self._spent = {"draft": 0.0, "target": 0.0}  # in the step at hand
        self._decodes = False  # whether the step at hand yields tokens (whose text may be shown later)
        self._drafted: dict[int, list[Shape]] = {}
        self._costs = StepCosts()

    def now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize(self._engine.target.device)
        return time.perf_counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around some steps: the engine's parts are its own again afterwards."""
        speculation, target = self._engine.speculation, self._engine.target
        watched: list[tuple[Any, str, str]] = [(speculation, name, "draft") for name in DRAFTING]
        watched += [(target, name, "target") for name in PASSES]
        try:
            for owner, name, part in watched:
                setattr(owner, name, self._timed(getattr(owner, name), part))
            setattr(speculation, "propose", self._noted(speculation.propose))  # noqa: B010 - mypy: a method is no variable
            yield
        finally:
            for owner, name, _ in watched:
                vars(owner).pop(name, None)

    def step(self) -> list[Update]:
        """A step of the engine, timed."""
        self._spent = {"draft": 0.0, "target": 0.0}
        self._decodes = False
        start = self.now()
        updates = self._engine.step()
        spent = self.now() - start
        costs = self._costs
        if self._decodes:
            costs.passes += 1
            costs.draft_s += self._spent["draft"]
            costs.target_s += self._spent["target"]
            costs.rest_s += spent - sum(self._spent.values())
        else:
            costs.prompt_s += spent
        return updates

    def take(self) -> tuple[StepCosts, dict[int, list[Shape]]]:
        """What there was since the last time: seconds, and the shapes of each request's drafts."""
        costs, drafted = self._costs, self._drafted
        self._costs, self._drafted = StepCosts(), {}
        return costs, drafted

    def _timed(self, inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Charges the outermost of nested calls."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return inner(*args, **kwargs)
            start, self._inside = self.now(), True
            try:
                return inner(*args, **kwargs)
            finally:
                self._inside = False
                self._spent[part] += self.now() - start

        return timed

    def _noted(self, inner: Callable[..., list[Proposal]]) -> Callable[..., list[Proposal]]:
        """Shapes are kept, to be looked at when nobody is waiting."""

        def noted(turns: Sequence[Turn], *rest: Any) -> list[Proposal]:
            self._decodes = len(turns) > 0
            proposals = inner(turns, *rest)
            for turn, proposal in zip(turns, proposals, strict=True):
                if proposal.tokens:
                    shapes = self._drafted.setdefault(turn.sequence.request.request_id, [])
                    shapes.append((proposal.parents, proposal.num_verified))
            return proposals

        return noted


def drafts_of_depth(shapes: Sequence[Shape]) -> tuple[int, ...]:
    """[i]: how many of the drafts go more than i tokens deep."""
    counts: list[int] = []
    for parents, num_verified in shapes:
        deepest = _depth(parents[:num_verified])
        counts.extend([0] * (deepest - len(counts)))
        for i in range(deepest):
            counts[i] += 1
    return tuple(counts)


def _depth(parents: Sequence[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
