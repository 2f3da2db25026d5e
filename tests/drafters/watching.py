"""Ways to look over a drafter's shoulder: what it holds, what it was asked and answered, and how it takes a stumble."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.drafting import DraftSampler, Draw
from paceline.core.proposal import Proposal
from paceline.drafters.base import Drafter, SequenceView
from paceline.models.cache import KVPool


def held(drafter: Any) -> int:
    """Entries of all containers, and cache blocks, that a drafter holds on to; a model's weights are none."""
    package = type(drafter).__module__.partition(".")[0]
    return _held(drafter, ("paceline.drafters",) if package == "paceline" else ("paceline.drafters", package), set())


def _held(thing: Any, homes: tuple[str, ...], seen: set[int]) -> int:
    """`homes`: where the classes are from whose objects are looked into: the methods' own."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, KVPool):
        return thing.blocks_in_use
    if isinstance(thing, dict):
        return len(thing) + sum(_held(value, homes, seen) for value in thing.values())
    if isinstance(thing, list | tuple | set | frozenset):
        return len(thing) + sum(_held(value, homes, seen) for value in thing)
    if not type(thing).__module__.startswith(homes):
        return 0
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = {name: getattr(thing, name) for name in slots if hasattr(thing, name)} | getattr(thing, "__dict__", {})
    return sum(_held(value, homes, seen) for value in fields.values())


@contextmanager
def nothing_left(drafter: Drafter) -> Iterator[None]:
    """What is done inside must leave the drafter as it was."""
    before = held(drafter)
    yield
    assert held(drafter) == before


class Wrapped:
    """A drafter, watched: the target's cache has a row for every token but the last whenever it drafts.

    `batches`: how many requests it drafted for at once; `drafted`: of a single one what, by the text's length;
    `drafted_by`: of each.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name, self.needs = inner, inner.name, inner.needs
        self.num_rounds = 0
        self.batches: set[int] = set()
        self.drafted: dict[int, Proposal] = {}
        self.drafted_by: dict[tuple[int, int], Proposal] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        self.num_rounds += 1
        self.batches.add(len(sequences))
        _check_lengths(sequences)
        proposals = self.drafts(sequences, budgets)
        _check_lengths(sequences)
        self.drafted_by |= {(s.request_id, len(s.token_ids)): p for s, p in zip(sequences, proposals, strict=True)}
        self.drafted |= {len(s.token_ids): p for s, p in zip(sequences, proposals, strict=True)}
        return proposals

    def drafts(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return self.inner.propose(sequences, budgets)


def _check_lengths(sequences: Sequence[SequenceView]) -> None:
    for sequence in sequences:
        assert sequence.cache.length == len(sequence.token_ids) - 1


class Struck(Wrapped):
    """While `armed`, has drafted when Ctrl-C comes, once."""

    armed = False

    def drafts(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        proposals = super().drafts(sequences, budgets)
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        return proposals


class Absent(Wrapped):
    """Drafts in the first round, and then not until the text has `until` tokens."""

    def __init__(self, inner: Drafter, until: int) -> None:
        super().__init__(inner)
        self.until = until

    def drafts(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        (sequence,) = sequences
        if self.num_rounds > 1 and len(sequence.token_ids) < self.until:
            return [Proposal.empty()]
        return super().drafts(sequences, budgets)


class Rationed(Wrapped):
    """Requests of a batch get all of the budget, one node or none, in turn.

    `num_uneven`: target passes that accepted more of one request's draft than of another's.
    """

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.num_uneven = 0
        self._lengths: dict[int, int] = {}  # of the texts that got a draft in the last round

    def drafts(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        known = [s for s in sequences if s.request_id in self._lengths]
        self.num_uneven += len({len(s.token_ids) - self._lengths[s.request_id] for s in known}) > 1
        rations = [(budget, 1, 0)[(self.num_rounds + i) % 3] for i, budget in enumerate(budgets)]
        proposals = super().drafts(sequences, rations)
        assert all(len(proposal) <= ration for proposal, ration in zip(proposals, rations, strict=True))
        drafted = zip(sequences, proposals, strict=True)
        self._lengths = {s.request_id: len(s.token_ids) for s, proposal in drafted if proposal.num_verified}
        return proposals


@dataclass(frozen=True)
class Noting:
    """A sampler, and what it drew after each drafted path."""

    inner: DraftSampler
    noted: dict[tuple[int, ...], Draw]
    path: tuple[int, ...] = ()

    @property
    def prunable(self) -> bool:
        return self.inner.prunable

    def draw(self, logits: torch.Tensor, k: int = 1) -> Draw:
        return self.noted.setdefault(self.path, self.inner.draw(logits, k))

    def scored(self, logits: torch.Tensor, k: int) -> Draw:
        return self.noted.setdefault(self.path, self.inner.scored(logits, k))

    def advance(self, *tokens: int) -> "Noting":
        return Noting(self.inner.advance(*tokens), self.noted, (*self.path, *tokens))


class View:
    """A request, seen through a drafter's eyes, with another sampler."""

    def __init__(self, inner: SequenceView, sampler: Any) -> None:
        self.inner, self.draft_sampler = inner, sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class HandedOver(Wrapped):
    """Every drawn token stands in the draft, under the path it was drawn after, with the row it was drawn from."""

    def drafts(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        noted: list[dict[tuple[int, ...], Draw]] = [{} for _ in sequences]
        views = [View(s, Noting(s.draft_sampler, own)) for s, own in zip(sequences, noted, strict=True)]
        proposals = super().drafts(views, budgets)  # type: ignore[arg-type]
        for proposal, draws in zip(proposals, noted, strict=True):
            self._check(proposal, draws)
        return proposals

    def _check(self, proposal: Proposal, draws: dict[tuple[int, ...], Draw]) -> None:
        assert not proposal.pruned
        paths = {(): -1} | {tuple(proposal.path_tokens(node)): node for node in range(proposal.num_verified)}
        for path, node in paths.items():
            children = proposal.children(node)
            drawn = draws.get(path)
            row = proposal.draft_row(node) if children else None
            if drawn is None or drawn.probs is None:
                assert row is None  # a point mass
            else:
                assert tuple(proposal.tokens[child] for child in children) == drawn.tokens
                assert row is not None and torch.equal(torch.as_tensor(row), torch.as_tensor(drawn.probs))
        assert draws.keys() <= paths.keys()


class Fuse:
    """Blows once, at the n-th use, until it is `renewed`; counts its uses."""

    def __init__(self) -> None:
        self.left = self.uses = 0

    def use(self) -> None:
        self.left -= 1
        self.uses += 1
        if self.left == 0:
            raise RuntimeError("in mid-draft")


class Fused:
    """Something whose attributes a drafter reads through a fuse; its samplers too."""

    def __init__(self, inner: Any, fuse: Fuse) -> None:
        self._inner, self._fuse = inner, fuse

    def __getattr__(self, name: str) -> Any:
        self._fuse.use()
        value = getattr(self._inner, name)
        if name == "draft_sampler":
            return Fused(value, self._fuse)
        if name == "advance":
            return lambda *tokens: Fused(value(*tokens), self._fuse)
        return value


class Stumbling(Wrapped):
    """In every round raises somewhere on the way the first time it is asked; `num_stumbles` counts.

    The way is as long as the `looks` that it took at the requests in the round before: one that never looks at them
    cannot be made to stumble.
    """

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.fuse = Fuse()
        self.looks = 1
        self.num_stumbles = 0

    def drafts(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        self.fuse.left = 1 + (5 * self.num_rounds) % max(self.looks, 1)
        fused: list[Any] = [Fused(sequence, self.fuse) for sequence in sequences]
        try:
            return self._watched(fused, budgets)
        except RuntimeError:
            self.num_stumbles += 1
            return self._watched(fused, budgets)
        finally:
            self.fuse.left = 0

    def _watched(self, fused: Sequence[Any], budgets: Sequence[int]) -> list[Proposal]:
        self.fuse.uses = 0
        proposals = self.inner.propose(fused, budgets)
        self.looks = self.fuse.uses
        return proposals
