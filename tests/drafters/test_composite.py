"""Composite: the first draft that isn't empty, each member told everything and asked no more than it must be."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from law import CAUGHT, LENGTH, Case, faults, p_value, quick_tally
from law_cases import DRAFT, TARGET
from law_models import TableDrafter

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.core.verify import Standard
from paceline.decode import decode
from paceline.drafters.base import Drafter, Features, Needs, SequenceView, create_drafter
from paceline.drafters.composite import CompositeDrafter, Member, member_configs, share
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.none import NoDrafter
from paceline.drafters.registry import METHODS
from paceline.drafters.suffix import SuffixDrafter
from paceline.errors import PacelineError
from paceline.models.load import load_model


@dataclass
class Text:
    token_ids: list[int]
    request_id: int = 0
    num_prompt_tokens: int = 0
    draft_sampler: None = None
    private_drafts: bool = False


@dataclass
class Recording(NoDrafter):
    """Drafts what the script says by request; notes each call."""

    name: str = "recording"
    needs: Needs = field(default_factory=Needs)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        self.calls.append(("observe", sequence.request_id, list(tokens), features))

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        self.calls.append(("propose", [s.request_id for s in sequences], list(budgets)))
        return [Proposal.chain(self.drafts.get(s.request_id, [])[:b]) for s, b in zip(sequences, budgets, strict=True)]

    def snapshot(self, sequence: SequenceView) -> Any:
        return f"{self.name} of {sequence.request_id}"

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        self.calls.append(("restore", sequence.request_id, snapshot, length))

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        self.calls.append(("fork", sequence.request_id, child.request_id))

    def release(self, sequence: SequenceView) -> None:
        self.calls.append(("release", sequence.request_id))


def composite(*drafters: Drafter, limits: Sequence[int] = (128, 128, 128)) -> CompositeDrafter:
    return CompositeDrafter([Member(d, limit) for d, limit in zip(drafters, limits, strict=False)])


def test_each_member_is_called_once_for_the_sequences_still_empty() -> None:
    first = Recording(drafts={1: [11], 4: [41, 42, 43]})
    second = Recording(drafts={1: [99], 2: [21, 22, 23], 5: [51]})
    third = Recording(drafts={3: [31, 32]})
    drafter = composite(first, second, third, limits=(128, 2, 1))
    texts = [Text([0], number) for number in range(1, 7)]
    proposals = drafter.propose(texts, [4, 4, 4, 2, 0, 3])  # type: ignore[arg-type]
    assert [list(p.tokens) for p in proposals] == [[11], [21, 22], [31], [41, 42], [], []]
    assert first.calls == [("propose", [1, 2, 3, 4, 6], [4, 4, 4, 2, 3])]
    assert second.calls == [("propose", [2, 3, 6], [2, 2, 2])]
    assert third.calls == [("propose", [3, 6], [1, 1])]


def test_a_member_that_isnt_needed_isnt_asked() -> None:
    first, second = Recording(drafts={1: [5], 2: [6]}), Recording()
    composite(first, second).propose([Text([0], 1), Text([0], 2)], [3, 3])  # type: ignore[list-item]
    assert not second.calls
    first.calls.clear()
    assert composite(first, second).propose([Text([0], 1)], [0]) == [Proposal.empty()]  # type: ignore[list-item]
    assert not first.calls and not second.calls


def test_everyone_hears_everything() -> None:
    members = Recording(name="one"), Recording(name="two")
    drafter, text, child = composite(*members), Text([0], 1), Text([0], 2)
    drafter.observe(text, [3, 4], Features())  # type: ignore[arg-type]
    snapshot = drafter.snapshot(text)  # type: ignore[arg-type]
    drafter.restore(child, snapshot, 2)  # type: ignore[arg-type]
    drafter.restore(child, None, 1)  # type: ignore[arg-type]
    drafter.fork(text, child)  # type: ignore[arg-type]
    drafter.release(child)  # type: ignore[arg-type]
    for member in members:
        assert member.calls == [
            ("observe", 1, [3, 4], Features()),
            ("restore", 2, f"{member.name} of 1", 2),
            ("restore", 2, None, 1),
            ("fork", 1, 2),
            ("release", 2),
        ]


# Needs and features


def test_needs_are_united_and_each_gets_its_own() -> None:
    one = Recording(needs=Needs(hidden_layers=(2, -1), top_tokens=3))
    two = Recording(needs=Needs(hidden_layers=(2, 5), top_tokens=1, early_layer=4))
    drafter = composite(one, Recording(), two)
    assert drafter.needs == Needs(hidden_layers=(-1, 2, 5), top_tokens=3, early_layer=4)
    hidden = {layer: torch.full((2, 8), float(layer)) for layer in (-1, 2, 5)}
    top = torch.tensor([[7, 8, 9], [4, 5, 6]])
    own = share(Features(hidden, top), two.needs, drafted=False)
    assert set(own.hidden) == {2, 5} and own.hidden[5] is hidden[5]
    assert own.top_tokens is not None and own.top_tokens.tolist() == [[7], [4]]
    own = share(Features(hidden, top), Needs(), drafted=True)
    assert not own.hidden and own.top_tokens is None
    assert share(Features({}, None), Needs(top_tokens=2), drafted=True).top_tokens is None  # a prompt chunk


def test_exits_at_different_layers_are_refused() -> None:
    one, two = (Recording(name=f"exit {n}", needs=Needs(early_layer=n)) for n in (4, 6))
    composite(one, Recording(needs=Needs(early_layer=4)))
    with pytest.raises(PacelineError, match="'exit 4' exits at layer 4 and 'exit 6' at layer 6"):
        composite(one, Recording(), two)


def test_scratch_nodes_are_shown_to_the_member_that_drafted_them() -> None:
    scratch = Needs(scratch_argmax=True)
    one, two = Recording(needs=scratch, drafts={1: [5]}), Recording(needs=scratch, drafts={1: [6], 2: [7]})
    drafter, texts = composite(one, two), [Text([0], 1), Text([0], 2), Text([0], 3)]
    drafter.propose(texts, [1, 1, 1])  # type: ignore[arg-type]
    one.calls.clear(), two.calls.clear()
    for text in (*texts, *texts):  # the second round's passes verified no draft of theirs
        drafter.observe(text, [0], Features(scratch_argmax=torch.tensor([text.request_id])))  # type: ignore[arg-type]
    seen = [[call[3].scratch_argmax for call in member.calls] for member in (one, two)]
    assert [[None if row is None else row.item() for row in rows] for rows in seen] == [
        [1, None, None, None, None, None],
        [None, 2, None, None, None, None],
    ]


# Not one token changes

PROMPT = [*tiny.prompt(40, seed=7), *tiny.prompt(40, seed=7)[:20]]
GREEDY = SamplingParams(temperature=0, max_tokens=60)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=60)
MODEL = tiny.tiny_decoder("llama", dtype=torch.bfloat16)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("stranger", [False, True], ids=["itself", "a stranger"])
def test_no_token_changes_cold_or_warm(params: SamplingParams, stranger: bool) -> None:
    model = tiny.tiny_decoder("llama", seed=1, dtype=torch.bfloat16) if stranger else MODEL
    expected = [t for s in decode(MODEL, PROMPT, params, NoDrafter(), 0) for t in s.token_ids]
    suffix, drafted = SuffixDrafter(min_score=1.5), DraftModelDrafter(model)
    drafter = composite(suffix, drafted, limits=(24, 3))
    drafts: set[bool] = set()
    for _ in range(2):
        for k in (12, 3):
            steps = list(decode(MODEL, PROMPT, params, drafter, k))
            assert [t for s in steps for t in s.token_ids] == expected
            drafts |= {step.num_draft_tokens > 3 for step in steps[:-1] if k == 12}
    assert drafts == {True, False}, "one member did it all"
    assert not suffix._states and not drafted._states and not drafter._drafted_by
    assert drafted.pool.blocks_in_use == 0


def test_the_model_is_right_at_once_after_suffix_has_drafted() -> None:
    """It is told of what others drafted, and catches up: as the target's twin it is always accepted."""
    drafter = composite(SuffixDrafter(max_cached_requests=9), DraftModelDrafter(MODEL), limits=(24, 3))
    drafter.members[0].drafter.min_score = 1.0  # type: ignore[attr-defined]
    by_model = 0
    for _ in range(2):
        steps = []
        for step in decode(MODEL, PROMPT, SEEDED, drafter, 12):
            steps.append(step)
        by_model += sum(step.num_draft_tokens == step.num_accepted_tokens == 3 for step in steps)
        missed = [s for s in steps[:-1] if s.num_draft_tokens == 3 and s.num_accepted_tokens < 3]
        assert len(missed) <= 2, "suffix, too, may draft three"
    assert by_model > 5


