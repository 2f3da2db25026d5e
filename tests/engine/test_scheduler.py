"""Who runs: in order, as far as blocks go; the youngest is put back and computed again, its tokens unchanged."""

import random

import pytest
import tiny
import torch
from drafters.scripted import oracle
from engine.running import RequestOptions, Run, make_engine, plain, run, seeded
from engine.test_engine import Prompter
from engine.toy_tokenizer import toy_tokenizer

from paceline.core.params import SamplingParams
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.models.decoder import Decoder


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny.tiny_decoder("llama", dtype=torch.bfloat16)


def test_the_waiting_come_in_by_order_of_arrival(target: Decoder) -> None:
    engine = make_engine(target, max_num_seqs=2)
    for number in range(6):
        engine.add_request(tiny.prompt(100 if number == 2 else 5, seed=number), seeded(max_tokens=4 + number))
    seen: list[int] = []

    def watch(step: int) -> None:
        assert len(engine.scheduler.running) <= 2
        for sequence in engine.scheduler.running:
            if sequence.request_id not in seen:
                seen.append(sequence.request_id)

    run(engine, watch)
    assert seen == sorted(seen)
    assert len(seen) == 6


@pytest.mark.parametrize("method", ["none", "itself", "scripted"])
@pytest.mark.parametrize("cached", [0, 6])
def test_room_for_one_and_a_half_requests(target: Decoder, method: str, cached: int) -> None:
    """Four requests: all come through, none is lost, tokens unchanged, and the oldest is never put back."""
    scripted = Prompter(oracle(lambda: 3, 256))
    drafters = {"itself": DraftModelDrafter(target, 20_000), "scripted": scripted}
    # the scripted drafter checks that it is told of every token, and keeps nothing for a cached prefix
    engine = make_engine(target, drafters, num_kv_blocks=6, prefix_cache_blocks=0 if method == "scripted" else cached)
    numbers, answers = [], []
    for number in range(4):
        prompt, params = tiny.prompt(100 + 20 * number, seed=number), seeded(max_tokens=80)
        answers.append(plain(target, prompt, params))
        scripted.know(prompt, answers[-1])
        numbers.append(engine.add_request(prompt, params, RequestOptions(method=method)))

    def in_order(step: int) -> None:
        held = engine.pool.blocks_in_use
        assert held <= 6
        arrivals = [sequence.arrival for sequence in engine.scheduler.running]
        assert arrivals == sorted(arrivals)

    result = run(engine, in_order)
    assert [result.ids(number) for number in numbers] == answers
    put_back = [result.outputs[number].metrics.num_put_back for number in numbers]
    assert put_back[0] == 0
    assert sum(put_back) > 0
    assert not engine.speculation.faults
    engine.reset_prefix_cache()
    assert engine.pool.blocks_in_use == 0
    assert drafters["itself"].pool.blocks_in_use == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("blocks", [2, 3, 4, 7])
def test_choices_come_through_with_hardly_any_room(target: Decoder, blocks: int) -> None:
    """Forks share a block that each must copy before it writes."""
    prompt, params = tiny.prompt(60), seeded(seed=3, n=4, max_tokens=50)
    wide = make_engine(target)
    wanted = wide.add_request(prompt, params)
    reference = run(wide)
    engine = make_engine(target, {"itself": DraftModelDrafter(target, 20_000)}, num_kv_blocks=blocks)
    number = engine.add_request(prompt, params)
    result = run(engine)
    for choice in range(4):
        assert result.ids(number, choice) == reference.ids(wanted, choice)
    assert engine.pool.blocks_in_use == 0
    assert not engine.speculation.faults


def test_drafts_never_put_anybody_back(target: Decoder) -> None:
    """Two requests that just fit without drafts: the drafts are shortened instead."""
    engine = make_engine(target, {"ngram": NgramDrafter(1, 3)}, num_kv_blocks=4, num_draft_tokens=100)
    params = SamplingParams(temperature=0, max_tokens=64)
    numbers = [engine.add_request(tiny.prompt(64, seed=seed), params) for seed in (1, 2)]
    result = run(engine)
    for number, seed in zip(numbers, (1, 2), strict=True):
        assert result.ids(number) == plain(target, tiny.prompt(64, seed=seed), params)
        assert result.outputs[number].metrics.num_put_back == 0


