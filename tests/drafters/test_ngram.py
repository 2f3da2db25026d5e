"""Prompt lookup: the longest suffix, then its most recent occurrence, then what is there."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.base import Features
from paceline.drafters.ngram import NgramDrafter


@dataclass
class Text:
    token_ids: list[int]
    request_id: int = 0
    draft_sampler: None = None
    _: dict[str, int] = field(default_factory=dict)


def lookup(tokens: list[int], budget: int, shortest: int = 1, longest: int = 4) -> list[int]:
    (proposal,) = NgramDrafter(shortest, longest).propose([Text(tokens)], [budget])  # type: ignore[list-item]
    assert proposal.is_chain and proposal.draft_probs is None
    return list(proposal.tokens)


@pytest.mark.parametrize(
    ("tokens", "budget", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),  # the 2-gram 1 2
        ([1, 2, 7, 1, 2, 8, 5, 1, 2], 2, [8, 5]),  # the most recent of two
        ([4, 1, 2, 7, 6, 1, 2, 8, 4, 1, 2], 2, [7, 6]),  # a longer match beats a more recent one
        ([5, 6], 4, []),
        ([5], 4, []),
        ([5, 5], 4, [5]),
        ([5] * 30, 4, [5]),  # the latest earlier match has one token behind it
        ([1, 2, 3, 1], 9, [2, 3, 1]),  # no more than what exists
        ([1, 2, 3, 1], 0, []),
    ],
)
def test_lookup(tokens: list[int], budget: int, expected: list[int]) -> None:
    assert lookup(tokens, budget) == expected


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_prompts_no_longer_than_the_ngram(length: int) -> None:
    assert lookup(list(range(length)), 5, shortest=2, longest=4) == []


def test_a_shorter_match_than_the_shortest_does_not_count() -> None:
    assert lookup([1, 9, 1], 3, shortest=2) == []
    assert lookup([1, 9, 1], 3, shortest=1) == [9, 1]


def by_definition(tokens: list[int], budget: int, shortest: int, longest: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n <= len(tokens) and tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + budget]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 6), st.integers(1, 3), st.integers(0, 3))
def test_the_index_equals_a_search(tokens: list[int], budget: int, shortest: int, more: int) -> None:
    """Also when the text grows by runs of any length between look-ups."""
    drafter = NgramDrafter(shortest, shortest + more)
    for end in (*range(1, len(tokens), 3), len(tokens)):
        (proposal,) = drafter.propose([Text(tokens[:end])], [budget])  # type: ignore[list-item]
        assert list(proposal.tokens) == by_definition(tokens[:end], budget, shortest, shortest + more)


def test_requests_do_not_see_one_another_and_leave_nothing() -> None:
    drafter = NgramDrafter(1, 3)
    secret, other = Text([1, 2, 3, 1], request_id=1), Text([9, 1], request_id=2)
    proposals = drafter.propose([secret, other], [3, 3])  # type: ignore[list-item]
    assert [list(p.tokens) for p in proposals] == [[2, 3, 1], []]
    drafter.observe(other, [9], Features())  # type: ignore[arg-type]
    for text in (secret, other):
        drafter.release(text)  # type: ignore[arg-type]
    assert not drafter._indexes


def test_a_history_that_was_cut_is_indexed_anew() -> None:
    """An edited or shortened history must leave no candidate behind that is not in it."""
    drafter = NgramDrafter(1, 3)
    drafter.propose([Text([1, 2, 3, 4, 1])], [3])  # type: ignore[list-item]
    shorter = Text([1, 7, 1])
    drafter.restore(shorter, None, 2)  # type: ignore[arg-type]
    (proposal,) = drafter.propose([shorter], [3])  # type: ignore[list-item]
    assert list(proposal.tokens) == [7, 1]
