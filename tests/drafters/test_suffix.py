"""Suffix decoding: the request's own text, the outputs of earlier requests, and what may pass between them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import tiny
import torch
from drafters.test_suffix_tree import Part, by_definition
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.decode import Step, decode
from paceline.drafters.base import Features, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.none import NoDrafter
from paceline.drafters.suffix import OutputPool, SuffixDrafter
from paceline.drafters.suffix_tree import DraftLength
from paceline.errors import PacelineError


@dataclass
class Text:
    token_ids: list[int]
    request_id: int = 0
    num_prompt_tokens: int = 0
    draft_sampler: None = None
    private_drafts: bool = False


def propose(drafter: SuffixDrafter, text: Text, budget: int = 24) -> list[int]:
    (proposal,) = drafter.propose([text], [budget])  # type: ignore[list-item]
    assert proposal.is_chain and proposal.draft_probs is None and len(proposal) <= budget
    return list(proposal.tokens)


def finish(drafter: SuffixDrafter, text: Text) -> None:
    drafter.observe(text, text.token_ids[:-1], Features())  # type: ignore[arg-type]
    drafter.release(text)  # type: ignore[arg-type]


def alone(tokens: list[int], budget: int = 24, depth: int = 24) -> list[int]:
    return propose(SuffixDrafter(depth), Text(tokens), budget)


def test_drafts_by_hand() -> None:
    assert alone([1, 2, 3, 9, 1, 2]) == [3, 9]  # as many as match
    assert alone([8, 1, 2, 3, 9, 8, 1, 2]) == [3, 9, 8]
    assert alone([8, 1, 2, 3, 9, 8, 1, 2], budget=1) == [3]
    assert alone([8, 1, 2, 3, 9, 8, 1, 2], budget=0) == []
    assert alone([1, 7, 4, 1, 8, 5, 1]) == [8]  # the later of equals
    assert alone([5] * 30) == [5] * 24
    assert alone([5, 5]) == [5]
    assert alone([5]) == alone([5, 6]) == []


@pytest.mark.parametrize("count", range(6))
def test_a_draft_is_no_longer_than_what_exists(count: int) -> None:
    """A match near the text's end: its continuation is what stands behind it, the match included."""
    text = [1, 2, 3, 4, 5, 6, *range(10, 10 + count), 1, 2, 3, 4, 5, 6]
    continued = [*range(10, 10 + count), 1, 2, 3, 4, 5, 6]
    assert alone(text) == continued[:6]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(0, 9), st.integers(1, 5), st.data())
def test_a_text_that_grows_by_any_runs_is_drafted_as_by_definition(
    tokens: list[int], budget: int, depth: int, data: st.DataObject
) -> None:
    """Told in runs, drafted for now and then; what it was not asked about, it catches up with."""
    drafter, text, told = SuffixDrafter(depth), Text([]), 0
    while len(text.token_ids) < len(tokens):
        text.token_ids = tokens[: len(text.token_ids) + data.draw(st.integers(1, 5))]
        if data.draw(st.booleans()):
            run = text.token_ids[told:-1]
            drafter.observe(text, run, Features())  # type: ignore[arg-type]
            told += len(run)
        if data.draw(st.booleans()):
            expected = by_definition([Part(text.token_ids)], text.token_ids, budget, depth, DraftLength())
            assert propose(drafter, text, budget) == list(expected.tokens)


def test_a_prompt_is_indexed_beside_the_passes_over_it() -> None:
    drafter, text = SuffixDrafter(), Text(tiny.prompt(300))
    for chunk in (text.token_ids[:128], text.token_ids[128:256], text.token_ids[256:299]):
        before = len(drafter._state(text).text)  # type: ignore[arg-type]
        drafter.observe(text, chunk, Features())  # type: ignore[arg-type]
        assert len(drafter._state(text).text) == before + len(chunk)  # type: ignore[arg-type]


def test_a_draft_of_too_little_promise_is_left_to_others() -> None:
    text = Text([1, 2, 3, 9, 1, 2])  # drafts 3 9, both seen once
    assert propose(SuffixDrafter(min_score=2.0), text) == [3, 9]
    assert propose(SuffixDrafter(min_score=2.1), text) == []


# The pool


