"""The plan is what trying everything finds."""

from collections.abc import Callable, Sequence
from itertools import accumulate, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.costs import DraftCosts, interpolated
from paceline.engine.plan import MARGIN, NOTHING, Option, Pick, Plan, best_plan

rates = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4)
chances = rates.map(lambda own: [*accumulate(own, lambda x, y: x * y)])
pass_costs = st.lists(st.floats(0.0, 0.6), min_size=16, max_size=16).map(lambda steps: [*accumulate([1.0, *steps])])
drafting = st.builds(
    lambda first, each, share: DraftCosts(first, each, share * min(first, each)),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)


def between(costs: Sequence[float]) -> Callable[[float], float]:
    """Costs of whole numbers of rows, and of what lies between."""
    return lambda rows: interpolated(range(len(costs)), costs, rows)


def seconds_of(options: Sequence[Option], counts: Sequence[int], costs: Sequence[float]) -> float:
    """One method's drafts of so many tokens for each sequence."""
    taking_part = [(option, count) for option, count in zip(options, counts, strict=True) if count]
    draft = 0.0
    if taking_part and (own := taking_part[0][0].drafting) is not None:
        draft = own.at([count for _, count in taking_part])
    return costs[sum(counts)] + draft + sum(option.behind_s for option, _ in taking_part)


def best_rate(options: Sequence[Option], costs: Sequence[float], others: int) -> float:
    """Of all numbers of tokens for each."""
    best = 0.0
    for counts in product(*(range(len(option.chances) + 1) for option in options)):
        expected = sum(sum(option.chances[:count]) for option, count in zip(options, counts, strict=True))
        tokens = len(options) + others + expected
        best = max(best, tokens / seconds_of(options, counts, costs))
    return best


def check(plan: Plan, best: float, costs: Sequence[float], count: int, others: int) -> None:
    plain = (count + others) / costs[0]
    if best > plain * (1 + MARGIN) * (1 + 1e-9):
        assert plan.rate == pytest.approx(best, rel=1e-9)
    if best < plain * (1 + MARGIN):
        assert plan.picks == (NOTHING,) * count and plan.rate == pytest.approx(plain)


@settings(max_examples=80, deadline=None)
@given(st.lists(chances, min_size=1, max_size=3), pass_costs, st.one_of(st.none(), drafting), st.integers(0, 2))
def test_several_sequences_with_one_method(
    each: list[list[float]], costs: list[float], drafts: DraftCosts | None, others: int
) -> None:
    options = [Option("a", own, drafts) for own in each]
    plan = best_plan([[option] for option in options], between(costs), others)
    check(plan, best_rate(options, costs, others), costs, len(each), others)
    assert plan.seconds == pytest.approx(seconds_of(options, [pick.count for pick in plan.picks], costs))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(chances, st.one_of(st.none(), drafting), st.floats(0, 0.5)), min_size=2, max_size=3),
       pass_costs, st.integers(0, 2))  # fmt: skip
def test_one_sequence_with_several_methods(
    ways: list[tuple[list[float], DraftCosts | None, float]], costs: list[float], others: int
) -> None:
    options = [Option(str(i), own, drafts, behind if drafts else 0.0) for i, (own, drafts, behind) in enumerate(ways)]
    plan = best_plan([options], between(costs), others)
    check(plan, max(best_rate([option], costs, others) for option in options), costs, 1, others)


def test_rows_that_cost_as_much_as_a_pass_are_not_drafted() -> None:
    plan = best_plan([[Option("a", [0.9, 0.8, 0.7])]] * 4, lambda rows: 1.0 + rows / 4)
    assert plan.picks == (NOTHING,) * 4


def test_a_dip_is_looked_across() -> None:
    """The pass's cost jumps after two rows and is flat from there on."""
    plan = best_plan([[Option("a", [0.9] * 8)]], lambda rows: 1.0 if rows <= 1 else 2.0)
    assert plan.picks[0].count == 8
    plan = best_plan([[Option("a", [0.9, 0.3, 0.1])]], lambda rows: 1.0 if rows <= 1 else 2.0)
    assert plan.picks[0].count == 1


def test_who_gains_most_gets_the_rows() -> None:
    """Four rows are free."""
    sure, unsure = Option("a", [0.9, 0.8, 0.7, 0.6]), Option("a", [0.5, 0.2])
    plan = best_plan([[unsure], [sure]], lambda rows: 1.0 if rows <= 4 else 9.0)
    assert [pick.count for pick in plan.picks] == [0, 4]


def test_a_round_is_shared() -> None:
    """A draft model's pass, too dear for any one of four sequences and worth it for all of them."""
    option = Option("a", [0.6], DraftCosts(0.5, 0.5))
    assert best_plan([[option]] * 4, lambda rows: 1.0).picks == (Pick(option, 1),) * 4
    assert best_plan([[option], [], [], []], lambda rows: 1.0).picks == (NOTHING,) * 4


@settings(max_examples=80, deadline=None)
@given(chances, st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4), drafting, st.booleans())
def test_a_draft_that_ends_early_costs_what_it_drafts(
    right: list[float], lengths: list[float], drafts: DraftCosts, ahead: bool
) -> None:
    """Every length that it may have, by its chance: rows and rounds are paid for as they come about."""
    drawn = [*accumulate(lengths, lambda x, y: x * y)][: len(right)]
    paid = [1.0, *drawn[:-1]] if ahead else drawn
    option = Option("a", right, drafts, 0.1, drawn, paid)
    flat = [1.0 + 0.1 * rows for rows in range(17)]  # a straight line: what is expected of rows is what they cost
    best = 0.0
    for count in range(len(right) + 1):
        ends = [*drawn[:count], 0.0]
        starts = [1.0, *drawn[:count]]
        seconds = 0.0
        for length, chance in enumerate(start - end for start, end in zip(starts, ends, strict=True)):
            rounds = min(length + ahead, count)
            draft = (drafts.at([rounds]) + 0.1) if count else 0.0
            seconds += chance * (flat[length] + draft)
        best = max(best, (1 + sum(right[:count])) / seconds)
    check(best_plan([[option]], between(flat)), best, flat, 1, 0)


def test_sequences_that_end_early_share_a_round_less_often() -> None:
    """Of two, each in half of the steps: the round is run in three of four, and for both in one of four."""
    option = Option("a", [0.5], DraftCosts(0.4, 0.4, 0.1), 0.0, [0.5], [0.5])
    assert option.seconds(0, 2) == pytest.approx(0.75 * 0.4 + 0.25 * 0.1)
    assert option.seconds(0) + option.seconds(0, idle=0.5) == pytest.approx(option.seconds(0, 2))
    plan = best_plan([[option]] * 2, lambda rows: 1.0)
    assert plan.seconds == pytest.approx(1.0 + option.seconds(0, 2))
