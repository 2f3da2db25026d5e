"""A prefix that was computed before: found, shared, bounded, and with the same bits and the same acceptance."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from engine.running import RequestOptions, make_engine, plain, run, seeded

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.drafters.base import Features, Needs, SequenceView
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.none import NoDrafter
from paceline.engine.prefix_cache import PrefixCache
from paceline.models.decoder import Decoder, Segment

GREEDY = SamplingParams(temperature=0, max_tokens=7, logprobs=2)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny.tiny_decoder("llama", dtype=torch.bfloat16)


@pytest.mark.parametrize("method", ["none", "itself", "a stranger"])
def test_a_hit_changes_nothing_but_time(target: Decoder, method: str) -> None:
    """P; P again; P and more; two different suffixes; P shorter by one; with logprobs, so bits and acceptance show."""
    stranger = tiny.tiny_decoder("llama", seed=1, dtype=torch.bfloat16)
    base = tiny.prompt(200, seed=1)
    prompts = [base, base, [*base, 1, 2, 3], [*base, *tiny.prompt(80, seed=2)], [*base, *tiny.prompt(80, seed=3)]]
    prompts += [base[:-1], base[:128], base[:129], base[:64], base]
    drafters = {"itself": DraftModelDrafter(target, 20_000), "a stranger": DraftModelDrafter(stranger, 20_000)}
    engine = make_engine(target, drafters, prefix_cache_blocks=20)
    cached = []
    for prompt in prompts:
        for params in (GREEDY, seeded(seed=6, max_tokens=7, logprobs=1)):
            cold = make_engine(target, drafters)
            alone = cold.add_request(prompt, params, RequestOptions(method=method))
            number = engine.add_request(prompt, params, RequestOptions(method=method))
            expected, got = run(cold).outputs[alone], run(engine).outputs[number]
            assert got.outputs == expected.outputs
            cached.append(got.usage.cached_tokens)
    assert cached == [0, *[192] * 6, 256, 192, 256, 192, 192, 64, 64, 128, 128, 0, 0, 192, 192]
    assert engine.prefix_cache.num_blocks <= 20
    engine.reset_prefix_cache()
    assert engine.pool.blocks_in_use == 0
    assert all(drafter.pool.blocks_in_use == 0 for drafter in drafters.values())


def test_drafters_of_one_kind_keep_their_states_apart(target: Decoder) -> None:
    """Two draft models in one engine: a hit must not hand one the other's rows."""
    stranger = tiny.tiny_decoder("llama", seed=1, dtype=torch.bfloat16)
    drafters = {"itself": DraftModelDrafter(target, 20_000), "a stranger": DraftModelDrafter(stranger, 20_000)}
    engine = make_engine(target, drafters, prefix_cache_blocks=20)
    prompt, params = tiny.prompt(150), seeded(seed=2, max_tokens=16)
    rates = {}
    for method in ("a stranger", "itself", "a stranger", "itself"):
        number = engine.add_request(prompt, params, RequestOptions(method=method))
        result = run(engine)
        assert result.ids(number) == plain(target, prompt, params)
        rate = result.outputs[number].metrics.speculation.draft_acceptance_rate
        assert rates.setdefault(method, rate) == rate
    assert rates["itself"] == 1 > rates["a stranger"]
    assert not engine.speculation.faults