def test_what_earlier_requests_wrote_is_drafted_and_what_they_read_is_not() -> None:
    drafter = SuffixDrafter()
    finish(drafter, Text([1, 2, 3, 4, 5, 6], 1, num_prompt_tokens=3))
    assert propose(drafter, Text([9, 4], 2)) == [5]
    assert propose(drafter, Text([9, 1, 2], 2)) == []  # 3 was the first request's prompt …
    assert propose(drafter, Text([9, 2, 3], 2)) == [4, 5]  # … and is known only for what it led to
    assert propose(drafter, Text([1], 3)) == []


def test_the_requests_own_text_wins_a_tie_and_loses_to_a_better_draft() -> None:
    drafter = SuffixDrafter()
    finish(drafter, Text([0, 1, 2, 7, 8], 1, num_prompt_tokens=1))
    assert propose(drafter, Text([1, 2, 3, 4, 1, 2], 2)) == [3, 4]
    assert propose(drafter, Text([9, 2, 3, 4, 9, 6, 1, 2], 3)) == [7, 8]


def test_frequent_continuations_win() -> None:
    drafter = SuffixDrafter()
    for number, token in enumerate([7, 8, 7, 9, 7]):
        finish(drafter, Text([0, 1, 2, token], number, num_prompt_tokens=1))
    assert propose(drafter, Text([1, 2], 10)) == [7]
    assert drafter.pool.tree.count([1, 2], 7) == 3


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=20), st.integers(0, 20)), max_size=12))
def test_the_pool_is_bounded_and_holds_exactly_the_latest(requests: list[tuple[list[int], int]]) -> None:
    """Nodes and counts equal those of a pool that never saw what was evicted."""
    pool, kept = OutputPool(4, max_requests=3, max_tokens=25), list[tuple[list[int], int]]()
    for tokens, prompt in requests:
        pool.add(tokens, prompt)
        if len(tokens) > prompt:
            kept.append((tokens, prompt))
        while len(kept) > 3 or sum(len(t) - p for t, p in kept) > 25:
            kept.pop(0)
        assert len(pool) == len(kept) <= 3
        assert pool.num_tokens == sum(len(t) - p for t, p in kept) <= 25
        new = OutputPool(4, 100, 1000)
        for some, first in kept:
            new.add(some, first)
        assert pool.tree.num_nodes() == new.tree.num_nodes() <= 2 * 25
        for context in {tuple(t[i : i + n]) for t, _ in requests for i in range(len(t)) for n in range(1, 5)}:
            assert pool.tree.count(context) == new.tree.count(context)
            for token in range(4):
                assert pool.tree.count(context, token) == new.tree.count(context, token)


def test_of_an_output_larger_than_the_pool_the_end_is_kept() -> None:
    drafter = SuffixDrafter(max_corpus_tokens=10)
    finish(drafter, Text(list(range(100)), 1, num_prompt_tokens=5))
    assert (len(drafter.pool), drafter.pool.num_tokens) == (1, 10)
    assert propose(drafter, Text([97], 2)) == [98]
    assert propose(drafter, Text([50], 3)) == []


def test_memory_stays_flat_over_many_requests() -> None:
    source, drafter = random.Random(0), SuffixDrafter(max_cached_requests=20, max_corpus_tokens=500)
    sizes = []
    for number in range(300):
        finish(drafter, Text(source.choices(range(50), k=source.randint(1, 60)), number, num_prompt_tokens=10))
        sizes.append(drafter.pool.tree.num_nodes())
    assert max(sizes[100:]) <= 2 * 500
    assert not drafter._states


# A life of a request


def test_release_leaves_nothing() -> None:
    drafter = SuffixDrafter(max_cached_requests=0)
    text, child = Text([1, 2, 3, 1, 2], 1), Text([1, 2, 3, 1, 2], 2)
    propose(drafter, text)
    drafter.fork(text, child)  # type: ignore[arg-type]
    for sequence in (text, child, Text([5], 3)):  # the last was never observed
        drafter.release(sequence)  # type: ignore[arg-type]
    assert not drafter._states and not len(drafter.pool) and not drafter.pool.tree.num_nodes()


def test_without_a_pool_no_token_passes_from_one_request_to_another() -> None:
    secret, others = [900, 901, 902, 903], [[7, 900], [7, 900, 901], [7, 8, 7, 900], [900]]
    for pool, leaks in ((0, False), (10, True)):
        drafter = SuffixDrafter(max_cached_requests=pool)
        finish(drafter, Text([1, *secret, *secret], 1, num_prompt_tokens=1))
        drafts = [propose(drafter, Text(other, 2 + i)) for i, other in enumerate(others)]
        assert any(draft for draft in drafts) == leaks
    live = SuffixDrafter()  # nor while the other still runs, with a pool
    propose(live, Text([1, *secret, *secret], 1))
    assert [propose(live, Text(other, 2 + i)) for i, other in enumerate(others)] == [[]] * 4