class Peeking(CompositeDrafter):
    """The fault that must not be: it looks at what was sampled, and prefers the other draft to a 0."""

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        (proposal,) = super().propose(sequences, budgets)
        if proposal.draft_probs is None or proposal.tokens[0] != 0:
            return [proposal]
        return [Proposal.chain([1, 1][: budgets[0]])]


@pytest.mark.parametrize(("kind", "fair"), [(CompositeDrafter, True), (Peeking, False)], ids=["ours", "peeking"])
def test_the_law_under_standard(kind: type[CompositeDrafter], fair: bool) -> None:
    """Suffix drafts where it has seen enough, a sampling drafter elsewhere: the target's law all the same.

    Chi-square over the first three tokens, 2,000 answers, the pool holding the three before each; false alarm 10⁻⁶
    (seeds are fixed).
    """
    drafter = kind([Member(SuffixDrafter(min_score=1.0, max_cached_requests=3)), Member(TableDrafter(DRAFT, (1, 1)))])
    sources = Counter[bool]()
    propose = drafter.propose

    def counting(sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        (proposal,) = propose(sequences, budgets)
        sources[proposal.draft_probs is None] += 1
        return [proposal]

    drafter.propose = counting  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=LENGTH + 1)
    case = Case("suffix, then a table", Standard(), lambda: drafter, lambda: TARGET, params, num_draft_tokens=2)
    counted = quick_tally(case, case.seeds(0, 2000))
    assert min(sources[True], sources[False]) > 0.1 * sources.total()
    if fair:
        assert not faults(counted, case.law, 1e-6)
    else:
        assert p_value(counted.counts, case.law) < CAUGHT


