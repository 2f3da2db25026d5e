"""Noise as a function of (seed, choice, position, token), and the explicit sources of chance.

Seeds are fixed, so the statistical tests pass or fail once and for all; as designed each had a false-alarm
rate of 1e-4 (the p-value bound), the whole file one of about 2e-3.
"""

import math

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from paceline.core.history import History
from paceline.core.params import SamplingParams
from paceline.core.rng import (
    CounterNoise,
    GeneratorDraws,
    draw_seed,
    exponential,
    race,
    stream_key,
    token_hash,
    without_replacement,
)
from paceline.core.sampling import token_support

LAW = torch.tensor([0.30, 0.25, 0.2, 0.1, 0.08, 0.05, 0.015, 0.005], dtype=torch.float64)
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
# computed with Python integers
PINNED = [3436578783, 3571148534, 3821701062]
INVERSE = pow(GOLDEN, -1, 1 << 64)


def winners(keys: list[int]) -> torch.Tensor:
    """Race winners [S] for many stream keys at once: hash(key, id) = hash(0, id + key / golden)."""
    starts = [(key * INVERSE) & MASK for key in keys]
    starts = torch.tensor([s - (1 << 64) if s >> 63 else s for s in starts])  # [S]
    ids = starts[:, None] + torch.arange(len(LAW))  # [S, V]
    times = exponential(token_hash(0, ids.flatten())).view(ids.shape) / LAW
    return times.argmin(1)


def fits(drawn: torch.Tensor) -> float:
    counts = torch.bincount(drawn, minlength=len(LAW))
    return chisquare(counts.numpy(), (LAW / LAW.sum() * len(drawn)).numpy()).pvalue