def test_a_private_request_neither_gives_nor_takes() -> None:
    drafter, secret = SuffixDrafter(), [1, 2, 3, 7, 8, 9, 7]
    finish(drafter, Text(secret, request_id=1, private_drafts=True))
    assert len(drafter.pool) == 0
    assert propose(drafter, Text([1, 2, 3], request_id=2)) == []
    finish(drafter, Text(secret, request_id=3))
    assert propose(drafter, Text([1, 2, 3], request_id=4)) != []
    assert propose(drafter, Text([1, 2, 3], request_id=5, private_drafts=True)) == []
    assert propose(drafter, Text([1, 2, 5, 1, 2], request_id=6, private_drafts=True)) == [5, 1]  # its own text


def test_a_history_that_was_cut_or_edited_leaves_no_stale_candidate() -> None:
    drafter, text = SuffixDrafter(max_cached_requests=0), Text([1, 2, 3, 4, 1, 2])
    assert propose(drafter, text) == [3, 4]
    text.token_ids = [1, 2]
    assert propose(drafter, text) == []
    text.token_ids = [1, 2, 9, 4, 1, 2]
    assert propose(drafter, text) == [9, 4]
    text.token_ids = [1, 2, 9, 4, 1, 3, 1, 2]
    assert propose(drafter, text) == [9, 4]
    drafter.restore(text, drafter.snapshot(text), 2)  # type: ignore[arg-type, func-returns-value]
    text.token_ids = [1, 2, 8, 1, 2]
    drafter.observe(text, [8, 1], Features())  # type: ignore[arg-type]
    assert propose(drafter, text) == [8, 1]


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6))
def test_after_restore_drafts_are_the_cold_ones(histories: list[list[int]]) -> None:
    drafter = SuffixDrafter(3)
    for tokens in histories:
        text = Text(tokens)
        drafter.restore(text, None, len(tokens) - 1)  # type: ignore[arg-type]
        assert propose(drafter, text) == alone(tokens, depth=3)


def test_forks_go_their_own_ways() -> None:
    drafter = SuffixDrafter()
    text, child = Text([1, 2, 3, 4, 1], 1), Text([1, 2, 3, 4, 1], 2)
    propose(drafter, text)
    drafter.fork(text, child)  # type: ignore[arg-type]
    text.token_ids, child.token_ids = [*text.token_ids, 2], [*child.token_ids, 8, 1, 8]
    assert propose(drafter, text) == [3, 4]
    assert propose(drafter, child) == [1, 8]


# Not one token changes