# Configuration


def configs(**values: Any) -> list[SpeculativeConfig]:
    return member_configs(SpeculativeConfig.from_dict({"method": "composite", **values}))


def test_names_share_the_options_around_them() -> None:
    one, two = configs(
        methods=["suffix", "draft_model"], model="small", suffix_decoding_max_tree_depth=8, num_speculative_tokens=6
    )
    assert one == SpeculativeConfig("suffix", 6, suffix_decoding_max_tree_depth=8, suffix_decoding_min_score=2.0)
    assert two == SpeculativeConfig("draft_model", 6, model="small")


def test_a_model_goes_to_those_who_need_one() -> None:
    def models(*methods: str) -> list[str | None]:
        config = SpeculativeConfig.from_dict({"methods": list(methods), "model": "X"})
        return [member.model for member in member_configs(config)]

    assert models("early_exit", "eagle3") == [None, "X"]
    assert models("suffix", "early_exit") == [None, "X"]


def test_mappings_have_options_of_their_own() -> None:
    members = [
        {"method": "suffix", "suffix_decoding_min_score": 3},
        {"model": "small", "num_assistant_tokens": 3},
        {"prompt_lookup_max": 3},
    ]
    config = SpeculativeConfig.from_dict({"methods": members, "draft_dtype": "bf16"})
    assert (config.method, config.num_speculative_tokens) == ("composite", 24)
    assert member_configs(config) == [
        SpeculativeConfig("suffix", 24, suffix_decoding_min_score=3),
        SpeculativeConfig("draft_model", 3, model="small", draft_dtype="bf16"),
        SpeculativeConfig("ngram", 4, prompt_lookup_max=3),
    ]


def test_how_many_tokens_each_may_draft() -> None:
    tokens = {"num_speculative_tokens": 10}
    assert [m.num_speculative_tokens for m in configs(methods=["suffix", "draft_model"], model="x")] == [24, 4]
    assert [m.num_speculative_tokens for m in configs(methods=["suffix", "draft_model"], model="x", **tokens)] == [
        10,
        10,
    ]
    members = ["suffix", {"method": "draft_model", "num_draft_tokens": 3}]
    assert [m.num_speculative_tokens for m in configs(methods=members, model="x", **tokens)] == [10, 3]
    direct = SpeculativeConfig("composite", 5, model="x", methods=("suffix", "draft_model"))  # type: ignore[arg-type]
    assert [m.num_speculative_tokens for m in member_configs(direct)] == [5, 5]