def independent(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.clamp(max=4), b.clamp(max=4)  # rare tokens together, so that no cell is nearly empty
    table = torch.bincount(a * 5 + b, minlength=25).view(5, 5)
    return chi2_contingency(table.numpy()).pvalue


def test_hash_is_splitmix64():
    """Published outputs of SplitMix64 seeded with 1234567; we keep the upper 32 bits."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert token_hash(1234567, torch.arange(1, 5)).tolist() == [value >> 32 for value in published]


def test_noise_is_pinned():
    """A change here changes every seeded output anywhere."""
    assert stream_key(0, 0, 0) == 0x79933B9DF3D7C2C7
    noise = CounterNoise(seed=42, choice=1, position=7)
    assert token_hash(stream_key(42, 1, 7), torch.arange(3)).tolist() == PINNED
    assert torch.equal(noise.exponentials(torch.arange(3)), exponential(torch.tensor(PINNED)))


def test_hash_depends_on_the_token_id_alone_not_on_its_neighbours():
    key = stream_key(3, 0, 5)
    whole = token_hash(key, torch.arange(1000))
    some = torch.tensor([999, 0, 512])
    assert torch.equal(token_hash(key, some), whole[some])
    assert whole.min() >= 0 and whole.max() < 2**32


def test_hash_leaves_its_input_alone():
    ids = torch.arange(10)
    token_hash(5, ids)
    assert torch.equal(ids, torch.arange(10))


def test_exponential_at_both_ends():
    ends = exponential(torch.tensor([0, 2**32 - 1]))
    assert ends.dtype == torch.float64
    assert ends[0].item() == pytest.approx(2.0**-33, rel=1e-9)  # -log(1 - x) ≈ x
    assert ends[1].item() == pytest.approx(33 * math.log(2), rel=1e-15)


def test_float32_would_have_been_infinite():
    """Why float64: in float32 the largest hashes round to a uniform of 1."""
    h = torch.tensor([2**32 - 1]).float()
    assert torch.isinf(-torch.log1p(-((h + 0.5) * 2.0**-32)))


def test_law_over_consecutive_seeds():
    drawn = winners([stream_key(seed, 0, 0) for seed in range(100_000)])
    assert fits(drawn) > 1e-4
    for seed in (0, 1, 77, 99_999):  # the shortcut above draws what the shipped race draws
        assert CounterNoise(seed).race(LAW) == drawn[seed]


def test_law_over_consecutive_positions():
    assert fits(winners([stream_key(5, 0, position) for position in range(100_000)])) > 1e-4


def test_law_over_choices():
    assert fits(winners([stream_key(5, choice, 0) for choice in range(20_000)])) > 1e-4


@pytest.mark.parametrize(
    "other",
    [(0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 0, -1), (1, -1, 0), (0, 1, -1)],
    ids=[
        "next position",
        "next seed",
        "next choice",
        "seed+1 position-1",
        "seed+1 choice-1",
        "choice+1 position-1",
    ],
)
def test_neighbours_are_independent(other):
    here = [(seed, 1, 1 + position) for seed in range(200) for position in range(100)]
    there = [tuple(a + b for a, b in zip(key, other, strict=True)) for key in here]
    a, b = (winners([stream_key(*key) for key in keys]) for keys in (here, there))
    assert independent(a, b) > 1e-4


def test_equal_streams_are_noticed():
    """Control of the test above."""
    drawn = winners([stream_key(seed, 0, 0) for seed in range(20_000)])
    assert independent(drawn, drawn) < 1e-100


def test_every_bit_is_fair():
    hashes = token_hash(stream_key(9, 0, 0), torch.arange(100_000))
    ones = torch.stack([((hashes >> bit) & 1).sum() for bit in range(32)])
    assert ((ones - 50_000).abs() < 5 * math.sqrt(25_000)).all()  # 5 sigma each: 2e-5 for all 32


def test_race_breaks_ties_downwards_and_never_picks_zero_weight():
    ones = torch.ones(4, dtype=torch.float64)
    assert race(ones, ones) == 0
    assert race(torch.tensor([0.0, 0.0, 1e-300, 0.0], dtype=torch.float64), ones) == 2
    weights = torch.tensor([0.0, 1.0, 0.0, 1e-9], dtype=torch.float64)
    assert {CounterNoise(seed).race(weights) for seed in range(500)} <= {1, 3}


def test_race_of_one_hot_is_that_token():
    weights = torch.zeros(50, dtype=torch.float64)
    weights[17] = 1
    assert {CounterNoise(seed).race(weights) for seed in range(50)} == {17}


def test_race_needs_no_normalisation():
    """Powers of two leave the order of the ratios as it is, bit for bit."""
    for seed in range(200):
        noise = CounterNoise(seed)
        assert noise.race(LAW) == noise.race(LAW * 1024) == noise.race(LAW / 1024)


def test_race_top_starts_with_the_winner_and_has_no_duplicates():
    for seed in range(300):
        noise = CounterNoise(seed)
        top = noise.race_top(LAW, 3)
        assert top[0] == noise.race(LAW)
        assert len(set(top)) == 3
        assert noise.race_top(LAW, 8)[:3] == top


def test_race_top_is_sampling_without_replacement():
    second = [CounterNoise(seed).race_top(LAW, 2)[1] for seed in range(3000)]
    p = LAW / LAW.sum()
    law = [sum(float(p[a] * p[b] / (1 - p[a])) for a in range(8) if a != b) for b in range(8)]
    counts = torch.bincount(torch.tensor(second), minlength=8)
    merged = [*counts[:6].tolist(), counts[6:].sum().item()]
    assert chisquare(merged, [x * 3000 for x in [*law[:6], sum(law[6:])]]).pvalue > 1e-4


def test_race_top_stops_at_the_support():
    assert sorted(CounterNoise(1).race_top(torch.tensor([0.0, 2.0, 0.0, 1.0]).double(), 4)) == [1, 3]


def test_ahead_moves_the_position_only():
    assert CounterNoise(3, 2, 10).ahead(4) == CounterNoise(3, 2, 14)
    assert CounterNoise(3).ahead(0) == CounterNoise(3)


def test_extreme_seeds_work_and_differ():
    seeds = [0, 1, 2**32, 2**53, 2**63, 2**64 - 1]
    assert len({tuple(CounterNoise(seed).exponentials(torch.arange(4)).tolist()) for seed in seeds}) == 6


def test_drawn_seeds_differ_and_survive_json():
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100 and max(seeds) < 2**53


class FixedRandom:
    """Stands in for random.Random."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize("value", [0.0, 1 - 2**-53])
def test_certain_and_impossible_stay_so_at_the_ends_of_the_draw(value):
    draws = GeneratorDraws(0)
    draws._random = FixedRandom(value)
    assert draws.accept(1) and draws.accept(torch.tensor(1.0)) and draws.accept(1.5)
    assert not draws.accept(0) and not draws.accept(torch.tensor(0.0))
    assert draws.choose(torch.tensor([0.0, 0.0, 3.0, 0.0])) == 2
    assert draws.choose(torch.tensor([0.0, 1e-300, 0.0], dtype=torch.float64)) == 1
    assert draws.choose(torch.tensor([0.0, 0.1, 0.2, 0.0])) == (1 if value == 0 else 2)


def test_choose_follows_the_weights():
    draws = GeneratorDraws(1)
    counts = torch.bincount(torch.tensor([draws.choose(LAW * 7) for _ in range(20_000)]), minlength=8)
    assert chisquare(counts.numpy(), (LAW / LAW.sum() * 20_000).numpy()).pvalue > 1e-4


def test_streams_repeat_by_seed_and_differ_by_choice_and_purpose():
    def numbers(*key):
        draws = GeneratorDraws(*key)
        return [draws._random.random() for _ in range(3)]

    assert numbers(1, 0, "verify") == numbers(1, 0, "verify")
    streams = [
        numbers(1, 0, "verify"),
        numbers(2, 0, "verify"),
        numbers(1, 1, "verify"),
        numbers(1, 0, "draft"),
    ]
    assert len({tuple(stream) for stream in streams}) == 4


def test_without_replacement_exhausts_the_support_and_keeps_its_input():
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0])
    assert sorted(without_replacement(weights, 4, GeneratorDraws(0))) == [1, 2]
    assert weights.tolist() == [0, 1, 2, 0]


