"""Randomness as a function of where it is used, and the explicit sources that the other rules draw from.

`coupled` verification needs the *same* noise for draft and target. It is not drawn from a stream, whose state
would depend on how much was drafted, but computed: hash(seed, choice, position, token id) -> 32 bits ->
Exp(1) variate. The winner of the race min E/p̃ has law p (exponential form of the Gumbel-max trick,
argmax log p + g with g = -log E); the race needs no normalisation.
"""

import random
import secrets
import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from paceline.core.rows import WIDE, ScannedRow, top_ids
from paceline.core.support import AnySupport, Support

_MASK = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood 2014): increment and the two multipliers of its finaliser.
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def draw_seed() -> int:
    """A fresh seed for a request that came without one. 53 bits survive a trip through JSON."""
    return secrets.randbits(53)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def stream_key(seed: int, choice: int, position: int) -> int:
    """64 well-mixed bits for one generated token: each part passes the mixer before the next joins."""
    key = 0
    for part in (seed, choice, position):
        key = _mix(key ^ _mix((part + _GOLDEN) & _MASK))
    return key


def token_hash(key: int, token_ids: Tensor) -> Tensor:
    """32-bit hashes [M] (as int64) of the tokens under a key: SplitMix64 of key + id·golden, its upper half.

    int64 arithmetic wraps modulo 2⁶⁴ on every device, so CPU and CUDA agree on every bit.
    """
    z = (token_ids * _signed(_GOLDEN)).add_(_signed(key))
    return _mixed(z, torch.empty_like(z))


def _mixed(z: Tensor, scratch: Tensor) -> Tensor:
    """SplitMix64's finaliser, upper half: `z` [M] is overwritten, the result lies in `scratch` [M]."""
    for shift, multiplier in ((30, _MIX1), (27, _MIX2)):
        z ^= _shifted(z, shift, scratch)
        z *= _signed(multiplier)
    z ^= _shifted(z, 31, scratch)
    return _shifted(z, 32, scratch)