def test_a_conversation_finds_its_earlier_turns(target: Decoder) -> None:
    engine = make_engine(target, {"itself": DraftModelDrafter(target, 20_000)}, prefix_cache_blocks=20)
    text = tiny.prompt(70)
    for turn in range(4):
        number = engine.add_request(text, SamplingParams(temperature=0, max_tokens=30))
        result = run(engine)
        assert result.ids(number) == plain(target, text, SamplingParams(temperature=0, max_tokens=30))
        output = result.outputs[number]
        assert output.usage.cached_tokens == ((len(text) - 12 - 1) // 64 * 64 if turn else 0)
        assert output.metrics.speculation.draft_acceptance_rate == 1
        text = [*text, *result.ids(number), *tiny.prompt(11, seed=turn)]


def test_rows_in_use_are_shared_and_never_written(target: Decoder) -> None:
    """Eight at once on one prompt: its full blocks are held once."""
    engine = make_engine(target, prefix_cache_blocks=20)
    base = tiny.prompt(193)
    engine.add_request(base, seeded(max_tokens=1))
    run(engine)
    before = engine.pool.keys[:, :].clone()
    blocks = [node.block for node in engine.prefix_cache._path(base)]
    numbers = {engine.add_request([*base, number], seeded(seed=number)): number for number in range(8)}
    peak = [0]

    def watch(step: int) -> None:
        peak[0] = max(peak[0], engine.pool.blocks_in_use)

    result = run(engine, watch)
    assert peak[0] <= 3 + 8
    for number, last in numbers.items():
        assert result.ids(number) == plain(target, [*base, last], seeded(seed=last))
    assert torch.equal(engine.pool.keys[:, blocks], before[:, blocks])


class Hidden(NoDrafter):
    """Lives on the target's hidden states: proposes a function of all that it was shown."""

    name = "hidden"
    needs = Needs(hidden_layers=(1,))

    def __init__(self) -> None:
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.snapshots = 0

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        self.rows.setdefault(sequence.request_id, []).extend(features.hidden[1])

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        for sequence in sequences:
            assert len(self.rows.get(sequence.request_id, [])) == len(sequence.token_ids) - 1
        return [
            Proposal.chain([int(torch.stack(self.rows[s.request_id]).float().sum().abs()) % 256]) for s in sequences
        ]

    def snapshot(self, sequence: SequenceView) -> Any:
        self.snapshots += 1
        return list(self.rows[sequence.request_id])

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        self.rows[sequence.request_id] = snapshot[:length]

    def discard(self, snapshot: Any) -> None:
        self.snapshots -= 1

    def mend(self, snapshots: Sequence[Any]) -> None:
        pass

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        self.rows[child.request_id] = list(self.rows[sequence.request_id])

    def release(self, sequence: SequenceView) -> None:
        self.rows.pop(sequence.request_id, None)


def test_a_drafter_of_hidden_states_must_know_the_prefix(target: Decoder) -> None:
    """What plain requests left behind is no hit for it; what it saw itself is."""
    drafter = Hidden()
    engine = make_engine(target, {"hidden": drafter}, prefix_cache_blocks=20)
    base = tiny.prompt(150)
    engine.add_request(base, GREEDY, RequestOptions(speculative=False))
    run(engine)
    statistics = []
    for prompt, hit in ((base, 0), (base, 128), ([*base, 7], 128), ([*base[:100], *base[:60]], 64)):
        number = engine.add_request(prompt, seeded(seed=1, n=2))
        result = run(engine)
        assert result.outputs[number].usage.cached_tokens == hit
        assert result.ids(number) == plain(target, prompt, seeded(seed=1))
        statistics.append(result.outputs[number].metrics.speculation)
    assert statistics[0] == statistics[1]
    assert not engine.speculation.faults
    assert not drafter.rows
    engine.reset_prefix_cache()
    assert drafter.snapshots == 0


def test_trie_against_a_list(target: Decoder) -> None:
    """Random texts: a hit is never longer than what was inserted, blocks are those of the text, the bound holds."""
    source = random.Random(0)
    pool = target.new_pool(64 * 40)
    cache = PrefixCache(pool, 12)
    known: list[list[int]] = []
    block_of: dict[tuple[int, ...], int] = {}
    hits = 0
    for _ in range(300):
        text = [number for _ in range(source.randrange(1, 5)) for number in [source.randrange(3)] * 64]
        sequence = pool.new_sequence()
        hit = cache.lookup(text, None)
        assert all(block_of[tuple(text[: 64 * (i + 1)])] == block for i, block in enumerate(hit.blocks))
        hits += len(hit.blocks)
        sequence.share_prefix(hit.blocks)
        sequence.reserve(len(text) - sequence.length)
        sequence.length = len(text)
        cache.insert(text, sequence.blocks)
        for i in range(len(cache.lookup(text, None).blocks)):
            block_of[tuple(text[: 64 * (i + 1)])] = cache.lookup(text, None).blocks[i]
        assert len(cache.lookup(text, None).blocks) == len(text) // 64
        known.append(text)
        sequence.release()
        assert cache.num_blocks == pool.blocks_in_use <= 12
        if source.random() < 0.1:
            assert cache.evict_one()
    assert hits > 100
    holder = pool.new_sequence()
    holder.share_prefix(cache.lookup(max(known, key=lambda text: len(cache.lookup(text, None).blocks)), None).blocks)
    evictable = cache.num_evictable
    assert 0 < evictable < cache.num_blocks
    assert [cache.evict_one() for _ in range(evictable + 1)] == [True] * evictable + [False]
    holder.release()
    cache.clear()
    assert pool.blocks_in_use == cache.num_blocks == 0
    assert not cache.evict_one()


def test_cached_rows_hold_what_a_forward_writes(target: Decoder) -> None:
    engine = make_engine(target, prefix_cache_blocks=20)
    base = tiny.prompt(130)
    number = engine.add_request(base, seeded(seed=3, max_tokens=70))
    text = [*base, *run(engine).ids(number)]
    blocks = engine.prefix_cache.lookup(text, None).blocks
    assert len(blocks) == 3
    fresh = target.new_pool(256).new_sequence()
    target.forward([Segment(fresh, text[:192])])
    assert torch.equal(engine.pool.keys[:, list(blocks)], fresh.pool.keys[:, fresh.blocks])
    assert torch.equal(engine.pool.values[:, list(blocks)], fresh.pool.values[:, fresh.blocks])


def test_a_request_that_only_waits_leaves_the_cache_alone(target: Decoder) -> None:
    """Evicting is no use where all that can be evicted is not enough."""
    engine = make_engine(target, num_kv_blocks=8, prefix_cache_blocks=8)
    engine.add_request(tiny.prompt(130, seed=1), seeded(max_tokens=2))
    run(engine)
    assert engine.prefix_cache.num_blocks == engine.prefix_cache.num_evictable == 2
    engine.add_request(tiny.prompt(200, seed=2), seeded(max_tokens=60))  # takes 4 of the other 6
    engine.step()
    waiting = engine.add_request(tiny.prompt(300, seed=3), seeded(max_tokens=5))  # 5, and one for who runs
    engine.step()
    assert [sequence.request_id for sequence in engine.scheduler.waiting] == [waiting]
    assert len(engine.prefix_cache.lookup(tiny.prompt(130, seed=1), None).blocks) == 2
    assert len(run(engine).ids(waiting)) == 5
