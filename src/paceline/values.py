"""Values that somebody else gave: how a message shows one, and what may be taken for a number or a list."""

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any, TypeGuard


def one_line(text: str, width: int) -> str:
    """A text without its line breaks, cut to `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def shown(value: object, width: int = 60) -> str:
    """A value as Python spells it, in one line of at most `width` characters; never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # a whole number of more digits than Python writes, or whatever an object's own repr raises
        text = f"<{type(value).__name__}>"
    return one_line(text, width)


def whole_of(text: str) -> int | None:
    """The whole number that a text of digits is; None for another text, or one of more digits than Python reads."""
    try:
        return int(text) if text.isdecimal() else None
    except ValueError:
        return None


def is_whole(value: object) -> TypeGuard[int]:
    """A whole number, as int: True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """A whole or real number that a float can hold: no infinity, no NaN, no int of 400 digits, no True."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def elements(value: object) -> tuple[Any, ...] | None:
    """What a list or its like holds, as a copy; None for all that has elements, too, but not what they seem to say."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set) or not isinstance(value, Iterable):
        return None
    try:
        return tuple(value)
    except TypeError:  # an array without dimensions
        return None
