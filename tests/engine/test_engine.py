"""Whoever shares the batch, whatever is drafted: each request's tokens are plain decoding's of it alone."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from drafters.scripted import Script, bush, garbage, oracle
from engine.running import RequestOptions, make_engine, plain, run, seeded

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.core.verify import make_rule
from paceline.drafters.base import Drafter, Features, Needs, SequenceView
from paceline.drafters.composite import CompositeDrafter, Member
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.none import NoDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.outputs import RequestOutput
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder, Segment

VOCAB = 256
GREEDY = SamplingParams(temperature=0, max_tokens=30)
FULL = SamplingParams(
    temperature=0.7,
    top_k=40,
    min_p=0.02,
    seed=3,
    max_tokens=30,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias={5: 3.0, 7: -100.0},
    bad_words=((9,), (12, 13)),
    min_tokens=10,
    stop_token_ids=tuple(range(30, 36)),
)


class Prompter(NoDrafter):
    """A script for each prompt, from the true text of its request; checks that no token goes unobserved."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self.script = script
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.observed: dict[int, list[int]] = {}

    def know(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.texts[tuple(prompt)] = [*prompt, *answer]

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        seen = self.observed.setdefault(sequence.request_id, [])
        seen.extend(tokens)
        assert list(sequence.token_ids[: len(seen)]) == seen[: len(sequence.token_ids)]

    def release(self, sequence: SequenceView) -> None:
        self.observed.pop(sequence.request_id, None)

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        self.observed[sequence.request_id] = list(sequence.token_ids[:length])

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        self.observed[child.request_id] = list(self.observed.get(sequence.request_id, []))

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        proposals = []
        for sequence, budget in zip(sequences, budgets, strict=True):
            ids = list(sequence.token_ids)
            assert ids[:-1] == self.observed.get(sequence.request_id, []), "a token went unobserved"
            (text,) = (text for prompt, text in self.texts.items() if tuple(ids[: len(prompt)]) == prompt)
            proposals.append(self.script(text[len(ids) :], budget))
        return proposals


class Onlooker(Prompter):
    """Keeps what it was shown of the target, row by row."""

    needs = Needs(hidden_layers=(0, 1, -1), top_tokens=3, trees=True)

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.shown: dict[tuple[int, ...], list[Features]] = {}  # by prompt

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        super().observe(sequence, tokens, features)
        self.shown.setdefault(tuple(sequence.token_ids[: sequence.num_prompt_tokens]), []).append(features)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny.tiny_decoder("llama", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def stranger() -> Decoder:
    return tiny.tiny_decoder("llama", seed=1, dtype=torch.bfloat16)


def drafters(target: Decoder, stranger: Decoder) -> dict[str, Drafter]:
    cycle = itertools.cycle(range(9))
    return {
        "ngram": NgramDrafter(1, 4),
        "itself": DraftModelDrafter(target, 20_000),
        "a stranger": DraftModelDrafter(stranger, 20_000),
        "suffix": SuffixDrafter(),
        "composite": CompositeDrafter([Member(SuffixDrafter()), Member(DraftModelDrafter(stranger, 20_000))]),
        "always right": Prompter(oracle(lambda: 99, VOCAB)),
        "always wrong": Prompter(oracle(lambda: 0, VOCAB)),
        "every length": Prompter(oracle(lambda: next(cycle), VOCAB)),
        "garbage trees": Prompter(garbage(VOCAB)),
        "good trees": Prompter(bush(VOCAB)),
    }


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def of_family(request: pytest.FixtureRequest) -> Decoder:
    return tiny.tiny_decoder(request.param, dtype=torch.bfloat16)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_no_token_changes(of_family: Decoder, batch: int, stranger: Decoder) -> None:
    """Unequal prompts, unequal acceptance, all methods and parameters at once, joining and leaving in mid-flight."""
    known = drafters(of_family, stranger)
    engine = make_engine(of_family, known, max_num_seqs=batch, num_kv_blocks=60)
    source, lengths = random.Random(batch), itertools.cycle([200, 17, 63, 1, 64, 130, 65, 2])
    wanted: dict[int, list[int]] = {}
    todo = []
    for number, method in enumerate(itertools.islice(itertools.cycle(["none", *known]), 11)):
        prompt = tiny.prompt(next(lengths), seed=number)
        params = replace([GREEDY, seeded(seed=number), FULL][number % 3], max_tokens=16)
        answer = plain(of_family, prompt, params)
        if isinstance(known.get(method), Prompter):
            known[method].know(prompt, answer)  # type: ignore[attr-defined]
        options = RequestOptions(method=method, num_speculative_tokens=source.choice([1, 3, 5, 8]))
        todo.append((prompt, params, options, answer))

    def join(step: int) -> None:
        while todo and (not engine.has_unfinished or source.random() < 0.4):
            prompt, params, options, answer = todo.pop(0)
            wanted[engine.add_request(prompt, params, options)] = answer

    result = run(engine, join)
    assert {number: result.ids(number) for number in wanted} == wanted
    assert engine.pool.blocks_in_use == 0
    assert not engine.speculation.faults
    spoken = [output.metrics.speculation for output in result.outputs.values()]
    assert any(s.num_accepted_tokens for s in spoken)
    assert any(s.num_accepted_tokens < s.num_draft_tokens for s in spoken)


@pytest.mark.parametrize(
    "method, params",
    [("itself", seeded(seed=5)), ("suffix", seeded(seed=5)), ("composite", FULL)],
    ids=["itself", "suffix", "composite"],
)
def test_a_seeded_request_is_the_same_in_any_company(
    target: Decoder, stranger: Decoder, method: str, params: SamplingParams
) -> None:
    """Alone, after 37 others, among 7 others; what is streamed is the output (`run` checks it)."""
    prompt = tiny.prompt(40, seed=99)
    wanted = plain(target, prompt, params)
    engine = make_engine(target, {method: drafters(target, stranger)[method]}, prefix_cache_blocks=20)
    alone = engine.add_request(prompt, params)
    assert run(engine).ids(alone) == wanted
    for number in range(37):
        engine.add_request(tiny.prompt(10 + number, seed=number), seeded(max_tokens=3))
    run(engine)
    after = engine.add_request(prompt, params)
    assert run(engine).ids(after) == wanted
    for number in range(4):
        engine.add_request(tiny.prompt(50 + number, seed=number), seeded(max_tokens=20))
    among = engine.add_request(prompt, params)
    for number in range(3):
        engine.add_request(tiny.prompt(30 + number, seed=number), replace(GREEDY, max_tokens=20))
    assert run(engine).ids(among) == wanted
    assert not engine.speculation.faults


def test_rules_do_not_touch_one_another(target: Decoder, stranger: Decoder) -> None:
    """Greedy, coupled and standard requests in one batch; `standard` gives what it gives alone."""
    rules = [make_rule("coupled"), make_rule("standard"), make_rule("block")]

    def outputs(company: bool) -> list[list[int]]:
        engine = make_engine(target, {"a stranger": DraftModelDrafter(stranger, 20_000)})
        ids = []
        result = {}
        for number in range(9):
            params = seeded(seed=number, temperature=0 if number % 2 else 0.8, max_tokens=12)
            ids.append(
                engine.add_request(
                    tiny.prompt(20 + number, seed=number), params, RequestOptions(rule=rules[number % 3])
                )
            )
            if not company:
                result |= run(engine).outputs
        result |= run(engine).outputs
        return [list(result[number].outputs[0].token_ids) for number in ids]

    together, alone = outputs(True), outputs(False)
    assert together == alone
    for number in range(9):
        if number % 2 or number % 3 == 0:
            params = seeded(seed=number, temperature=0 if number % 2 else 0.8, max_tokens=12)
            assert together[number] == plain(target, tiny.prompt(20 + number, seed=number), params)


def test_a_private_request_is_the_same_in_any_company_under_standard(target: Decoder) -> None:
    """What others left in a pool moves where `standard` accepts, and so its tokens: a private request sees none."""
    prompt, params = tiny.prompt(40, seed=1), seeded(seed=3, max_tokens=40)
    engine = make_engine(target, {"suffix": SuffixDrafter()})
    options = RequestOptions(rule="standard", private_drafts=True)
    alone = engine.add_request(prompt, params, options)
    wanted = run(engine).ids(alone)
    for _ in range(3):
        engine.add_request(prompt, params)
        engine.add_request(tiny.prompt(20), seeded())
        among = engine.add_request(prompt, params, options)
        assert run(engine).ids(among) == wanted


@pytest.mark.parametrize("k", [1, 3])
def test_the_target_as_its_own_drafter_is_always_accepted(target: Decoder, k: int) -> None:
    engine = make_engine(target, {"itself": DraftModelDrafter(target, 20_000)}, max_num_seqs=3)
    for number in range(5):
        engine.add_request(
            tiny.prompt(20 * number + 1, seed=number), seeded(), RequestOptions(num_speculative_tokens=k)
        )
    for output in run(engine).outputs.values():
        statistics = output.metrics.speculation
        assert statistics.num_accepted_tokens == statistics.num_draft_tokens > 0
        assert statistics.num_steps == -(-30 // (k + 1))


def test_speculation_can_be_left_out_for_one_request(target: Decoder) -> None:
    engine = make_engine(target, {"itself": DraftModelDrafter(target, 20_000)})
    prompt, params = tiny.prompt(30), seeded(seed=1)
    first = engine.add_request(prompt, params, RequestOptions(speculative=False))
    second = engine.add_request(prompt, params, RequestOptions(num_speculative_tokens=0))
    third = engine.add_request(prompt, params, RequestOptions(method="none"))
    fourth = engine.add_request(prompt, params)
    result = run(engine)
    assert [result.outputs[n].metrics.speculation.num_draft_tokens > 0 for n in (first, second, third, fourth)] == [
        False,
        False,
        False,
        True,
    ]
    assert result.ids(first) == result.ids(second) == result.ids(third) == result.ids(fourth)


def test_choices_differ_and_each_is_the_same_without_speculation(target: Decoder) -> None:
    prompt = tiny.prompt(70)
    all_ids = []
    for method, seats in (("none", 8), ("itself", 8), ("itself", 2)):
        engine = make_engine(target, {"itself": DraftModelDrafter(target, 20_000)}, max_num_seqs=seats)
        request = engine.add_request(prompt, seeded(seed=4, n=4), RequestOptions(method=method))
        result = run(engine)
        all_ids.append([result.ids(request, choice) for choice in range(4)])
        output = result.outputs[request]
        assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
        assert output.usage.completion_tokens == sum(map(len, all_ids[-1]))
        assert engine.pool.blocks_in_use == 0
        if method == "itself":
            statistics = output.metrics.speculation
            assert statistics.num_accepted_tokens == statistics.num_draft_tokens
    assert all_ids[0] == all_ids[1] == all_ids[2]
    assert all_ids[0][0] == plain(target, prompt, seeded(seed=4))
    assert len({tuple(ids) for ids in all_ids[0]}) == 4


def test_requests_without_a_seed_differ_and_can_be_repeated(target: Decoder) -> None:
    engine = make_engine(target)
    numbers = [engine.add_request(tiny.prompt(9), SamplingParams(max_tokens=12)) for _ in range(10)]
    result = run(engine)
    assert len({tuple(result.ids(number)) for number in numbers}) >= 8
    again = SamplingParams(max_tokens=12, seed=result.outputs[numbers[3]].seed)
    assert plain(target, tiny.prompt(9), again) == result.ids(numbers[3])


# Ends


def test_max_tokens_is_exact_for_every_block_length(target: Decoder) -> None:
    prompt = tiny.prompt(21)
    answer = plain(target, prompt, GREEDY)
    engine_of = {
        right: make_engine(target, {"scripted": Prompter(oracle(lambda right=right: right, VOCAB))}, num_draft_tokens=5)
        for right in range(6)
    }
    for engine in engine_of.values():
        engine.speculation.drafters["scripted"].know(prompt, answer)  # type: ignore[attr-defined]
        numbers = {n: engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=n)) for n in range(1, 21)}
        result = run(engine)
        for limit, number in numbers.items():
            output = result.outputs[number]
            assert result.ids(number) == answer[:limit]
            assert output.outputs[0].finish_reason == "length"
            assert output.usage.completion_tokens == limit
            assert output.metrics.speculation.num_tokens == limit


def test_a_stop_token_ends_the_answer_at_every_position_of_a_block(target: Decoder) -> None:
    prompt, params = tiny.prompt(21), seeded(seed=11)
    answer = plain(target, prompt, params)
    for script in (oracle(lambda: 99, VOCAB), bush(VOCAB)):
        scripted = Prompter(script)
        scripted.know(prompt, answer)
        engine = make_engine(target, {"scripted": scripted}, num_draft_tokens=8)
        numbers = [
            engine.add_request(prompt, seeded(seed=11, stop_token_ids=[answer[position]])) for position in range(16)
        ]
        result = run(engine)
        for position, number in enumerate(numbers):
            first = answer.index(answer[position])
            assert result.ids(number) == answer[: first + 1]
            assert result.outputs[number].outputs[0].finish_reason == "stop"
            assert result.outputs[number].outputs[0].stop_reason == answer[position]
        assert not engine.speculation.faults


@pytest.mark.parametrize("length", [59, 62, 63])
def test_the_context_is_filled_to_its_last_position(length: int) -> None:
    target = tiny.tiny_decoder(
        "llama", max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    engine = make_engine(target, {"itself": DraftModelDrafter(target), "ngram": NgramDrafter(1, 3)}, max_model_len=64)
    prompt = tiny.prompt(length)
    numbers = [
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=limit), RequestOptions(method=method))
        for limit in (None, 1000)
        for method in ("itself", "ngram")
    ]
    with pytest.raises(PacelineError, match="64 tokens but the context holds 64"):
        engine.add_request(tiny.prompt(64), GREEDY)
    result = run(engine)
    for number in numbers:
        assert result.ids(number) == plain(target, prompt, SamplingParams(temperature=0))
        assert len(result.ids(number)) == 64 - length
    assert not engine.speculation.faults


