"""Drafting with the target's own layers: layer_skip and early_exit."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from drafters.against_plain import (
    GREEDY,
    PROMPT,
    PROMPTS,
    SEEDED,
    Watched,
    check_identity,
    mild,
    plain,
    tokens_of,
)
from engine.running import make_engine, run

from paceline.core.proposal import Proposal
from paceline.core.sampling import BadLogitsError
from paceline.decode import decode
from paceline.drafters.base import Drafter, Needs, SequenceView, create_drafter
from paceline.drafters.composite import CompositeDrafter, Member
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.early_exit import EarlyExitDrafter
from paceline.drafters.layer_skip import LayerSkipDrafter, default_skips
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.none import NoDrafter
from paceline.engine.engine import RequestOptions
from paceline.errors import PacelineError
from paceline.models import shipped
from paceline.models.decoder import Decoder, EarlyRows, ForwardOutput, LayerStep, Segment
from paceline.models.load import LoadedModel
from paceline.ops.layer import Layer

MAKERS: dict[str, Callable[[Decoder], Drafter]] = {
    "skip": lambda target: LayerSkipDrafter(target, [1], [2], 0),
    "skip, stopping": lambda target: LayerSkipDrafter(target, [1], [2], 0.15),
    "exit": lambda target: EarlyExitDrafter(target, 1, 0),
    "exit, stopping": lambda target: EarlyExitDrafter(target, 2, 0.15),
}
WHOLE: dict[str, Callable[[Decoder], Drafter]] = {
    "skip": lambda target: LayerSkipDrafter(target, (), (), 0),
    "exit": lambda target: EarlyExitDrafter(target, target.config.num_layers, 0),
}


@pytest.fixture(scope="module")
def target() -> Decoder:
    return mild("llama")


@pytest.fixture(scope="module", params=["llama", "mistral"])
def either(request: pytest.FixtureRequest) -> Decoder:
    return mild(request.param)


@pytest.mark.parametrize("name", ["skip", "exit, stopping"])
def test_no_token_changes_and_the_cache_is_a_fresh_prefills(either: Decoder, name: str) -> None:
    check_identity(either, MAKERS[name](either), 4)


@pytest.mark.parametrize("name", MAKERS)
def test_drafts_are_accepted_to_different_lengths(target: Decoder, name: str) -> None:
    steps = list(decode(target, PROMPT, replace(SEEDED, max_tokens=60), MAKERS[name](target), 4))
    assert len({step.num_accepted_tokens for step in steps}) >= 3
    if "stopping" in name:
        assert len({step.num_draft_tokens for step in steps[:-5]}) >= 3


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_with_every_layer_all_is_accepted(target: Decoder, name: str, params: object) -> None:
    for k in (1, 3, 4):
        steps = list(decode(target, PROMPT, params, WHOLE[name](target), k))  # type: ignore[arg-type]
        assert all(step.num_accepted_tokens == step.num_draft_tokens for step in steps)
        assert len(steps) == -(-24 // (k + 1))


class Odd:
    """Spoils one token of a draft now and then, and sits out rounds."""

    def __init__(self, drafter: Drafter, position: int) -> None:
        self.drafter, self.position = drafter, position
        self.name, self.needs = drafter.name, drafter.needs
        self.rounds = itertools.cycle(["whole", "spoilt", "whole", "none"])
        self.what: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.drafter, name)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        self.what.append(next(self.rounds))
        if self.what[-1] == "none":
            return [Proposal.empty() for _ in sequences]
        proposals = self.drafter.propose(sequences, budgets)
        return [self._spoil(proposal) for proposal in proposals] if self.what[-1] == "spoilt" else proposals

    def _spoil(self, proposal: Proposal) -> Proposal:
        """The rows from the spoilt token on were not computed for it, so their states go."""
        tokens = list(proposal.tokens)
        if self.position >= len(tokens):
            return proposal
        tokens[self.position] = (tokens[self.position] + 1) % 256
        hidden = None if proposal.hidden is None else proposal.hidden[: self.position + 1]
        return Proposal.chain(tokens, hidden=hidden)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("position", [0, 1, 3])
def test_all_is_accepted_again_after_a_spoilt_draft_or_a_pause(target: Decoder, name: str, position: int) -> None:
    drafter = Odd(WHOLE[name](target), position)
    steps = list(decode(target, PROMPT, SEEDED, Watched(drafter, target), 4))  # type: ignore[arg-type]
    assert tokens_of(steps) == plain(target, PROMPT, SEEDED)
    assert drafter.what.count("spoilt") >= 1
    for step, what in zip(steps[:-1], drafter.what, strict=False):
        assert step.num_draft_tokens == (0 if what == "none" else 4)
        assert step.num_accepted_tokens == (position if what == "spoilt" else step.num_draft_tokens)


@pytest.mark.parametrize("name", ["skip, stopping", "exit"])
@pytest.mark.parametrize("fault", ["early", "late"])
def test_an_exception_in_mid_draft_costs_that_request_its_drafts(target: Decoder, name: str, fault: str) -> None:
    """Nothing it wrote is met again: not even NaN, which would pass through masks into every later row."""
    answers = [plain(target, prompt, GREEDY) for prompt in PROMPTS]
    drafter = MAKERS[name](target)
    steps = list(decode(target, PROMPTS[1], GREEDY, drafter, 4))
    poison = next(
        before.token_ids[-1]
        for before, after in pairwise(steps[:-2])
        if before.token_ids[-1] not in answers[0] and after.num_draft_tokens >= 2
    )
    drafter.target = Poisoned(target, poison, early=fault == "early")  # type: ignore[attr-defined]
    engine = make_engine(target, {"it": drafter})
    numbers = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    result = run(engine)
    assert [result.ids(number) for number in numbers] == answers
    assert 1 <= engine.speculation.faults[drafter.name] < 3
    assert engine.pool.blocks_in_use == 0


class Poisoned:
    """Writes NaN where it drafts, and gives NaN, at the first token drafted after a certain one."""

    def __init__(self, decoder: Decoder, token: int, early: bool) -> None:
        self.decoder, self.token, self.early = decoder, token, early
        self.next: object = None  # the blocks of the request whose turn it is

    def __getattr__(self, name: str) -> object:
        return getattr(self.decoder, name)

    def forward(self, segments: Sequence[Segment], layers: Sequence[LayerStep]) -> ForwardOutput:
        out = self.decoder.forward(segments, layers=layers)
        hidden = out.hidden.clone()
        for row, segment in enumerate(segments):
            if self.next is segment.cache.blocks:
                blocks, offsets = segment.cache.slots(segment.cache.length, 1)
                segment.cache.pool.keys[:, blocks, :, offsets] = torch.nan
                segment.cache.pool.values[:, blocks, :, offsets] = torch.nan
                hidden[row] = torch.nan
                if self.early:
                    raise RuntimeError("in mid-draft")
        marked = [segment.cache.blocks for segment in segments if self.token in segment.token_ids]
        self.next = marked[0] if marked else None
        return ForwardOutput(hidden, {})


def test_decode_hands_the_exception_on_and_keeps_nothing(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    new_pool = target.new_pool
    monkeypatch.setattr(target, "new_pool", lambda n: pools.append(new_pool(n)) or pools[-1])
    drafter = LayerSkipDrafter(target, [1], [], 0)
    drafter.target = Poisoned(target, PROMPT[-1], early=False)  # type: ignore[assignment]
    with pytest.raises(BadLogitsError):
        list(decode(target, PROMPT, SEEDED, drafter, 4))
    assert [pool.blocks_in_use for pool in pools] == [0]


# Where verification goes on from the early layers


class Counting:
    """Counts the rows that each layer ran."""

    def __init__(self, decoder: Decoder) -> None:
        self.rows = [0] * decoder.config.num_layers
        self.decoder = decoder
        self.attend = Layer.attend

    def __call__(self, layer: Layer, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.rows[layer.attention.index] += len(x)
        return self.attend(layer, x, *rest)


def test_early_layers_run_once_for_every_drafted_row(monkeypatch: pytest.MonkeyPatch) -> None:
    target = mild("llama")
    target.fused = [None] * target.config.num_layers
    drafter = EarlyExitDrafter(target, 2, 0)
    counting = Counting(target)
    monkeypatch.setattr(Layer, "attend", lambda *given: counting(*given))
    steps = list(decode(target, PROMPT, GREEDY, drafter, 4))
    fed = len(PROMPT) - 1 + sum(1 + step.num_draft_tokens for step in steps)
    assert counting.rows == [fed, fed, fed]


def test_verification_from_the_early_layers_has_the_bits_of_a_whole_pass(either: Decoder) -> None:
    pool = either.new_pool(1024)
    caches = [pool.new_sequence() for _ in range(4)]
    for cache, prompt in zip(caches, [*PROMPTS, PROMPT], strict=True):
        either.forward([Segment(cache, prompt)])
        cache.commit(range(len(prompt)))
    tokens = [tiny.prompt(n, seed=n) for n in (5, 3, 4, 70)]
    whole = either.forward([Segment(c.fork(), t) for c, t in zip(caches, tokens, strict=True)], taps=(1, 2))
    for counts in ([4, 3, 0, None], [1, None, 4, None], [5, 3, 4, 70]):
        segments = []
        for cache, ids, count in zip(caches, tokens, counts, strict=True):
            early = None
            if count is not None:
                states = [torch.empty(0, either.config.hidden_size, dtype=either.dtype)]
                ahead = cache.beyond()
                for token in ids[:count]:
                    states.append(either.forward([Segment(ahead, [token])], layers=[LayerStep(0), LayerStep(1)]).hidden)
                    ahead.commit([0])
                early = EarlyRows(2, torch.cat(states))
            segments.append(Segment(cache, ids, None, early))
        for taps in ((), (2,), (1, 2), (0,)):
            out = either.forward(segments, taps=taps)
            assert torch.equal(out.hidden, whole.hidden)
            assert all(torch.equal(out.taps[tap], whole.taps[tap]) for tap in taps if tap in whole.taps)
            assert set(out.taps) == set(taps)


def test_rows_of_a_tree_or_from_two_layers_are_refused(target: Decoder) -> None:
    hidden = torch.zeros(1, target.config.hidden_size, dtype=target.dtype)
    caches = [target.new_pool(64).new_sequence() for _ in range(2)]
    with pytest.raises(ValueError, match="a chain's can"):
        target.forward([Segment(caches[0], [1, 2, 3], (-1, 0, 0), EarlyRows(1, hidden))])
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        target.forward([Segment(cache, [1], None, EarlyRows(i + 1, hidden)) for i, cache in enumerate(caches)])


def test_it_shares_a_pass_with_methods_that_look_inside(target: Decoder) -> None:
    """One engine: early exit, hidden states below and above the exit, plain requests and prompts in the same steps."""

    class Looking(NoDrafter):
        needs = Needs(hidden_layers=(0, 2, -1))
        seen: list[torch.Tensor] = []  # noqa: RUF012

        def observe(self, sequence, tokens, features):  # type: ignore[no-untyped-def]
            self.seen.extend(features.hidden.values())

    early = EarlyExitDrafter(target, 2, 0)
    both = CompositeDrafter([Member(NgramDrafter(3, 4)), Member(early), Member(Looking())])
    engine = make_engine(target, {"early": early, "both": both}, max_num_batched_tokens=40)
    numbers = []
    for prompt, method in itertools.product(PROMPTS, ("early", "both", "none")):
        numbers.append((engine.add_request(prompt, SEEDED, RequestOptions(method=method)), prompt))
    result = run(engine)
    for number, prompt in numbers:
        assert result.ids(number) == plain(target, prompt, SEEDED)
    assert not engine.speculation.faults
    assert Looking.seen


def test_choices_and_prefix_hits_share_blocks_with_drafts(target: Decoder) -> None:
    """Drafting writes beside rows that others hold: a block is copied first."""
    for drafter in (LayerSkipDrafter(target, [1], [], 0), EarlyExitDrafter(target, 1, 0)):
        engine = make_engine(target, {"it": Watched(drafter, target)}, prefix_cache_blocks=40)
        params = replace(SEEDED, n=3)
        first = engine.add_request(PROMPTS[2], params)
        result = run(engine)
        again = engine.add_request(PROMPTS[2], params)
        second = run(engine)
        assert second.outputs[again].usage.cached_tokens > 0
        for choice in range(3):
            assert result.ids(first, choice) == second.ids(again, choice)
        assert result.ids(first) == plain(target, PROMPTS[2], SEEDED)
        assert not engine.speculation.faults


# Configuration


def loaded(target: Decoder) -> LoadedModel:
    class Model:
        decoder, config = target, target.config

    return Model()  # type: ignore[return-value]


def test_configured_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)  # a package without heads
    target = tiny.tiny_decoder("llama", num_hidden_layers=8)
    assert default_skips(8) == (2, 4)
    drafter = create_drafter(SpeculativeConfig("layer_skip"), loaded(target))
    assert [(s.attention, s.mlp) for s in drafter.layers] == [(i not in (2, 4),) * 2 for i in range(8)]  # type: ignore[attr-defined]
    config = SpeculativeConfig.from_dict({"method": "layer_skip", "skip_mlp_layers": [5, 1, 5]})
    drafter = create_drafter(config, loaded(target))
    assert [(s.attention, s.mlp) for s in drafter.layers] == [(True, i not in (1, 5)) for i in range(8)]  # type: ignore[attr-defined]
    config = SpeculativeConfig.from_dict({"method": "early_exit", "assistant_confidence_threshold": 0.9})
    drafter = create_drafter(config, loaded(target))
    assert drafter.needs == Needs(early_layer=2, looks_ahead=True)
    assert drafter.min_confidence == 0.9  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "layer_skip", "skip_mlp_layers": [8]}, "skip_mlp_layers names layer 8 and the model has 8 layers"),
        ({"method": "layer_skip", "skip_attention_layers": "1,2"}, "must be a list of layer numbers"),
        ({"method": "layer_skip", "skip_attention_layers": [-1]}, "skip_attention_layers is -1"),
        ({"method": "layer_skip", "early_exit_layer": 2}, "does not take early_exit_layer"),
        ({"method": "early_exit", "early_exit_layer": 8}, "early_exit_layer is 8 and the model has 8 layers"),
        ({"method": "early_exit", "early_exit_layer": 0}, "early_exit_layer is 0"),
        ({"method": "early_exit", "draft_confidence_threshold": 1.5}, "draft_confidence_threshold is 1.5"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, object], message: str) -> None:
    target = tiny.tiny_decoder("llama", num_hidden_layers=8)
    with pytest.raises(PacelineError, match=message):
        create_drafter(SpeculativeConfig.from_dict(options), loaded(target))
