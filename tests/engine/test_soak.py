"""Hundreds of requests with random parameters, arrivals and cancellations in a small pool."""

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tiny
import torch
from engine.running import RequestOptions, Run, make_engine, plain
from engine.toy_tokenizer import toy_tokenizer

from paceline.core.params import SamplingParams
from paceline.drafters.composite import CompositeDrafter, Member
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import Engine
from paceline.engine.outputs import RequestOutput

PROMPTS = [tiny.prompt(length, seed=length) for length in (1, 3, 48, 55, 64, 65, 116, 150)]
METHODS = ("none", "ngram", "suffix", "a stranger", "composite")


@dataclass
class Ledger:
    """What was asked, and what came of it; finished answers are kept as ids alone."""

    asked: dict[int, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    answers: dict[int, list[int]] = field(default_factory=dict)  # the first choice's
    stopped: set[int] = field(default_factory=set)
    cut_off: list[int] = field(default_factory=list)  # how often one that was cancelled while it decoded was put back
    put_back_at: list[int] = field(default_factory=list)  # how many tokens a sequence had when it lost its rows

    def close(self, output: RequestOutput) -> None:
        prompt, params = self.asked[output.request_id]
        assert output.request_id not in self.answers
        assert list(output.prompt_token_ids) == prompt
        assert len(output.outputs) == params.n
        assert output.usage.completion_tokens == sum(len(choice.token_ids) for choice in output.outputs)
        self.answers[output.request_id] = list(output.outputs[0].token_ids)
        if output.outputs[0].finish_reason == "stop":
            self.stopped.add(output.request_id)


def random_params(source: random.Random) -> SamplingParams:
    n = source.choice([1, 1, 1, 3])
    return SamplingParams(
        temperature=source.choice([0, 0.7, 1]) if n == 1 else 1.0,
        top_p=source.choice([1, 0.9]),
        top_k=source.choice([0, 20]),
        frequency_penalty=source.choice([0, 0.5]),
        seed=source.randrange(5),
        n=n,
        max_tokens=source.randrange(1, 40),
        stop=source.choice([(), ("abc",), ("f", "ca")]),
        logprobs=source.choice([None, 2]),
    )


def make_scarce(engine: Engine, source: random.Random) -> None:
    """At random moments there is no room, whatever the pool holds: somebody who decodes is put back."""
    scheduler, free_up = engine.scheduler, engine.scheduler._free_up
    scheduler._free_up = lambda blocks: source.random() > 0.03 and free_up(blocks)  # type: ignore[method-assign]


def live(
    engine: Engine,
    drafts: list[DraftModelDrafter],
    count: int,
    source: random.Random,
    after_request: Callable[[int], None],
) -> Ledger:
    """`count` requests come, some are cancelled at any moment; until all have ended. No draft knows one that left."""
    ledger, current = Ledger(), Run()
    while len(ledger.asked) < count or engine.has_unfinished:
        while len(ledger.asked) < count and source.random() < 0.6:
            prompt, params = source.choice(PROMPTS), random_params(source)
            options = RequestOptions(
                method=source.choice(METHODS),
                num_speculative_tokens=source.randrange(7),
                private_drafts=source.random() < 0.2,
            )
            ledger.asked[engine.add_request(prompt, params, options)] = prompt, params
            after_request(len(ledger.asked))
        if ledger.asked and source.random() < 0.1:
            running = [sequence for sequence in engine.scheduler.running if sequence.num_output]
            struck = source.choice(running) if running and source.random() < 0.7 else None
            number = source.choice(list(ledger.asked)) if struck is None else struck.request.request_id
            if engine.cancel(number) is not None:
                ledger.cancelled.add(number)
                ledger.cut_off += [] if struck is None else [struck.num_put_back]
                current.shown = {key: updates for key, updates in current.shown.items() if key[0] != number}
        held = (*engine.scheduler.running, *engine.scheduler.waiting)
        assert all(draft._states.keys() <= {sequence.request_id for sequence in held} for draft in drafts)
        before = [(sequence, sequence.num_put_back, sequence.num_output) for sequence in held]
        current.take(engine.step())
        for sequence, times, tokens in before:
            ledger.put_back_at.extend([tokens] * (sequence.num_put_back - times))
        for number in list(current.outputs):
            finished = Run({number: current.outputs.pop(number)})
            finished.shown = {key: current.shown.pop(key) for key in list(current.shown) if key[0] == number}
            finished.check_streams()
            ledger.close(finished.outputs[number])
    return ledger


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_soak(count: int) -> None:
    """Nothing lost or mixed up, nothing left behind, and memory flat once all is warm."""
    source = random.Random(count)
    target = tiny.tiny_decoder("llama", dtype=torch.bfloat16, num_hidden_layers=2)
    stranger = tiny.tiny_decoder("llama", seed=1, dtype=torch.bfloat16, num_hidden_layers=1)
    drafts = [DraftModelDrafter(stranger, 1500) for _ in range(2)]
    small_pool = {"max_cached_requests": 30, "max_corpus_tokens": 600}
    engine = make_engine(
        target,
        {
            "ngram": NgramDrafter(1, 3),
            "suffix": SuffixDrafter(**small_pool),
            "a stranger": drafts[0],
            "composite": CompositeDrafter([Member(SuffixDrafter(**small_pool)), Member(drafts[1])]),
        },
        max_num_seqs=6,
        num_kv_blocks=9,
        prefix_cache_blocks=4,
        tokenizer=toy_tokenizer(),
    )
    make_scarce(engine, source)
    memory: dict[int, int] = {}

    def measure(requests: int) -> None:
        if requests in (200, count):
            gc.collect()
            memory[requests] = resident_bytes()

    ledger = live(engine, drafts, count, source, measure)
    assert ledger.answers.keys() == ledger.asked.keys() - ledger.cancelled
    assert count // 50 < len(ledger.cancelled) < count // 2
    assert sum(tokens > 3 for tokens in ledger.put_back_at) >= count // 20, "decoding sequences must lose their rows"
    assert len(ledger.cut_off) >= count // 25, "requests must be cancelled while they decode"
    assert count < 500 or sum(map(bool, ledger.cut_off)) >= 5, "and after they were put back"
    for number, got in ledger.answers.items():
        expected = plain(target, *ledger.asked[number])
        assert got == expected[: len(got)]
        assert len(got) == len(expected) or number in ledger.stopped
    assert not engine.speculation.faults
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert engine.pool.blocks_in_use == engine.prefix_cache.num_blocks <= 4
    engine.reset_prefix_cache()
    assert engine.pool.blocks_in_use == 0
    for draft in drafts:
        assert draft.pool.blocks_in_use == 0
        assert not draft._states
    if 200 in memory:
        assert memory[count] - memory[200] < 5 << 20, "300 requests more have left megabytes behind"


def resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0
