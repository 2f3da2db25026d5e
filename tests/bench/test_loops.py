"""What counts as going round in circles."""

import random

import pytest

from paceline.bench.loops import Loop, find_loop


def noise(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(50_000) for _ in range(count)]


@pytest.mark.parametrize(
    ("tokens", "loop"),
    [
        (noise(100) + [7] * 60, Loop(100, 60, 1)),
        (noise(40) + [1, 2, 3, 4, 5] * 8, Loop(40, 40, 5)),
        ([1, 2, 3, 4, 5, 6] * 4, Loop(0, 24, 6)),
        (noise(30) + [*range(30)] * 4 + noise(30, 1), Loop(30, 120, 30)),
        (noise(20) + [8, 9] * 15 + noise(10, 1), Loop(20, 30, 2)),  # it broke out again
    ],
)
def test_loops(tokens: list[int], loop: Loop) -> None:
    assert find_loop(tokens) == loop


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [5],
        noise(200),
        [7] * 23,  # too short
        [*range(12)] * 3,  # three times is a refrain
        noise(100) + [7] * 25,  # under a quarter of the answer
        [token for i in range(30) for token in (1, 2, 100 + i)],  # lines that count upwards
    ],
)
def test_no_loops(tokens: list[int]) -> None:
    assert find_loop(tokens) is None