def _shifted(z: Tensor, bits: int, out: Tensor) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes it a logical shift
    return torch.bitwise_right_shift(z, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def exponential(hashes: Tensor) -> Tensor:
    """Exp(1) variates [M] in float64 from 32-bit hashes, finite and positive for every hash.

    E = -log1p(-(h + ½)·2⁻³²) runs from 1.2e-10 to 22.9. In float32 (h + ½)·2⁻³² rounds to 1 for the largest
    hashes and E is infinite: about once in 110 draws at a vocabulary of 152k.
    """
    return _uniform(hashes.double()).neg_().log1p_().neg_()


def _uniform(hashes: Tensor) -> Tensor:
    """x = (h + ½)·2⁻³² in place, exact in float64."""
    return hashes.add_(0.5).mul_(2.0**-32)


class _Workspace:
    """Buffers for a race over a whole vocabulary: fresh megabytes cost more in page faults than in arithmetic."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.products = torch.arange(vocab_size, device=device) * _signed(_GOLDEN)  # of every id
            self.mixed, self.shifted = torch.empty_like(self.products), torch.empty_like(self.products)
            self.bounds = {
                dtype: torch.empty(vocab_size, dtype=dtype, device=device) for dtype in (torch.float32, torch.float64)
            }


class _Workspaces(threading.local):
    """Each thread has its own."""

    def __init__(self) -> None:
        self.space = lru_cache(maxsize=4)(_Workspace)


_work = _Workspaces()


def race(weights: Tensor, exponentials: Tensor) -> int:
    """Index of the smallest E/p̃ [M], ties to the lowest; a zero weight never wins. Law: weights / total."""
    return int((exponentials / weights).argmin())


@dataclass(frozen=True, slots=True)
class Finish:
    """The first finishers of a race, and the log of each one's share of all runners' speeds p̃/E."""

    tokens: tuple[int, ...]
    log_shares: tuple[float, ...]


class Noise(Protocol):
    """Noise for one generated token, and for those after it."""

    def ahead(self, steps: int) -> Self:
        """The noise of the token that comes `steps` later."""

    def race(self, weights: Tensor | AnySupport) -> int:
        """The token drawn from unnormalised `weights` ([V], or of the possible tokens) with this noise."""

    def race_top(self, weights: Tensor, k: int) -> list[int]:
        """The first k finishers, top k of log p + g: draws without replacement. Fewer if fewer can win."""

    def finish(self, weights: Tensor, k: int) -> Finish:
        """`race_top` with log softmax(log p + g) of each."""


@dataclass(frozen=True, slots=True)
class CounterNoise:
    """Noise computed from (seed, choice of `n`, position of the generated token, token id)."""

    seed: int
    choice: int = 0
    position: int = 0

    def ahead(self, steps: int) -> Self:
        return replace(self, position=self.position + steps)

    def exponentials(self, token_ids: Tensor) -> Tensor:
        """Exp(1) variates [M] of the given tokens."""
        return exponential(token_hash(stream_key(self.seed, self.choice, self.position), token_ids))

    def race(self, weights: Tensor | AnySupport) -> int:
        support = Support.of(weights)
        if support.ids is None and len(coarse := support.coarse()) >= WIDE:
            return self._race_of_all(support, coarse)
        runners, their_weights = _runners(support.weights) if support.ids is None else (support.ids, support.weights)
        if len(runners) == 1:
            return int(runners)
        return int(runners[race(their_weights, self.exponentials(runners))])

    def _race_of_all(self, support: AnySupport, coarse: Tensor) -> int:
        """The same winner, with E and w worked out exactly for a few only.

        E = −log1p(−x) ≥ x, so no speed w/E is above w/x. The speed of the runner with the highest bound is known then;
        whoever's bound lies below it has lost. (1e-4 is far more than coarse weights and rounding move a bound.)
        """
        work = _work.space(len(coarse), coarse.device)
        key = _signed(stream_key(self.seed, self.choice, self.position))
        hashes = _mixed(torch.add(work.products, key, out=work.mixed), work.shifted)
        uniform = _uniform(work.bounds[coarse.dtype].copy_(hashes))
        bounds = ScannedRow.of(torch.div(coarse, uniform, out=uniform))  # [V]
        pilot = bounds.first_largest()
        speed = float((support.at(pilot) / exponential(hashes[pilot])).item())
        runners = bounds.at_least(speed * (1 - 1e-4))
        return int(runners[race(support.at(runners), exponential(hashes[runners]))])

    def race_top(self, weights: Tensor, k: int) -> list[int]:
        runners, their_weights = _runners(weights)
        times = self.exponentials(runners) / their_weights
        finishers: list[int] = runners[top_ids(-times, k)].tolist()
        return finishers

    def finish(self, weights: Tensor, k: int) -> Finish:
        runners, their_weights = _runners(weights)
        times = self.exponentials(runners) / their_weights
        first = top_ids(-times, k)
        shares = -times[first].log() - times.reciprocal().cumsum(0)[-1].log()
        return Finish(tuple(runners[first].tolist()), tuple(shares.tolist()))


def _runners(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [M], ascending, that can win, and their weights: hashing is the dear part, and top-k leaves few."""
    runners = weights.nonzero().flatten()
    if len(runners) == len(weights):
        return runners, weights
    return runners, weights[runners]


class Draws(Protocol):
    """Chance for the rules that accept and reject, one question at a time, so that tests can enumerate it."""

    def accept(self, probability: Any) -> bool:
        """True with the given probability: never at 0, always at 1 and above."""

    def choose(self, weights: Any) -> int:
        """An index with probability proportional to its weight (unnormalised, [V])."""


class GeneratorDraws:
    """Draws from a generator of its own, one for each request, choice and stream (verification, drafts)."""

    def __init__(self, seed: int, choice: int = 0, stream: str = "verify") -> None:
        self._random = random.Random(f"paceline {stream} {seed} {choice}")

    def accept(self, probability: Any) -> bool:
        # random() lies in [0, 1): strictly below keeps 0 impossible (a draw may be exactly 0) and 1 certain
        return self._random.random() < float(probability)

    def choose(self, weights: Tensor) -> int:
        cumulative = weights.double().cumsum(0)  # [V]
        threshold = self._random.random() * cumulative[-1]
        chosen = int(torch.searchsorted(cumulative, threshold, right=True))
        if chosen == len(weights):  # the product rounded up to the total
            chosen = int(weights.nonzero()[-1])
        return chosen


@dataclass(frozen=True, slots=True)
class Randomness:
    """All the chance that verification may use: noise of the next token on, and draws."""

    noise: Noise
    draws: Draws


def without_replacement(weights: Any, k: int, draws: Draws) -> list[int]:
    """Up to k distinct indices, each drawn from what the earlier ones left; stops when nothing is left."""
    chosen: list[int] = []
    while len(chosen) < k and (weights > 0).any():
        chosen.append(draws.choose(weights))
        weights = weights * 1  # a copy, for torch and numpy alike
        weights[chosen[-1]] = 0
    return chosen