# Parameters, position by position


@pytest.mark.parametrize(
    "changes",
    [
        {"frequency_penalty": 0.6},
        {"frequency_penalty": -2.0, "presence_penalty": 1.0},
        {"repetition_penalty": 1.3},
        {"logit_bias": {3: 5.0, 90: -100.0}},
        {"min_p": 0.2},
        {"bad_words": ((4,), (20, 21)), "top_k": 30},
        {"logprobs": 3},
        {"logprobs": 0, "temperature": 0},
    ],
    ids=str,
)
def test_parameters_and_logprobs_are_plain_decodings(target: Decoder, changes: dict[str, object]) -> None:
    prompt, params = tiny.prompt(33), seeded(**{"seed": 8, **changes})
    answer = plain(target, prompt, params)
    reference: RequestOutput | None = None
    for script in (oracle(lambda: 0, VOCAB), oracle(lambda: 99, VOCAB), bush(VOCAB), garbage(VOCAB)):
        scripted = Prompter(script)
        scripted.know(prompt, answer)
        engine = make_engine(target, {"scripted": scripted}, num_draft_tokens=6)
        bare = engine.add_request(prompt, params, RequestOptions(speculative=False))
        number = engine.add_request(prompt, params)
        result = run(engine)
        assert result.ids(number) == answer
        reference = reference or result.outputs[bare]
        assert result.outputs[number].outputs[0].logprobs == reference.outputs[0].logprobs
    if params.logprobs is not None:
        assert reference is not None
        assert reference.outputs[0].logprobs is not None
        assert [position.chosen.token_id for position in reference.outputs[0].logprobs] == answer
        assert all(len(position.top) == params.logprobs for position in reference.outputs[0].logprobs)
        assert reference.outputs[0].cumulative_logprob is not None
        assert reference.outputs[0].cumulative_logprob < 0


