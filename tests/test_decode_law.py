"""What `decode` samples has exactly the target's law, whatever is drafted and whichever lossless rule verifies it.

Chi-square of the joint law of the first three tokens against its enumeration. Seeds are fixed, so a verdict is final;
with other seeds, all cases together would raise a false alarm once in 10⁴ suites (Bonferroni). `make verify-matrix`
runs the same cases, and longer drafts, with 10⁵ draws each.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from law import CAUGHT, LENGTH, Case, faults, p_value, probabilities, quick_tally, tally, tally_noise
from law_cases import CONTROLS, FILTERED_CASES, PLAIN_CASES, TARGET, TINY_CASE, VOCAB, WIDE_CASE, WIDE_CONTROL
from scipy.stats import kstest

from paceline.core.rng import CounterNoise
from paceline.decode import decode

FEWER = ("coupled, sampled siblings", "standard, fixed chain", "standard, fixed siblings")  # kin of the others
DRAWS = [
    *((case, 3_000 if case.name in FEWER else 20_000) for case in PLAIN_CASES),
    *((case, 1_000) for case in FILTERED_CASES),
]
TINY_DRAWS, CONTROL_DRAWS = 3_000, 1_000
FALSE_ALARM = 1e-4 / (len(DRAWS) + 2)
WIDE_SEEDS = range(300, 310)  # two of them bring a hash that rounds to 1 in float32, at the first token


def name(value: Case | int) -> str:
    return value.name if isinstance(value, Case) else f"{value} draws"


@pytest.mark.parametrize(("case", "draws"), DRAWS, ids=name)
def test_decode_has_the_targets_law(case: Case, draws: int) -> None:
    counted = quick_tally(case, case.seeds(0, draws))
    assert counted.draws == draws
    assert not faults(counted, case.law, FALSE_ALARM)


@pytest.mark.parametrize("case", FILTERED_CASES, ids=name)
def test_a_filter_leaves_less_to_draw(case: Case) -> None:
    """So that drafts which the target forbids do occur: without this the filtered cases would show little."""
    assert len(case.law) < VOCAB**LENGTH / 2


def test_a_real_decoder_has_the_law_of_its_own_logits() -> None:
    counted = tally(TINY_CASE, TINY_CASE.seeds(0, TINY_DRAWS))
    assert not faults(counted, TINY_CASE.law, FALSE_ALARM)


@pytest.mark.parametrize("case", CONTROLS, ids=name)
def test_a_planted_fault_is_caught(case: Case) -> None:
    counted = quick_tally(case, case.seeds(0, CONTROL_DRAWS))
    assert counted.draws == CONTROL_DRAWS
    assert p_value(counted.counts, case.law) < CAUGHT


def test_noise_in_float32_is_caught_and_ours_is_not() -> None:
    """Ten draws tell: an infinite variate brings a token of probability 10⁻²⁷."""
    assert not faults(tally(WIDE_CASE, WIDE_SEEDS), WIDE_CASE.law, FALSE_ALARM)
    assert p_value(tally(WIDE_CONTROL, WIDE_SEEDS).counts, WIDE_CONTROL.law) < CAUGHT


# The instrument itself


@pytest.mark.parametrize("case", [*PLAIN_CASES, *FILTERED_CASES], ids=name)
def test_short_cuts_change_no_draw(case: Case) -> None:
    seeds = case.seeds(7, 30)
    assert quick_tally(case, seeds, at_once=20) == tally(case, seeds)


def test_looked_up_noise_is_the_noise() -> None:
    for seeds in (range(50), [2**53 - 1, 2**63, 2**64 - 1]):
        for (seed, position), row in tally_noise(seeds, 5).items():
            assert torch.equal(row, CounterNoise(seed, 0, position).exponentials(torch.arange(5)))


def test_a_seed_that_is_given_is_as_good_as_one_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tally` hands out seeds through `draw_seed`: the request's own seed leads to the same tokens."""
    case = PLAIN_CASES[1]
    for seed in range(20):
        given = decode(
            case.target().decoder, case.prompt, replace(case.params, seed=seed), case.drafter(), 6, rule=case.rule
        )
        tokens = tuple(token for step in given for token in step.token_ids)[:LENGTH]
        assert tally(case, [seed]).counts == {tokens: 1}


def test_probabilities_by_hand() -> None:
    """e^0 : e^−1 : e^−2 = .665 : .245 : .090; at half the temperature .867 : .117 : .016."""
    row = [-1.0, 0.0, -2.0]
    assert probabilities(row, 1.0, 1.0) == pytest.approx([0.24473, 0.66524, 0.09003], abs=1e-5)
    assert probabilities(row, 0.5, 1.0) == pytest.approx([0.11731, 0.86681, 0.01588], abs=1e-5)
    assert probabilities(row, 1.0, 0.7) == pytest.approx([0.26894, 0.73106, 0], abs=1e-5)
    assert probabilities(row, 1.0, 0.6) == [0, 1, 0]


def test_the_law_is_the_product_along_each_path() -> None:
    case = PLAIN_CASES[0]
    assert sum(case.law.values()) == pytest.approx(1)
    by_hand = 1.0
    for context, token in (((2,), 3), ((2, 3), 0), ((2, 3, 0), 1)):
        by_hand *= float(torch.softmax(TARGET.logits(context).double(), 0)[token])
    assert case.law[3, 0, 1] == pytest.approx(by_hand)


def test_p_values_are_uniform_under_the_law() -> None:
    """300 samples of 2,000 straight from the law: a Kolmogorov-Smirnov test that fails once in 10⁴ by chance."""
    law, source = PLAIN_CASES[0].law, random.Random(1)
    cells, weights = list(law), list(law.values())
    assert min(weights) * 2000 < 5, "some cells are too small for a chi-square"
    values = [p_value(Counter(source.choices(cells, weights, k=2000)), law) for _ in range(300)]
    assert kstest(values, "uniform").pvalue > 1e-4


def test_an_impossible_draw_and_too_many_rare_ones_are_seen() -> None:
    law = {(0,): 0.5, (1,): 0.4995, (2,): 0.0005}
    usual = Counter({(0,): 500, (1,): 500})
    assert p_value(usual, law) > 0.5
    assert p_value(usual + Counter({(2,): 20}), law) < 1e-15
    assert p_value(usual + Counter({(3,): 1}), law) == 0
