"""How a user's value is shown, and what passes for a number or a list."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import PacelineError
from paceline.values import elements, is_finite, is_whole, shown, whole_of

LONG = 10**5000  # Python writes no number of more than 4300 digits


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_any_value_is_one_short_line() -> None:
    assert shown(3) == "3"
    assert shown("a\nb") == r"'a\nb'"
    assert shown(LONG) == "<int>" and shown([LONG]) == "<list>"
    assert shown(Unspeakable()) == "<Unspeakable>"
    assert shown(torch.zeros(2, 2)) == "tensor([[0., 0.], [0., 0.]])"
    assert shown("x" * 100) == "'" + "x" * 58 + "…"


@pytest.mark.parametrize("value", [np.zeros((50, 50)), torch.zeros(50, 50), "\n\r\x85\u2028" * 99, [[1] * 9] * 9])
def test_no_line_is_long(value: object) -> None:
    line = shown(value)
    assert len(line.splitlines()) == 1 and len(line) <= 60


def test_an_error_is_one_line_whoever_worded_it() -> None:
    assert str(PacelineError("torch says\n  a\r\n  b")) == "torch says   a   b"


def test_numbers() -> None:
    for number in (0, -3, 10**300, 2.5, np.float64(2)):
        assert is_finite(number)
    nothing: tuple[Any, ...] = (10**400, LONG, float("inf"), float("nan"), True, "1", None, 1j, np.zeros(2))
    assert not any(is_finite(value) for value in nothing)
    assert is_whole(LONG) and not is_whole(True) and not is_whole(1.0)


def test_whole_numbers_as_text() -> None:
    assert whole_of("12") == 12
    assert [whole_of(text) for text in ("", "-1", "1.0", "x", "9" * 5000)] == [None] * 5


def test_lists() -> None:
    def counting() -> Iterator[int]:
        yield from (1, 2)

    for value in ([1, 2], (1, 2), range(1, 3), counting(), np.array([1, 2])):
        assert elements(value) == (1, 2)
    nothing: tuple[Any, ...] = ("ab", b"ab", bytearray(2), memoryview(b"ab"), {1: 2}, {1, 2}, frozenset(), 3, None)
    assert [elements(value) for value in (*nothing, np.array(3), torch.tensor(3))] == [None] * 11
