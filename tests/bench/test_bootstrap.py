"""Ratios and their intervals, against cases worked out by hand."""

import pytest

from paceline.bench.bootstrap import Paired, ratio


def test_two_samples() -> None:
    """Of the four ways to draw two, one has the slow prompt twice (1), one the fast one (3), two have both (2)."""
    found = ratio([Paired(10, 10.0, 10, 10.0), Paired(30, 10.0, 10, 10.0)])
    assert found is not None
    assert (found.point, found.low, found.high, found.samples) == (2, 1, 3, 2)


def test_one_in_ten() -> None:
    """Nine prompts at plain decoding's speed, one 11 times as fast: drawn k times of ten, it makes the ratio 1 + k.

    k is binomial (10, 0.1): P(k = 0) = 0.349, P(k ≤ 2) = 0.930, P(k ≤ 3) = 0.987, so the interval is 1 to 4. The seed
    is fixed; among seeds, more than six standard deviations lie between 0.987 and 0.975.
    """
    samples = [Paired(20, 2.0, 20, 2.0)] * 9 + [Paired(220, 2.0, 20, 2.0)]
    for seed in range(5):
        found = ratio(samples, seed)
        assert found is not None
        assert found.point == pytest.approx(2) and found.low == pytest.approx(1) and found.high == pytest.approx(4)


def test_it_is_total_tokens_over_total_time() -> None:
    """Not the mean of the prompts' own ratios, 2 and 0.5."""
    found = ratio([Paired(10, 1.0, 10, 2.0), Paired(10, 6.0, 10, 3.0)])
    assert found is not None and found.point == pytest.approx((20 / 7) / (20 / 5))


def test_pairs_stay_together() -> None:
    """Prompts of very different length, each exactly 1.5 times as fast: there is nothing to be unsure of."""
    found = ratio([Paired(n, n / 3, n, n / 2) for n in (1, 10, 100, 1000)])
    assert found is not None
    assert found.low == pytest.approx(1.5) and found.high == pytest.approx(1.5)


def test_where_there_is_no_interval_or_no_ratio() -> None:
    one = ratio([Paired(10, 1.0, 10, 2.0)])
    assert one is not None and one.point == pytest.approx(2) and one.low is None and one.high is None
    assert ratio([]) is None
    assert ratio([Paired(0, 1.0, 10, 1.0)]) is None
    # drawn alone, a prompt without an answer has no speed: such draws are left out
    some = ratio([Paired(0, 0.0, 0, 0.0), Paired(10, 1.0, 10, 2.0)])
    assert some is not None and some.low == some.high == pytest.approx(2)