def test_a_long_prompt_does_not_hold_up_the_others(target: Decoder) -> None:
    """Chunk by chunk, with the others decoding meanwhile; a step has no more rows than it may."""
    engine = make_engine(target, max_num_batched_tokens=140)
    first = engine.add_request(tiny.prompt(5), seeded(max_tokens=40))
    long = engine.add_request(tiny.prompt(400), seeded(max_tokens=5))
    result = run(engine)
    steps = [len(result.shown[number, 0]) for number in (first, long)]
    assert steps == [40, 5]
    assert result.num_steps <= 42


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_soak(count: int) -> None:
    """Random parameters, arrivals and cancellations in a small pool: nothing lost or mixed up, nothing left behind."""
    source = random.Random(count)
    target = tiny.tiny_decoder("llama", dtype=torch.bfloat16, num_hidden_layers=2)
    stranger = tiny.tiny_decoder("llama", seed=1, dtype=torch.bfloat16, num_hidden_layers=1)
    draft = DraftModelDrafter(stranger, 1500)
    engine = make_engine(
        target,
        {"ngram": NgramDrafter(1, 3), "a stranger": draft},
        max_num_seqs=6,
        num_kv_blocks=12,
        prefix_cache_blocks=6,
        tokenizer=toy_tokenizer(),
    )
    prompts = [tiny.prompt(length, seed=length) for length in (1, 3, 30, 64, 65, 100, 129, 150)]
    begun: dict[int, tuple[list[int], SamplingParams]] = {}
    cancelled: set[int] = set()
    left = [count]

    def live(step: int) -> None:
        while left[0] and source.random() < 0.6:
            left[0] -= 1
            prompt = source.choice(prompts)
            params = SamplingParams(
                temperature=source.choice([0, 0.7, 1]) if (n := source.choice([1, 1, 1, 3])) == 1 else 1.0,
                top_p=source.choice([1, 0.9]),
                top_k=source.choice([0, 20]),
                frequency_penalty=source.choice([0, 0.5]),
                seed=source.randrange(5),
                n=n,
                max_tokens=source.randrange(1, 40),
                stop=source.choice([(), ("abc",), ("f", "ca")]),
                logprobs=source.choice([None, 2]),
            )
            method, k = source.choice(["none", "ngram", "a stranger"]), source.randrange(7)
            number = engine.add_request(prompt, params, RequestOptions(method=method, num_speculative_tokens=k))
            begun[number] = (prompt, params)
        if begun and source.random() < 0.1:
            number = source.choice(list(begun))
            if engine.cancel(number) is not None:
                cancelled.add(number)

    result = run_with_cancellations(engine, live, left)
    assert result.outputs.keys() == begun.keys() - cancelled
    assert count // 50 < len(cancelled) < count // 2
    for number, output in result.outputs.items():
        prompt, params = begun[number]
        assert list(output.prompt_token_ids) == prompt
        assert len(output.outputs) == params.n
    checked = source.sample(sorted(result.outputs), 25)
    for number in checked:
        prompt, params = begun[number]
        ids = plain(target, prompt, params)
        got = result.ids(number)
        assert got == ids[: len(got)]
        assert len(got) == len(ids) or result.outputs[number].outputs[0].finish_reason == "stop"
    assert not engine.speculation.faults
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert engine.pool.blocks_in_use == engine.prefix_cache.num_blocks <= 6
    engine.reset_prefix_cache()
    assert engine.pool.blocks_in_use == 0
    assert draft.pool.blocks_in_use == 0
    assert not draft._states


def run_with_cancellations(engine, live, left):  # type: ignore[no-untyped-def]
    result = Run()
    while left[0] or engine.has_unfinished:
        live(result.num_steps)
        result.take(engine.step())
    return result
