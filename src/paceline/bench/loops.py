"""Does an answer go round in circles? Greedy decoding of small models often does, and a drafter then looks brilliant.

An answer loops if a stretch of it repeats itself exactly, at least four times in a row, over at least 24 tokens and a
quarter of the answer. Near-repetitions, such as lines that count upwards, do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

REPEATS = 4
LEAST_TOKENS = 24
LEAST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Loop:
    """The stretch [start, start + length) of an answer has this period."""

    start: int
    length: int
    period: int


def find_loop(token_ids: Sequence[int]) -> Loop | None:
    """The longest stretch that makes the answer a looping one; of equally long ones that of the shortest period."""
    tokens = np.asarray(token_ids, dtype=np.int64)
    count = len(tokens)
    best: Loop | None = None
    for period in range(1, count // REPEATS + 1):
        start, run = _longest_run(tokens[period:] == tokens[:-period])
        length = run + period  # token start + i equals token start + i + period
        long_enough = length >= max(REPEATS * period, LEAST_TOKENS, LEAST_SHARE * count)
        if long_enough and (best is None or length > best.length):
            best = Loop(start, length, period)
    return best


def _longest_run(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    if not len(edges):
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])