def test_a_suffix_that_comes_last_drafts_whatever_it_has() -> None:
    assert configs(methods=["ngram", "suffix"])[1].suffix_decoding_min_score is None
    assert configs(methods=["suffix", "ngram"])[0].suffix_decoding_min_score == 2.0
    assert configs(methods=["suffix", "ngram"], suffix_decoding_min_score=0)[0].suffix_decoding_min_score == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "method 'composite' needs methods"),
        ({"methods": "suffix"}, "methods is 'suffix'; it must be a list of methods"),
        ({"methods": 3}, "methods is 3; it must be a list"),
        ({"methods": ["suffix", 3]}, "methods holds 3; each must be a method's name"),
        ({"methods": ["suffix"]}, "methods holds one method, and 'composite' needs two or more"),
        ({"methods": []}, "methods holds no method, and 'composite' needs two or more"),
        ({"methods": ["suffix", "egale"]}, "methods holds the unknown method 'egale'"),
        ({"methods": ["suffix", "none"]}, "methods holds 'none', which is no method"),
        ({"methods": ["suffix", {"methods": ["ngram", "suffix"]}]}, "methods holds 'composite', which is no method"),
        ({"methods": ["suffix", "ngram", "suffix"]}, "methods holds 'suffix' twice"),
        ({"methods": ["suffix", "ngram"], "model": "x"}, "no method of suffix, ngram takes model"),
        (
            {"methods": ["suffix", {"method": "draft_model", "model": "y"}], "model": "x"},
            "no method of suffix, draft_model takes model",
        ),
        ({"methods": ["suffix", {"method": "ngram", "modle": "y"}]}, "has no key 'modle'"),
        ({"methods": ["suffix", "ngram"], "num_speculative_tokens": 129}, "num_speculative_tokens is 129"),
    ],
)
def test_nonsense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError) as error:
        create_drafter(SpeculativeConfig.from_dict({"method": "composite", **values}), None)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_member_lacks_is_said_as_if_it_were_alone() -> None:
    config = SpeculativeConfig.from_dict({"methods": ["suffix", "draft_model"]})
    with pytest.raises(PacelineError, match="'draft_model' needs a draft model"):
        create_drafter(config, None)  # type: ignore[arg-type]
    config = SpeculativeConfig.from_dict({"methods": ["suffix", {"method": "ngram", "model": "x"}]})
    with pytest.raises(PacelineError, match="'ngram' does not take model"):
        create_drafter(config, None)  # type: ignore[arg-type]


def test_it_takes_what_any_method_takes() -> None:
    assert METHODS["composite"].options == {"methods"} | {
        o for n, m in METHODS.items() for o in m.options if n != "composite"
    }


def test_it_is_built_from_a_configuration(tiny_llama_dir: Path) -> None:
    target = load_model(str(tiny_llama_dir))
    config = SpeculativeConfig.from_dict({"methods": ["suffix", "draft_model"], "model": str(tiny_llama_dir)})
    drafter = create_drafter(config, target)
    assert isinstance(drafter, CompositeDrafter)
    assert [(m.drafter.name, m.num_draft_tokens) for m in drafter.members] == [("suffix", 24), ("draft_model", 4)]
    prompt, params = [5, 6, 7, 8] * 3, SamplingParams(temperature=0, max_tokens=20)
    plain, composed = (
        [t for s in decode(target.decoder, prompt, params, d, 8) for t in s.token_ids] for d in (NoDrafter(), drafter)
    )
    assert composed == plain


class Broken(Recording):
    def snapshot(self, sequence: SequenceView) -> Any:
        raise RuntimeError("snapshot")


class Empty(Recording):
    def snapshot(self, sequence: SequenceView) -> Any:
        return None


@pytest.mark.parametrize(
    "last",
    [Broken(name="broken"), Empty(name="eagle", needs=Needs(hidden_layers=(1,)))],
    ids=["raises", "has none of the features it lives on"],
)
def test_a_snapshot_that_cannot_serve_all_is_given_back(last: Recording) -> None:
    given: list[Any] = []
    first = Recording(name="model")
    first.discard = given.append  # type: ignore[method-assign]
    drafter = composite(first, last)
    with contextlib.suppress(RuntimeError):
        assert drafter.snapshot(Text([1])) is None  # type: ignore[arg-type]
    assert given == ["model of 0"]
    assert composite(Recording(), Empty()).snapshot(Text([1])) == ("recording of 0", None)  # type: ignore[arg-type]
    assert composite(Empty(), Empty()).snapshot(Text([1])) is None  # type: ignore[arg-type]
