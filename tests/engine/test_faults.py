"""What goes wrong inside a drafter or at one row costs that request something, and no other anything."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from engine.running import RequestOptions, make_engine, plain, run, seeded
from engine.toy_tokenizer import toy_tokenizer

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.decode import decode
from paceline.drafters.base import NOTHING, Features, Needs, SequenceView
from paceline.drafters.composite import CompositeDrafter, Member
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder, ForwardOutput, Segment

PROMPTS = [tiny.prompt(20 + 7 * number, seed=number) for number in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny.tiny_decoder("llama", dtype=torch.bfloat16)


class Faulty(DraftModelDrafter):
    """Breaks at one call for the second sequence it meets, in the way that `fault` says."""

    def __init__(self, decoder: Decoder, fault: str) -> None:
        super().__init__(decoder, 20_000)
        self.fault = fault
        self.met: list[int] = []

    def strikes(self, sequence: SequenceView, at: str) -> bool:
        if sequence.request_id not in self.met:
            self.met.append(sequence.request_id)
        return self.fault == at and self.met.index(sequence.request_id) == 1 and len(sequence.token_ids) > 30

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        if self.strikes(sequence, "observe"):
            raise RuntimeError("observe")
        super().observe(sequence, tokens, features)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        if any(self.strikes(sequence, "propose") for sequence in sequences):
            raise RuntimeError("propose")
        proposals = super().propose(sequences, budgets)
        if any(self.strikes(sequence, "too few") for sequence in sequences):
            return proposals[1:]
        for i, sequence in enumerate(sequences):
            if self.strikes(sequence, "too long"):
                proposals[i] = Proposal.chain([1] * (budgets[i] + 1))
            if self.strikes(sequence, "no such token"):
                proposals[i] = Proposal.chain([256])
            if self.strikes(sequence, "not possible"):
                proposals[i] = Proposal.chain([1], torch.zeros(1, 256, dtype=torch.float64))
            if self.strikes(sequence, "nan"):
                proposals[i] = Proposal.chain([1], torch.full((1, 256), torch.nan, dtype=torch.float64))
        return proposals

    def release(self, sequence: SequenceView) -> None:
        if self.strikes(sequence, "release"):
            raise RuntimeError("release")
        super().release(sequence)


@pytest.mark.parametrize("rule", ["coupled", "standard"])
@pytest.mark.parametrize(
    "fault", ["observe", "propose", "too few", "too long", "no such token", "release", "not possible", "nan"]
)
def test_a_drafters_fault_costs_its_request_the_speculation(
    target: Decoder, fault: str, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    if rule == "coupled" and fault in ("not possible", "nan"):
        pytest.skip("coupled never looks at draft_probs")
    drafter = Faulty(target, fault)
    engine = make_engine(target, {"itself": drafter})
    params = SamplingParams(temperature=0, max_tokens=24)
    numbers = [engine.add_request(prompt, params, RequestOptions(rule=rule)) for prompt in PROMPTS]
    result = run(engine)
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        assert result.ids(number) == plain(target, prompt, params)
        statistics = result.outputs[number].metrics.speculation
        struck = number == numbers[1] and fault != "release"
        assert (statistics.num_steps > 10) == struck
    assert engine.speculation.faults == {"draft_model": 1}
    assert "without speculation" in caplog.text
    assert engine.pool.blocks_in_use == 0
    assert drafter.pool.blocks_in_use == 0 or fault == "release"


def test_nan_in_the_draft_model_costs_nothing_but_time(target: Decoder) -> None:
    broken = tiny.tiny_decoder("llama", seed=1, dtype=torch.bfloat16)
    broken.norm = torch.full_like(broken.norm, torch.nan)
    engine = make_engine(target, {"broken": DraftModelDrafter(broken, 20_000)})
    numbers = [engine.add_request(prompt, seeded(seed=1)) for prompt in PROMPTS]
    result = run(engine)
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        assert result.ids(number) == plain(target, prompt, seeded(seed=1))
    assert engine.speculation.faults == {"draft_model": 4}


@pytest.mark.parametrize("positions", [1, 64, 192])
def test_a_full_draft_pool_means_no_draft(target: Decoder, positions: int) -> None:
    drafter = DraftModelDrafter(target, positions)
    engine = make_engine(target, {"itself": drafter}, prefix_cache_blocks=20)
    numbers = [engine.add_request(prompt, seeded(seed=1, max_tokens=32)) for prompt in PROMPTS * 2]
    result = run(engine)
    for number, prompt in zip(numbers, PROMPTS * 2, strict=True):
        assert result.ids(number) == plain(target, prompt, seeded(seed=1, max_tokens=32))
    assert not engine.speculation.faults
    drafted = sum(output.metrics.speculation.num_draft_tokens for output in result.outputs.values())
    assert drafted > 0
    engine.reset_prefix_cache()
    assert drafter.pool.blocks_in_use == 0


class Poisoned:
    """A target that gives NaN after one token, wherever it is processed."""

    def __init__(self, decoder: Decoder, token: int) -> None:
        self.decoder, self.token, self.bad = decoder, token, torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(self, segments: Sequence[Segment], **kwargs: Any) -> ForwardOutput:
        out = self.decoder.forward(segments, **kwargs)
        ids = torch.tensor([token for segment in segments for token in segment.token_ids])
        return ForwardOutput(out.hidden.masked_fill((ids == self.token)[:, None], torch.nan), out.taps)


def test_a_nan_row_of_the_target_ends_that_request_alone(target: Decoder) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    answers = [plain(target, prompt, params) for prompt in PROMPTS]
    others = {token for text in (*PROMPTS, *answers[:2], *answers[3:]) for token in text}
    poison = next(token for token in answers[2] if token not in others)
    engine = make_engine(Poisoned(target, poison), {"ngram": NgramDrafter(1, 3), "itself": DraftModelDrafter(target)})  # type: ignore[arg-type]
    for method in ("none", "ngram", "itself"):
        numbers = [engine.add_request(prompt, params, RequestOptions(method=method)) for prompt in PROMPTS]
        result = run(engine)
        for i, number in enumerate(numbers):
            choice = result.outputs[number].outputs[0]
            if i == 2:
                assert choice.finish_reason == "error"
                assert choice.error is not None
                assert "nan" in choice.error
                assert result.ids(number) == answers[2][: answers[2].index(poison) + 1]  # as far as plain decoding came
            else:
                assert result.ids(number) == answers[i]
    assert not engine.speculation.faults
    assert engine.pool.blocks_in_use == 0


def test_no_token_allowed_is_that_requests_error(target: Decoder) -> None:
    engine = make_engine(target)
    everything = tuple((token,) for token in range(256))
    bad = engine.add_request(PROMPTS[0], SamplingParams(temperature=0, bad_words=everything, max_tokens=5))
    good = engine.add_request(PROMPTS[1], SamplingParams(temperature=0, max_tokens=5))
    result = run(engine)
    assert "no token is allowed" in (result.outputs[bad].outputs[0].error or "")
    assert result.ids(good) == plain(target, PROMPTS[1], SamplingParams(temperature=0, max_tokens=5))


def test_what_can_never_be_is_refused_before_it_begins(target: Decoder) -> None:
    engine = make_engine(target, {"ngram": NgramDrafter()}, num_kv_blocks=3)
    greedy = SamplingParams(temperature=0, max_tokens=10)
    cases = [
        ([], greedy, RequestOptions(), "prompt is empty"),
        (tiny.prompt(600), greedy, RequestOptions(), "600 tokens but the context holds 512"),
        (tiny.prompt(184), greedy, RequestOptions(), "need 4 KV blocks, but there are 3"),
        ([1, 256], greedy, RequestOptions(), "token 256 and the vocabulary has 256"),
        ([-1, 2], greedy, RequestOptions(), "token -1"),
        ([1], SamplingParams(max_tokens=5, stop=["x"]), RequestOptions(), "need a tokenizer"),
        ([1], SamplingParams(max_tokens=5, stop_token_ids=[900]), RequestOptions(), "names token 900"),
        ([1], greedy, RequestOptions(method="itself"), "'itself' is not loaded"),
        ([1], greedy, RequestOptions(rule="nonsense"), "unknown verification rule"),
        ([1], greedy, RequestOptions(speculative=False, method="itself"), "'itself' is not loaded"),
        ([True, 2], greedy, RequestOptions(), "the prompt holds True"),
        ([1, 2.0], greedy, RequestOptions(), "the prompt holds 2.0"),
    ]
    for prompt, params, options, message in cases:
        with pytest.raises(PacelineError, match=message):
            engine.add_request(prompt, params, options)
    assert not engine.has_unfinished
    assert engine.add_request(tiny.prompt(183), greedy) is not None
    run(engine)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_speculative_tokens", -1, "num_speculative_tokens is -1"),
        ("num_speculative_tokens", 129, "is 129; it must be a whole number from 0 to 128"),
        ("num_speculative_tokens", 2.5, "is 2.5; it must be"),
        ("speculative", "no", "speculative is 'no'; it must be True or False"),
        ("private_drafts", 1, "private_drafts is 1"),
        ("method", ["ngram"], "method is .*; it must be a method's name"),
        ("rule", None, "rule is None; it must be a rule's name"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        RequestOptions(**{option: value})


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefix_cache_blocks"])
@pytest.mark.parametrize("value", [2.5, True, "4", None, -1])
def test_settings_are_whole_numbers(target: Decoder, name: str, value: Any) -> None:
    with pytest.raises(PacelineError, match=f"{name} is "):
        make_engine(target, **{name: value})


def test_exits_at_different_layers_are_refused(target: Decoder) -> None:
    one, other = NgramDrafter(), NgramDrafter()
    one.needs, other.needs = Needs(early_layer=1), Needs(early_layer=2)
    with pytest.raises(PacelineError, match="'other' exits at layer 2 and 'one' at layer 1"):
        make_engine(target, {"one": one, "plain": NgramDrafter(), "other": other})


@pytest.mark.parametrize(
    "needs",
    [Needs(hidden_layers=(0, 99)), Needs(hidden_layers=(-2,)), Needs(early_layer=99), Needs(early_layer=0)],
)
def test_layers_that_the_target_lacks_are_refused_at_once(target: Decoder, needs: Needs) -> None:
    drafter = NgramDrafter()
    drafter.needs = needs
    with pytest.raises(PacelineError, match=f"the target has {target.config.num_layers} layers"):
        make_engine(target, {"it": drafter})
    with pytest.raises(PacelineError, match="method 'ngram' needs the hidden states of layer"):
        next(decode(target, [1, 2, 3], SamplingParams(max_tokens=2), drafter))


def test_a_rule_that_cannot_take_a_methods_drafts_is_refused_at_once(target: Decoder) -> None:
    trees = NgramDrafter()
    trees.needs = Needs(trees=True)
    suffix = CompositeDrafter([Member(NgramDrafter()), Member(trees)])
    engine = make_engine(target, {"ngram": NgramDrafter(), "trees": trees, "composite": suffix})
    params = SamplingParams(temperature=0, max_tokens=3)
    for method in ("trees", "composite"):
        with pytest.raises(PacelineError, match="rule 'block' takes chains, and method"):
            engine.add_request([1, 2], params, RequestOptions(method=method, rule="block"))
    for options in (
        RequestOptions(method="ngram", rule="block"),
        RequestOptions(method="trees", rule="standard"),
        RequestOptions(method="trees", rule="block", num_speculative_tokens=0),
    ):
        engine.add_request([1, 2], params, options)
    assert len(run(engine).outputs) == 3
    with pytest.raises(PacelineError, match="max_model_len is 513, and the model has 512 positions"):
        make_engine(target, max_model_len=513)


class Rough(NgramDrafter):
    """Returns whatever it was given to return."""

    name = "rough"

    def __init__(self, propose: Callable[[], Any], needs: Needs = NOTHING) -> None:
        super().__init__(1, 3)
        self.needs, self.own = needs, propose

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [self.own() for _ in sequences]


EARLY = Needs(early_layer=1)
HIDDEN = torch.zeros(1, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("propose", "needs"),
    [
        (lambda: Proposal.chain([1.0]), NOTHING),  # type: ignore[list-item]
        (lambda: Proposal.chain([torch.tensor(1.0)]), NOTHING),  # type: ignore[list-item]
        (lambda: Proposal.chain(["a"]), NOTHING),  # type: ignore[list-item]
        (lambda: Proposal.chain([None]), NOTHING),  # type: ignore[list-item]
        (lambda: Proposal.chain([torch.tensor([1, 2])]), NOTHING),  # type: ignore[list-item]
        (lambda: Proposal((1,), (-1.0,)), NOTHING),  # type: ignore[arg-type]
        (lambda: Proposal.chain([2**70]), NOTHING),
        (lambda: None, NOTHING),
        (lambda: [1], NOTHING),
        (lambda: Proposal.chain([1], hidden=HIDDEN[:, :5]), EARLY),
        (lambda: Proposal.chain([1], hidden=HIDDEN.double()), EARLY),
        (lambda: Proposal.chain([1], hidden=HIDDEN[0]), EARLY),
        (lambda: Proposal.chain([1], hidden=HIDDEN.to("meta")), EARLY),
        (lambda: Proposal.chain([1], hidden=HIDDEN + torch.nan), EARLY),
        (lambda: Proposal.chain([1], hidden=[[0.0] * 64]), EARLY),  # type: ignore[arg-type]
    ],
)
def test_a_proposal_that_the_pass_cannot_take_is_its_drafters_fault(
    target: Decoder, propose: Callable[[], Any], needs: Needs
) -> None:
    """Beside a plain request: both get their answer, and the drafter alone is to blame."""
    assert target.config.hidden_size == HIDDEN.shape[1]
    engine = make_engine(target, {"rough": Rough(propose, needs)})
    numbers = [engine.add_request(PROMPTS[i], GREEDY, RequestOptions(speculative=i == 0)) for i in (0, 1)]
    result = run(engine)
    for number, prompt in zip(numbers, PROMPTS, strict=False):
        assert result.ids(number) == plain(target, prompt, GREEDY)
    assert engine.speculation.faults == {"rough": 1}


@pytest.mark.parametrize("token", [np.int64(7), torch.tensor(7), np.uint8(7), 7])
def test_tokens_of_any_integer_type_become_int(target: Decoder, token: Any) -> None:
    proposal = Proposal.chain([token])
    assert type(proposal.tokens[0]) is int
    assert proposal == Proposal.chain([7])
    assert type(Proposal.chain([True]).tokens[0]) is int
    engine = make_engine(target, {"rough": Rough(lambda: Proposal.chain([token]))})
    params = SamplingParams(temperature=0, max_tokens=6, logit_bias={7: 100})
    engine.add_request(PROMPTS[0], params)
    (output,) = run(engine).outputs.values()
    assert output.outputs[0].token_ids == (7,) * 6
    assert all(type(token) is int for token in output.outputs[0].token_ids)
    assert output.metrics.speculation.num_accepted_tokens > 0


class Breaking:
    """A constraint that allows all, until it raises, at `allowed` or at `advance`."""

    def __init__(self, after: int, at: str = "allowed") -> None:
        self.after, self.at = after, at

    def start(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        if self.at == "advance" and state >= self.after:
            raise ZeroDivisionError("a grammar's fault")
        return state + 1

    def allowed(self, state: int) -> None:
        if self.at == "allowed" and state >= self.after:
            raise ZeroDivisionError("a grammar's fault")


@pytest.mark.parametrize("method", ["none", "itself"])
@pytest.mark.parametrize("at", ["allowed", "advance"])
@pytest.mark.parametrize("held", [0, 1, 3])
def test_after_a_fault_text_and_ids_end_at_the_same_token(target: Decoder, method: str, at: str, held: int) -> None:
    """Also where the text of the last `held` tokens could be the beginning of a stop string."""
    tokenizer = toy_tokenizer()
    expected = plain(target, PROMPTS[1], GREEDY)[:8]
    stop = (tokenizer.decode(expected[8 - held :]) + "#",) if held else ()
    engine = make_engine(target, {"itself": DraftModelDrafter(target, 20_000)}, tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=24, stop=stop, logprobs=1)
    engine.add_request(PROMPTS[1], params, RequestOptions(method=method, constraint=Breaking(8, at)))
    (output,) = run(engine).outputs.values()
    choice = output.outputs[0]
    assert choice.error == "ZeroDivisionError: a grammar's fault"
    assert list(choice.token_ids) == expected[: len(choice.token_ids)]
    assert len(choice.token_ids) == 8 or (method, at) == ("itself", "advance")  # a pass is taken whole, or not at all
    assert choice.text == tokenizer.decode(choice.token_ids)
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids) == choice.speculation.num_tokens


def test_a_complete_stop_string_counts_even_where_a_fault_struck(target: Decoder) -> None:
    """It was held open by a longer one that began before it: the answer ends there, without the fault."""
    tokenizer = toy_tokenizer()
    expected = plain(target, PROMPTS[1], GREEDY)[:8]
    second = tokenizer.decode(expected[6:7])
    stops = [tokenizer.decode(expected[5:8]) + "#", second]
    engine = make_engine(target, tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=24, stop=stops)
    engine.add_request(PROMPTS[1], params, RequestOptions(constraint=Breaking(8)))
    (output,) = run(engine).outputs.values()
    choice = output.outputs[0]
    text = tokenizer.decode(expected)
    assert choice.text == text[: text.index(second)]
    assert (choice.finish_reason, choice.stop_reason, choice.error) == ("stop", second, None)


@pytest.mark.parametrize("method", ["none", "ngram", "itself"])
def test_a_constraint_that_raises_ends_its_request_alone(
    target: Decoder, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(target, {"ngram": NgramDrafter(1, 3), "itself": DraftModelDrafter(target, 20_000)})
    params = SamplingParams(temperature=0, max_tokens=24)
    numbers = [
        engine.add_request(prompt, params, RequestOptions(method=method, constraint=Breaking(9) if i == 1 else None))
        for i, prompt in enumerate(PROMPTS)
    ]
    result = run(engine)
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        choice, expected = result.outputs[number].outputs[0], plain(target, prompt, params)
        if number == numbers[1]:
            assert choice.error == "ZeroDivisionError: a grammar's fault"
            assert list(choice.token_ids) == expected[:9]
        else:
            assert list(choice.token_ids) == expected
    assert "has failed" in caplog.text
    assert engine.pool.blocks_in_use == 0
