"""How sure a ratio is: a percentile bootstrap over prompts (Efron, 1979)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Paired:
    """What an arm and plain decoding took for the same prompts: tokens, and seconds."""

    tokens: int
    seconds: float
    plain_tokens: int
    plain_seconds: float

    @classmethod
    def total(cls, parts: Sequence["Paired"]) -> "Paired":
        return cls(
            sum(p.tokens for p in parts),
            sum(p.seconds for p in parts),
            sum(p.plain_tokens for p in parts),
            sum(p.plain_seconds for p in parts),
        )


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of tokens per second, an arm's to plain decoding's; the interval is None where there is but one sample."""

    point: float
    low: float | None
    high: float | None
    samples: int


def ratio(samples: Sequence[Paired], seed: int = 0) -> Ratio | None:
    """Total tokens over total time, and its 95 % interval over resampled prompts; pairs stay together.

    None where there is nothing to divide.
    """
    table = np.array([(s.tokens, s.seconds, s.plain_tokens, s.plain_seconds) for s in samples], dtype=np.float64)
    table = table.reshape(-1, 4)  # [B, 4]
    if not (table.sum(axis=0) > 0).all():
        return None
    point = float(_quotient(table.sum(axis=0)))
    count = len(table)
    if count < 2:
        return Ratio(point, None, None, count)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)  # [R, B]
    sums = draws @ table  # [R, 4]
    ratios = _quotient(sums[(sums > 0).all(axis=1)].T)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, (tail, 1 - tail))
    return Ratio(point, float(low), float(high), count)


def _quotient(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """sums: [4] or [4, R]."""
    tokens, seconds, plain_tokens, plain_seconds = sums
    return np.asarray((tokens / seconds) / (plain_tokens / plain_seconds))
