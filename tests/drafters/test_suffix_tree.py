"""Counts and continuations against a search through the texts themselves."""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.suffix_tree import Continuation, DraftLength, SuffixTree, Text, as_text


@dataclass
class Part:
    """What was counted of a text: its tokens from `first` on."""

    tokens: list[int]
    first: int = 0

    def enter(self, tree: SuffixTree) -> Text:
        text = as_text(self.tokens)
        for position in range(self.first, len(text)):
            tree.add(text, position)
        return text


def occurrences(parts: Sequence[Part], context: Sequence[int]) -> list[tuple[int, int]]:
    """Where a follower of `context` was counted: (part, position), in the order in which they came."""
    n = len(context)
    return [
        (number, position)
        for number, part in enumerate(parts)
        for position in range(max(part.first, n), len(part.tokens))
        if part.tokens[position - n : position] == list(context)
    ]


def favourite(parts: Sequence[Part], places: list[tuple[int, int]]) -> tuple[int, float]:
    """The most frequent follower, the latest of equals, and its share."""
    followers = [parts[number].tokens[position] for number, position in places]
    counts, latest = Counter(followers), {token: i for i, token in enumerate(followers)}
    best = max(counts, key=lambda token: (counts[token], latest[token]))
    return best, counts[best] / len(followers)


def draft(parts: Sequence[Part], context: list[int], limit: int, depth: int, least: float) -> Continuation:
    tokens: list[int] = []
    prob, score = 1.0, 0.0
    while len(tokens) < limit:
        places = occurrences(parts, (context + tokens)[-depth:])
        if len(places) == 1:
            (number, position) = places[0]
            rest = parts[number].tokens[position : position + limit - len(tokens)]
            return Continuation((*tokens, *rest), score + prob * len(rest))
        if not places:
            break
        best, share = favourite(parts, places)
        prob *= share
        if prob < least:
            break
        tokens.append(best)
        score += prob
    return Continuation(tuple(tokens), score)


def by_definition(
    parts: Sequence[Part], context: list[int], budget: int, depth: int, rule: DraftLength
) -> Continuation:
    """The best of all match lengths; of those that match at the same places the longest counts."""
    best, seen = Continuation(), set[tuple[tuple[int, int], ...]]()
    for length in range(min(depth, len(context)), 0, -1):
        places = tuple(occurrences(parts, context[-length:]))
        if not places or places in seen:
            continue
        seen.add(places)
        limit = min(budget, int(rule.factor * length + rule.offset + 1e-9))
        found = draft(parts, context[-length:], limit, depth, rule.min_token_prob)
        if found.score > best.score + 1e-9:
            best = found
    return best


depths = st.integers(1, 6)
texts = st.lists(st.integers(0, 2), max_size=14)
parts = st.builds(lambda tokens, first: Part(tokens, min(first, len(tokens))), texts, st.integers(0, 5))


def check_counts(tree: SuffixTree, counted: Sequence[Part]) -> None:
    expected: Counter[tuple[tuple[int, ...], int]] = Counter()
    for part in counted:
        for position in range(part.first, len(part.tokens)):
            for n in range(1, min(tree.depth, position) + 1):
                expected[tuple(part.tokens[position - n : position]), part.tokens[position]] += 1
    for context in {context for context, _ in expected}:
        followers = {token: expected[context, token] for token in range(4)}
        assert {token: tree.count(context, token) for token in range(4)} == followers
        assert tree.count(context) == sum(followers.values())
        assert not tree.count((*context, 3))


def check_like_new(tree: SuffixTree, counted: Sequence[Part]) -> None:
    """No more nodes than a tree that never held anything else."""
    new = SuffixTree(tree.depth)
    for part in counted:
        part.enter(new)
    assert tree.num_nodes() == new.num_nodes()


@given(depths, st.lists(parts, max_size=6), st.data())
def test_counts_are_exact_whatever_came_and_went(depth: int, coming: list[Part], data: st.DataObject) -> None:
    tree = SuffixTree(depth)
    inside: list[tuple[Part, Text]] = []
    for part in coming:
        inside.append((part, part.enter(tree)))
        for _ in range(data.draw(st.integers(0, len(inside)))):
            old, text = inside.pop(0)
            for position in range(old.first, len(text)):
                tree.remove(text, position)
        check_counts(tree, [part for part, _ in inside])
        check_like_new(tree, [part for part, _ in inside])


