"""What the contract tests stand on: every registered method on tiny random targets, and ways to look over its shoulder.

A method that needs nothing, or a draft model, is built from its registry line alone; one that needs a head from a file
in `HEADS`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import torch
from drafters import head_files

from paceline.core.drafting import DraftSampler, Draw
from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.decode import Step
from paceline.drafters.base import Drafter, SequenceView, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.registry import find, names
from paceline.models.cache import KVPool
from paceline.models.load import LoadedModel, load_model

VOCAB, NUM_LAYERS = 16, 5  # so few tokens that random heads are right now and then
FAMILIES = {"llama": "fp32", "qwen3": "bf16"}
GREEDY = SamplingParams(temperature=0, max_tokens=14)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=14)
BUDGET = {"chain": 4, "tree": 12}

Matrix = torch.Tensor
HEADS: dict[str, Callable[[Matrix, Matrix], head_files.Head | head_files.Medusa]] = {
    "medusa": lambda embed, output: head_files.medusa(output, "original", own_output=False),
    "eagle": lambda embed, output: head_files.eagle(embed, output),
    "eagle3": lambda embed, output: head_files.eagle3_speculators(embed, draft_vocab=14, fc_norm=True),
}
MEMBERS = {"chain": ["suffix", "draft_model"], "tree": ["ngram", "token_recycling"]}
# Random models are never as sure as the usual threshold wants them to be.
OPTIONS = {"layer_skip": {"draft_confidence_threshold": 0.2}, "early_exit": {"draft_confidence_threshold": 0.2}}


@dataclass(frozen=True)
class Case:
    """A method, drafting one of its shapes."""

    name: str
    shape: str

    def __str__(self) -> str:
        return f"{self.name}, {self.shape}"

    @property
    def budget(self) -> int:
        return BUDGET[self.shape]


CASES = [Case(name, shape) for name in names() for shape in find(name).shapes]
DRAFTING = [case for case in CASES if case.name != "none"]


@dataclass
class Shelf:
    """Targets, and the files of what drafts for them; made once."""

    folder: Path
    targets: dict[str, LoadedModel] = field(default_factory=dict)

    def target(self, family: str) -> LoadedModel:
        if family not in self.targets:
            model = self._model(family)
            model.save_pretrained(self.folder / family)
            embed, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
            for name, head in HEADS.items():
                head(embed.detach().double(), output.detach().double()).write(self.folder / f"{family}-{name}")
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.04 * torch.randn(parameter.shape, generator=generator))
            model.save_pretrained(self.folder / f"{family}-draft")
            self.targets[family] = load_model(str(self.folder / family), dtype=FAMILIES[family])
        return self.targets[family]

    @staticmethod
    def _model(family: str) -> Any:
        """Its later layers change little: drafts with a part of them are right often, and wrong often."""
        config = tiny.hf_config(family, vocab_size=VOCAB, num_hidden_layers=NUM_LAYERS)
        model = tiny.hf_model(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ("o_proj" in name or "down_proj" in name) and ".layers.0." not in name:
                    parameter.mul_(0.2)
        return model

    def drafter(self, case: Case, family: str) -> Drafter:
        """A fresh one, from the configuration that a user would write."""
        method, target = find(case.name), self.target(family)
        values: dict[str, Any] = {"method": case.name, "num_speculative_tokens": case.budget}
        if method.needs_model:
            values["model"] = self._file(family, "draft" if method.needs == "model" else case.name)
        if method.needs == "methods":
            values["methods"] = MEMBERS[case.shape]
            if any(find(member).needs_model for member in MEMBERS[case.shape]):
                values["model"] = self._file(family, "draft")
        elif len(method.shapes) > 1:
            values["speculative_token_tree"] = {"chain": "chain", "tree": "static"}[case.shape]
        return create_drafter(SpeculativeConfig.from_dict(values | OPTIONS.get(case.name, {})), target)

    def _file(self, family: str, name: str) -> str:
        path = self.folder / f"{family}-{name}"
        assert path.is_dir(), f"HEADS has no head for method {name!r}"
        return str(path)


def prompt_of(length: int) -> list[int]:
    return tiny.prompt(length, seed=length, vocab_size=VOCAB)


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def held(thing: Any, seen: set[int] | None = None) -> int:
    """Entries of all containers, and cache blocks, that a drafter holds on to."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, KVPool):
        return thing.blocks_in_use
    if isinstance(thing, dict):
        return len(thing) + sum(held(value, seen) for value in thing.values())
    if isinstance(thing, list | tuple | set | frozenset):
        return len(thing) + sum(held(value, seen) for value in thing)
    if not type(thing).__module__.startswith("paceline.drafters"):
        return 0
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = {name: getattr(thing, name) for name in slots if hasattr(thing, name)} | getattr(thing, "__dict__", {})
    return sum(held(value, seen) for value in fields.values())


@contextmanager
def nothing_left(drafter: Drafter) -> Iterator[None]:
    """What is done inside must leave the drafter as it was."""
    before = held(drafter)
    yield
    assert held(drafter) == before


class Wrapped:
    """A drafter, watched: the target's cache has a row for every token but the last whenever it drafts."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name, self.needs = inner, inner.name, inner.needs
        self.num_rounds = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        for sequence in sequences:
            assert sequence.cache.length == len(sequence.token_ids) - 1
        self.num_rounds += 1
        proposals = self.drafts(sequences, budgets)
        for sequence in sequences:
            assert sequence.cache.length == len(sequence.token_ids) - 1
        return proposals

    def drafts(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return self.inner.propose(sequences, budgets)


class Pausing(Wrapped):
    """Drafts in every n-th round; `drafted`: what, by the text's length."""

    def __init__(self, inner: Drafter, every: int) -> None:
        super().__init__(inner)
        self.every = every
        self.drafted: dict[int, Proposal] = {}

    def drafts(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        if self.num_rounds % self.every:
            return [Proposal.empty() for _ in sequences]
        proposals = super().drafts(sequences, budgets)
        self.drafted |= {len(s.token_ids): p for s, p in zip(sequences, proposals, strict=True)}
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
    """Blows once, at the n-th use, until it is `renewed`."""

    def __init__(self) -> None:
        self.left = 0

    def use(self) -> None:
        self.left -= 1
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
    """In every round raises somewhere on the way the first time it is asked; `num_stumbles` counts."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.fuse = Fuse()
        self.num_stumbles = 0

    def drafts(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        self.fuse.left = 1 + self.num_rounds % 13
        fused: list[Any] = [Fused(sequence, self.fuse) for sequence in sequences]
        try:
            return self.inner.propose(fused, budgets)
        except RuntimeError:
            self.num_stumbles += 1
            return self.inner.propose(sequences, budgets)
        finally:
            self.fuse.left = 0
