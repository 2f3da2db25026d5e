"""The definitions that every report of speculation uses, worked out by hand."""

import pytest

from paceline.engine.statistics import SpeculationStatistics


def statistics_of(*passes: tuple[int, int, int]) -> SpeculationStatistics:
    statistics = SpeculationStatistics()
    for num_tokens, num_draft_tokens, num_accepted_tokens in passes:
        statistics.add(num_tokens, num_draft_tokens, num_accepted_tokens)
    return statistics


def test_three_drafted_of_which_0_1_2_and_3_are_accepted() -> None:
    statistics = statistics_of((1, 3, 0), (2, 3, 1), (3, 3, 2), (4, 3, 3))
    assert statistics.draft_acceptance_rate == 6 / 12
    assert statistics.mean_acceptance_length == 10 / 4
    assert statistics.acceptance_histogram == [1, 1, 1, 1]


def test_nothing_accepted() -> None:
    statistics = statistics_of((1, 4, 0), (1, 4, 0))
    assert (statistics.draft_acceptance_rate, statistics.mean_acceptance_length) == (0, 1)


def test_plain_decoding() -> None:
    statistics = statistics_of((1, 0, 0), (1, 0, 0))
    assert (statistics.draft_acceptance_rate, statistics.mean_acceptance_length) == (0, 1)
    assert statistics.acceptance_histogram == [2]


def test_a_run_cut_inside_a_draft() -> None:
    """Stopped at the third of six drafted tokens: what followed counts nowhere."""
    statistics = statistics_of((3, 6, 3))
    assert (statistics.num_tokens, statistics.mean_acceptance_length) == (3, 3)
    assert statistics.draft_acceptance_rate == pytest.approx(0.5)


def test_before_the_first_pass() -> None:
    statistics = statistics_of()
    assert (statistics.draft_acceptance_rate, statistics.mean_acceptance_length) == (0, 0)


def test_acceptance_by_position_of_chains() -> None:
    """Ten chains of three: four fail at once, of six one at the second token, of five two at the third."""
    statistics = SpeculationStatistics(acceptance_histogram=[4, 1, 2, 3])
    assert statistics.acceptance_by_position(3) == [0.6, 5 / 6, 0.6]
    assert SpeculationStatistics(acceptance_histogram=[5]).acceptance_by_position(2) == [0.0, 0.0]
    assert SpeculationStatistics().acceptance_by_position(2) == [0.0, 0.0]