@settings(max_examples=200)
@given(
    depths,
    st.lists(parts, max_size=4),
    texts,
    st.integers(0, 8),
    st.builds(DraftLength, st.sampled_from([0.5, 1, 2]), st.sampled_from([-1, 0, 1.5]), st.sampled_from([0, 0.1, 0.5])),
    st.integers(0, 3),
)
def test_continuations_are_those_of_a_search(
    depth: int, coming: list[Part], context: list[int], budget: int, rule: DraftLength, gone: int
) -> None:
    """Also after the oldest texts have left: which of equal followers came last must survive that."""
    tree = SuffixTree(depth)
    entered = [(part, part.enter(tree)) for part in coming]
    for part, text in entered[:gone]:
        for position in range(part.first, len(text)):
            tree.remove(text, position)
    expected = by_definition(coming[gone:], context, budget, depth, rule)
    found = tree.continuation(as_text(context), budget, rule)
    assert found.tokens == expected.tokens
    assert found.score == pytest.approx(expected.score)


@given(st.integers(1, 24), st.lists(st.integers(0, 1), max_size=60))
def test_there_are_fewer_than_two_nodes_a_token(depth: int, tokens: list[int]) -> None:
    tree = SuffixTree(depth)
    Part(tokens).enter(tree)
    assert tree.num_nodes() <= 2 * len(tokens)


def test_a_text_that_repeats_costs_next_to_nothing() -> None:
    page = [(i * i) % 997 for i in range(400)]
    once, often = SuffixTree(24), SuffixTree(24)
    Part(page).enter(once)
    for _ in range(20):
        Part(page).enter(often)
    assert often.num_nodes() == once.num_nodes()


def test_a_text_that_left_is_not_kept_in_memory() -> None:
    """Though all its contexts stay, thanks to another text: their edges are read from that one."""
    tree, tokens = SuffixTree(4), [1, 2, 3, 1, 2, 4]
    old = Part(tokens).enter(tree)
    gone = weakref.ref(old)
    new = Part([5, *tokens]).enter(tree)
    for position in range(len(old)):
        tree.remove(old, position)
    del old
    assert gone() is None
    assert tree.count([1, 2], 4) == 1
    for position in range(len(new)):
        tree.remove(new, position)
    assert tree.num_nodes() == 0


RULE = DraftLength()


def follow(
    text: list[int], context: list[int], budget: int = 9, depth: int = 24, rule: DraftLength = RULE
) -> Continuation:
    tree = SuffixTree(depth)
    Part(text).enter(tree)
    return tree.continuation(as_text(context), budget, rule)


def test_by_hand() -> None:
    """1 2 → 3 twice and 4 once; after 1 2 3 once 5 and once 6, the later."""
    text = [1, 2, 3, 5, 1, 2, 4, 1, 2, 3, 6]
    assert follow(text, [1, 2]) == Continuation((3, 6), 2 / 3 + 1 / 3)
    assert follow(text, [1, 2], rule=DraftLength(min_token_prob=0.5)) == Continuation((3,), 2 / 3)
    assert follow(text, [1, 2], rule=DraftLength(factor=0.5)) == Continuation((3,), 2 / 3)
    assert follow(text, [1, 2], budget=1) == Continuation((3,), 2 / 3)
    assert follow(text, [1, 2], rule=DraftLength(offset=1)) == Continuation((3, 6), 1.0)  # … 6 ends the text
    assert follow(text, [9, 4]) == Continuation((1,), 1.0)
    assert follow(text, [2, 4], rule=DraftLength(offset=9)) == Continuation((1, 2, 3, 6), 4.0)
    assert follow(text, [9]) == follow(text, []) == follow([], [1]) == follow(text, [6]) == Continuation()


@pytest.mark.parametrize(
    ("followers", "best"), [([3, 4], 4), ([3, 4, 3], 3), ([3, 4, 3, 4], 4), ([3, 4, 4, 3], 3), ([3, 3, 4], 3)]
)
def test_of_equals_the_latest_wins(followers: list[int], best: int) -> None:
    text = [token for follower in followers for token in (1, follower)]
    assert follow(text, [1], budget=1).tokens == (best,)


def test_a_longer_match_wins_a_tie_and_a_better_one_wins() -> None:
    text = [7, 1, 2, 8, 5, 1, 2, 9, 6, 1, 2, 9]
    assert follow(text, [7, 1, 2], budget=1).tokens == (8,)  # once of once, against twice of thrice
    shorter = [7, 1, 2, 8, 7, 1, 2, 9, *[3, 1, 2, 4] * 8]
    assert follow(shorter, [7, 1, 2], budget=1).tokens == (4,)  # 8 of 10 against 1 of 2
