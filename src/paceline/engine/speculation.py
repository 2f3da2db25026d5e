"""The drafters, and a wall around them: what goes wrong inside one costs its request the speculation, nothing else."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from typing import Any, TypeVar

import torch

from paceline.core.proposal import Proposal, check_proposal, check_states
from paceline.drafters.base import Drafter, Features, Needs, check_needs
from paceline.engine.prefix_cache import Hit, PrefixCache
from paceline.engine.request import has_methods
from paceline.engine.scheduler import Turn
from paceline.engine.sequence import Sequence
from paceline.errors import PacelineError
from paceline.models.cache import CacheFull
from paceline.models.decoder import Decoder
from paceline.values import shown

logger = logging.getLogger("paceline.engine")
T = TypeVar("T")


class Speculation:
    """All drafters of an engine, by name. `faults` counts what each did wrong."""

    def __init__(self, prefix_cache: PrefixCache, target: Decoder) -> None:
        self.drafters: dict[str, Drafter] = {}
        self.taps: tuple[int, ...] = ()  # layers whose output some drafter wants to see
        self.faults: Counter[str] = Counter()
        self._prefix_cache = prefix_cache
        self._num_layers = target.config.num_layers
        self._vocab_size = target.config.vocab_size
        self._states = torch.empty(0, target.config.hidden_size, dtype=target.dtype, device=target.device)

    def add(self, name: str, drafter: Drafter) -> None:
        """Raises PacelineError for a drafter whose needs a shared target pass cannot meet."""
        calls = ("observe", "propose", "snapshot", "restore", "discard", "mend", "fork", "release")
        if not has_methods(drafter, *calls) or not isinstance(getattr(drafter, "needs", None), Needs):
            raise PacelineError(
                f"method {shown(name)} is {shown(drafter)}: that is no drafter", hint=f"it needs {calls}"
            )
        check_needs(drafter, self._num_layers)
        for other, present in self.drafters.items():
            if None not in (exits := {drafter.needs.early_layer, present.needs.early_layer}) and len(exits) > 1:
                raise PacelineError(
                    f"method {shown(name)} exits at layer {drafter.needs.early_layer} "
                    f"and {shown(other)} at layer {present.needs.early_layer}",
                    hint="let them exit at the same layer",
                )
        self.drafters[name] = drafter
        self.taps = tuple(sorted({*self.taps, *(layer for layer in drafter.needs.hidden_layers if layer >= 0)}))

    def propose(self, turns: Iterable[Turn]) -> list[Proposal]:
        """One proposal a turn, empty where nothing was drafted; one call for all sequences of a drafter."""
        turns = list(turns)
        by_drafter: dict[int, list[int]] = {}
        for i, turn in enumerate(turns):
            if turn.budget > 0 and turn.sequence.drafter is not None:
                by_drafter.setdefault(id(turn.sequence.drafter), []).append(i)
        proposals = [Proposal.empty()] * len(turns)
        for members in by_drafter.values():
            drafter = turns[members[0]].sequence.drafter
            assert drafter is not None
            for i, proposal in zip(members, self._ask(drafter, [turns[i] for i in members]), strict=True):
                proposals[i] = proposal
        return proposals

    def _ask(self, drafter: Drafter, turns: list[Turn]) -> list[Proposal]:
        try:
            return self._proposals(drafter, turns)
        except CacheFull:
            if self._prefix_cache.drop_snapshots(drafter):
                return self._ask(drafter, turns)
            if len(turns) == 1:
                return [Proposal.empty()]
        except Exception as error:
            if len(turns) == 1:
                self.fail(turns[0].sequence, error)
                return [Proposal.empty()]
        return [proposal for turn in turns for proposal in self._ask(drafter, [turn])]  # one by one: whose was it?

    def _proposals(self, drafter: Drafter, turns: list[Turn]) -> list[Proposal]:
        budgets = [turn.budget for turn in turns]
        proposals = drafter.propose([turn.sequence for turn in turns], budgets)
        if len(proposals) != len(turns):
            raise ValueError(f"{len(proposals)} proposals for {len(turns)} sequences")
        for proposal, budget in zip(proposals, budgets, strict=True):
            check_proposal(proposal, budget, self._vocab_size)
            check_states(proposal.hidden, self._states)
        return proposals

    def begin(self, sequence: Sequence, hit: Hit) -> None:
        """A sequence whose first rows were found in the prefix cache, or (an empty hit) that was put back."""
        self._guard(sequence, lambda drafter: drafter.restore(sequence, hit.snapshot, hit.num_tokens))

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        child.drafter = sequence.drafter
        self._guard(child, lambda drafter: drafter.fork(sequence, child))

    def observe(self, sequence: Sequence, tokens: Ids[int], features: Callable[[Drafter], Features]) -> None:
        self._guard(sequence, lambda drafter: drafter.observe(sequence, tokens, features(drafter)))

    def snapshot(self, sequence: Sequence) -> Any:
        return self._guard(sequence, lambda drafter: drafter.snapshot(sequence))

    def release(self, sequence: Sequence) -> None:
        self._guard(sequence, lambda drafter: drafter.release(sequence))

    def mend(self) -> None:
        """After an interruption, before any other call: it may have come inside a drafter."""
        for name, drafter in self.drafters.items():
            try:
                drafter.mend(self._prefix_cache.snapshots(drafter))
            except Exception:
                self.faults[name] += 1
                logger.exception("method %s could not mend what an interruption left", name)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """The request goes on without speculation."""
        drafter = sequence.drafter
        if drafter is None:
            return
        self.faults[drafter.name] += 1
        logger.warning(
            "request %d goes on without speculation: method %s: %s: %s",
            sequence.request.request_id,
            drafter.name,
            type(error).__name__,
            error,
            exc_info=not isinstance(error, PacelineError),
        )
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        drafter, sequence.drafter = sequence.drafter, None
        try:
            if drafter is not None:
                drafter.release(sequence)
        except Exception:
            logger.exception("a method could not even forget request %d", sequence.request.request_id)

    def _guard(self, sequence: Sequence, call: Callable[[Drafter], T]) -> T | None:
        if sequence.drafter is None:
            return None
        try:
            return call(sequence.drafter)
        except Exception as error:
            self.fail(sequence, error)
            return None
        except BaseException:  # Ctrl-C: the drafter may have lost its place
            self._forget(sequence)
            raise
