"""Who runs: in order, as far as blocks go; the youngest is put back and computed again, its tokens unchanged."""

from collections.abc import Sequence

import pytest
import tiny
import torch
from drafters.scripted import oracle
from engine.running import RequestOptions, make_engine, plain, run, seeded
from engine.test_engine import Prompter

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.decode import decode
from paceline.drafters.base import Needs, SequenceView
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.none import NoDrafter
from paceline.drafters.suffix import SuffixDrafter
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
@pytest.mark.parametrize("cached", [0, 5])
def test_room_for_one_and_a_half_requests(target: Decoder, method: str, cached: int) -> None:
    """Four requests: all come through, none is lost, tokens unchanged, and the oldest is never put back."""
    scripted = Prompter(oracle(lambda: 3, 256))
    drafters = {"itself": DraftModelDrafter(target, 20_000), "scripted": scripted}
    # the scripted drafter checks that it is told of every token, and keeps nothing for a cached prefix
    engine = make_engine(target, drafters, num_kv_blocks=5, prefix_cache_blocks=0 if method == "scripted" else cached)
    numbers, answers = [], []
    for number in range(4):
        prompt, params = tiny.prompt(100 + 20 * number, seed=number), seeded(seed=number, max_tokens=60)
        answers.append(plain(target, prompt, params))
        scripted.know(prompt, answers[-1])
        numbers.append(engine.add_request(prompt, params, RequestOptions(method=method)))

    def in_order(step: int) -> None:
        held = engine.pool.blocks_in_use
        assert held <= 5
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
    prompt, params = tiny.prompt(60), seeded(seed=3, n=4, max_tokens=30)
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


class Rash(NoDrafter):
    """Drafts as much as it may, whatever it is worth."""

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [Proposal.chain([0] * budget) for budget in budgets]


class Fan(NoDrafter):
    """Drafts the answer's next token as the last of its siblings, and notes its budgets by the text's length."""

    def __init__(self, text: Sequence[int], trees: bool) -> None:
        self.text, self.needs, self.budgets = list(text), Needs(trees=trees), dict[int, int]()

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        (sequence,), (budget,) = sequences, budgets
        at = len(sequence.token_ids)
        self.budgets[at] = budget
        right = self.text[at]
        strangers = [token for token in range(256) if token != right][: budget - 1]
        return [Proposal((*strangers, right), (-1,) * budget)]


@pytest.mark.parametrize("trees", [True, False])
def test_near_an_answers_end_a_tree_is_as_wide_as_before(target: Decoder, trees: bool) -> None:
    """The loop and the engine hand out the same budgets; of a tree only the depth has lost its use."""
    prompt, params = tiny.prompt(20), SamplingParams(temperature=0, max_tokens=8)
    expected = plain(target, prompt, params)
    alone, shared = (Fan([*prompt, *expected], trees) for _ in range(2))
    steps = list(decode(target, prompt, params, alone, 3))
    engine = make_engine(target, {"fan": shared}, num_draft_tokens=3)
    number = engine.add_request(prompt, params)
    assert run(engine).ids(number) == expected == [token for step in steps for token in step.token_ids]
    assert alone.budgets == shared.budgets == {20: 3, 22: 3, 24: 3, 26: 3 if trees else 1}


def test_a_tree_at_the_end_of_the_context_has_room(target: Decoder) -> None:
    """Its rows lie behind the last position that the model may have, and in no more blocks than there are."""
    limit = target.config.max_context
    prompt, params = tiny.prompt(limit - 6), SamplingParams(temperature=0, max_tokens=6)
    for blocks in (limit // 64, limit // 64 + 1):
        fan = Fan([*prompt, *plain(target, prompt, params)], trees=True)
        engine = make_engine(target, {"fan": fan}, num_draft_tokens=20, num_kv_blocks=blocks, max_model_len=limit)
        number = engine.add_request(prompt, params)
        assert run(engine).ids(number) == fan.text[limit - 6 :]
        assert not engine.speculation.faults and engine.pool.blocks_in_use == 0


def test_rejected_drafts_hold_no_blocks(target: Decoder) -> None:
    """A long draft takes free blocks for a step; who needs one afterwards finds it."""
    engine = make_engine(target, {"rash": Rash()}, num_kv_blocks=4, num_draft_tokens=100)
    params = SamplingParams(temperature=0, max_tokens=9)
    first = engine.add_request(tiny.prompt(30), SamplingParams(temperature=0, max_tokens=200))
    second = engine.add_request(tiny.prompt(60), params)
    outputs = {}
    while second not in outputs:
        outputs |= {update.request_id: update.output for update in engine.step() if update.output is not None}
    assert list(outputs[second].outputs[0].token_ids) == plain(target, tiny.prompt(60), params)
    assert outputs[second].metrics.num_put_back == 0
    engine.cancel(first)
    assert engine.pool.blocks_in_use == 0


def test_the_blocks_of_rejected_drafts_wait_for_the_next_one(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody lacks them: to clear them in every step took 1.5 % of a small target's time."""
    engine = make_engine(target, {"rash": Rash()}, num_kv_blocks=40, num_draft_tokens=100)
    taken, take = [], engine.pool.take
    monkeypatch.setattr(engine.pool, "take", lambda: taken.append(take()) or taken[-1])
    numbers = [engine.add_request(tiny.prompt(30, seed=seed), seeded(max_tokens=150)) for seed in range(3)]
    result = run(engine)
    assert all(len(result.ids(number)) == 150 for number in numbers)
    assert len(taken) == 3 * -(-180 // 64)  # drafts near the end are shorter
    assert engine.pool.blocks_in_use == 0


def test_a_put_back_answer_enters_the_suffix_pool_once(target: Decoder) -> None:
    suffix = SuffixDrafter()
    engine = make_engine(target, {"suffix": suffix}, num_kv_blocks=3)
    numbers = [engine.add_request(tiny.prompt(60, seed=seed), seeded(max_tokens=60)) for seed in (1, 2)]
    result = run(engine)
    assert sum(result.outputs[number].metrics.num_put_back for number in numbers) > 0
    assert len(suffix.pool) == 2
    assert suffix.pool.num_tokens == 120
    assert suffix.pool.tree.count(result.ids(numbers[1])[10:20]) == 1


def test_a_long_prompt_does_not_hold_up_the_others(target: Decoder) -> None:
    """Chunk by chunk, with the others decoding meanwhile; a step has no more rows than it may."""
    engine = make_engine(target, max_num_batched_tokens=140)
    first = engine.add_request(tiny.prompt(5), seeded(max_tokens=40))
    long = engine.add_request(tiny.prompt(400), seeded(max_tokens=5))
    result = run(engine)
    steps = [len(result.shown[number, 0]) for number in (first, long)]
    assert steps == [40, 5]
    assert result.num_steps <= 42