VOCAB = 256
TARGET = tiny.tiny_decoder("llama", dtype=torch.bfloat16)
PROMPT = tiny.prompt(30, seed=7) * 2
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=60),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=60),
    "every parameter": SamplingParams(
        temperature=0.7,
        top_k=40,
        min_p=0.02,
        seed=3,
        max_tokens=60,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={5: 3.0, 7: -100.0},
        bad_words=((9,), (12, 13)),
        min_tokens=20,
        stop_token_ids=tuple(range(30, 36)),
    ),
}


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def run(
    drafter: SuffixDrafter | NoDrafter, prompt: list[int], params: SamplingParams, k: int, **more: object
) -> list[Step]:
    return list(decode(TARGET, prompt, params, drafter, k, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("k", [1, 4, 24])
def test_no_token_changes_cold_or_warm(params: SamplingParams, k: int) -> None:
    """A pool that knows nothing, the answer itself, other answers, or a secret: the same tokens."""
    expected = tokens_of(run(NoDrafter(), PROMPT, params, 0))
    assert len(set(expected)) > 10, "an answer that never changes would prove nothing"
    drafter = SuffixDrafter()
    cold = run(drafter, PROMPT, params, k)
    warm = run(drafter, PROMPT, params, k)
    for seed in range(3):
        finish(drafter, Text([*tiny.prompt(200, seed=seed), *PROMPT], 100 + seed))
    mixed = run(drafter, PROMPT, params, k)
    assert tokens_of(cold) == tokens_of(warm) == tokens_of(mixed) == expected
    assert len(warm) < len(cold), "the pool holds the answer, and was of no use"
    assert sum(step.num_draft_tokens for step in cold) > 0
    assert not drafter._states and len(drafter.pool) == 6


@pytest.mark.parametrize("prompt", [[5], [5, 6], [5] * 30, [5, 6, 7]], ids=["1", "2", "all equal", "3"])
def test_short_and_dull_prompts(prompt: list[int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    steps = run(SuffixDrafter(), prompt, params, 8)
    assert tokens_of(steps) == tokens_of(run(NoDrafter(), prompt, params, 0))


def test_an_answer_given_before_takes_few_passes() -> None:
    """The copy task: it is drafted whole, a longer match at a time."""
    params = PARAMS["greedy"]
    drafter = SuffixDrafter()
    run(drafter, PROMPT, params, 24)
    again = run(drafter, PROMPT, params, 24)
    assert len(again) <= 60 / 2


def test_a_random_text_costs_few_drafted_tokens() -> None:
    """Where nothing recurs but single tokens, matches are short and so are the drafts."""
    text, drafter, drafted = Text(tiny.prompt(400, seed=3)), SuffixDrafter(), 0
    tokens = text.token_ids
    for end in range(200, 400):
        text.token_ids = tokens[:end]
        drafted += len(propose(drafter, text))
    assert drafted < 200


# Configuration


def test_keys_and_defaults() -> None:
    config = SpeculativeConfig.from_dict({"method": "suffix"})
    assert config.num_speculative_tokens == 24  # as vLLM: the depth
    drafter = create_drafter(config, None)  # type: ignore[arg-type]
    assert isinstance(drafter, SuffixDrafter)
    assert (drafter.depth, drafter.draft_length, drafter.min_score) == (24, DraftLength(1.0, 0.0, 0.1), 0.0)
    assert (drafter.pool.max_requests, drafter.pool.max_tokens) == (10_000, 200_000)
    values = {
        "suffix_decoding_max_tree_depth": 8,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 2,
        "suffix_decoding_max_spec_offset": -1.5,
        "suffix_decoding_min_token_prob": 0,
        "suffix_decoding_min_score": 1.5,
    }
    config = SpeculativeConfig.from_dict(values)
    assert (config.method, config.num_speculative_tokens) == ("suffix", 8)
    drafter = create_drafter(config, None)  # type: ignore[arg-type]
    assert isinstance(drafter, SuffixDrafter)
    assert (drafter.depth, drafter.draft_length, drafter.min_score) == (8, DraftLength(2, -1.5, 0), 1.5)
    assert drafter.pool.max_requests == 0
    with_tokens = create_drafter(SpeculativeConfig(method="suffix", suffix_decoding_corpus_tokens=9), None)  # type: ignore[arg-type]
    assert isinstance(with_tokens, SuffixDrafter) and with_tokens.pool.max_tokens == 9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tree_depth": 0}, "suffix_decoding_max_tree_depth is 0; it must be a whole number from 1 to 128"),
        ({"max_tree_depth": 2.0}, "suffix_decoding_max_tree_depth is 2.0"),
        ({"max_cached_requests": -1}, "suffix_decoding_max_cached_requests is -1"),
        ({"corpus_tokens": 0}, "suffix_decoding_corpus_tokens is 0"),
        ({"max_spec_factor": -1}, "suffix_decoding_max_spec_factor is -1; it must be a number from 0 to 128"),
        ({"max_spec_factor": "2"}, "suffix_decoding_max_spec_factor is '2'"),
        ({"max_spec_offset": float("nan")}, "suffix_decoding_max_spec_offset is nan"),
        ({"min_token_prob": 1.1}, "suffix_decoding_min_token_prob is 1.1; it must be a number from 0 to 1"),
        ({"min_score": -0.1}, "suffix_decoding_min_score is -0.1"),
        ({"max_spec_factor": 0}, "leave no match a draft"),
        ({"max_tree_depth": 2, "max_spec_offset": -2}, "leave no match a draft"),
        (
            {"max_cached_requests": 0, "corpus_tokens": 5},
            "corpus_tokens is 5 but suffix_decoding_max_cached_requests is 0",
        ),
    ],
)
def test_bad_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(PacelineError) as error:
        SpeculativeConfig.from_dict({f"suffix_decoding_{key}": value for key, value in values.items()})
    assert message in str(error.value)


def test_foreign_options_are_refused() -> None:
    for config in (
        SpeculativeConfig(method="suffix", prompt_lookup_max=3),
        SpeculativeConfig(method="suffix", model="x"),
        SpeculativeConfig(method="ngram", suffix_decoding_min_score=1),
    ):
        with pytest.raises(PacelineError, match="does not take"):
            create_drafter(config, None)  # type: ignore[arg-type]