def test_a_large_vocabulary_wins_nothing_at_zero_weight_and_stays_finite():
    """152k tokens, thousands of draws of the largest variate included: no infinity, no NaN."""
    weights = torch.rand(151_936, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights[::2] = 0
    for seed in range(20):
        noise = CounterNoise(seed)
        assert noise.race(weights) % 2 == 1
        assert torch.isfinite(noise.exponentials(torch.arange(151_936))).all()


# The race over a whole vocabulary: bounds instead of noise for all but a few


@pytest.mark.parametrize("vocab_size", [4096, 5000, 151_936])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 60.0])
def test_the_bounded_race_has_the_winner_of_the_whole_one(vocab_size: int, spread: float) -> None:
    for seed in range(40 if vocab_size < 10_000 else 8):
        generator = torch.Generator().manual_seed(seed)
        logits = spread * torch.randn(vocab_size, generator=generator, dtype=torch.float64)
        weights = (logits - logits.max()).exp()
        weights[torch.rand(vocab_size, generator=generator) < 0.1] = 0
        noise = CounterNoise(seed, 1, 7)
        everyone = noise.exponentials(torch.arange(vocab_size))
        assert noise.race(weights) == int((everyone / weights).argmin())


def test_the_bounded_race_takes_the_lowest_of_equals_and_stands_extreme_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.core import rng

    for fill, special in ((2**31, 5), (2**32 - 1, 2**32 - 1), (0, 0), (2**32 - 1, 0)):
        hashes = torch.full((8192,), fill, dtype=torch.int64)
        hashes[[700, 6000]] = special
        with monkeypatch.context() as patch:
            patch.setattr(rng, "_mixed", lambda z, scratch, hashes=hashes: hashes)
            expected = int(rng.exponential(hashes).argmin())
            assert CounterNoise(1).race(torch.ones(8192, dtype=torch.float64)) == expected


@pytest.mark.parametrize("temperature", [1e-30, 1e-44, 1e-46, 1e-300])
def test_a_temperature_next_to_nothing_is_greedy_over_a_wide_vocabulary_too(temperature: float) -> None:
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    support = token_support(logits, SamplingParams(temperature=temperature), History((1,)))
    assert CounterNoise(3).race(support) == int(logits.argmax())