@pytest.mark.parametrize("chunks", [1, 200, 4096])
@pytest.mark.parametrize("length", [1, 2, 128, 129, 300])
def test_prompt_chunks_change_nothing(target: Decoder, length: int, chunks: int) -> None:
    """However many rows a step may hold: same tokens, same acceptance, same observations."""
    prompt, params = tiny.prompt(length, seed=5), SamplingParams(temperature=0, max_tokens=12)
    scripted = Prompter(oracle(lambda: 99, VOCAB))
    scripted.know(prompt, plain(target, prompt, params))
    engine = make_engine(
        target,
        {"itself": DraftModelDrafter(target, 20_000), "scripted": scripted},
        max_num_batched_tokens=chunks,
    )
    numbers = [engine.add_request(prompt, params, RequestOptions(method=m)) for m in ("itself", "scripted") * 2]
    result = run(engine)
    for number in numbers:
        assert result.ids(number) == plain(target, prompt, params)
        assert result.outputs[number].metrics.speculation.num_steps == 3
    assert not engine.speculation.faults


def test_features_are_those_of_the_observed_tokens(target: Decoder) -> None:
    """Of each request its own, on the path that was accepted: from prompt chunks, plain steps and trees alike."""
    onlooker = Onlooker(bush(VOCAB))
    engine = make_engine(target, {"scripted": onlooker}, max_num_batched_tokens=48, num_draft_tokens=9)
    texts = {}
    for number, length in enumerate((100, 3, 40)):
        prompt = tuple(tiny.prompt(length, seed=number))
        texts[prompt] = plain(target, prompt, GREEDY)
        onlooker.know(prompt, texts[prompt])
        engine.add_request(prompt, GREEDY)
    spoken = [output.metrics.speculation for output in run(engine).outputs.values()]
    assert all(0 < s.num_accepted_tokens < s.num_draft_tokens for s in spoken) and not engine.speculation.faults
    for prompt, answer in texts.items():
        shown = onlooker.shown[prompt]
        count = sum(len(features.hidden[0]) for features in shown)
        told = [*prompt, *answer][:count]
        out = target.forward([Segment(target.new_pool(512).new_sequence(), told)], taps=(0, 1))
        states = {**out.taps, -1: target.final_hidden(out.hidden)}
        for layer, wanted in states.items():
            assert torch.equal(torch.cat([features.hidden[layer] for features in shown]), wanted), layer
        tops = torch.cat([features.top_tokens for features in shown if features.top_tokens is not None])
        assert torch.equal(tops, target.logits(out.hidden)[count - len(tops) :].topk(3).indices)
