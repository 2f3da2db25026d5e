"""In which order prompts and arms take their turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.bench.prompts import Conversation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Block:
    """Conversations that run at the same time, by number; `category` is None where they are of several."""

    category: str | None
    members: tuple[int, ...]


def blocks(conversations: Sequence[Conversation], concurrency: int) -> list[Block]:
    """Full blocks of `concurrency` conversations of one category; what is left over is joined across categories.

    So a block is as full as asked for, except the very last.
    """
    by_category: dict[str, list[int]] = {}
    for number, conversation in enumerate(conversations):
        by_category.setdefault(conversation.category, []).append(number)
    pure: list[Block] = []
    rest: list[int] = []
    for category, members in by_category.items():
        full = len(members) // concurrency * concurrency
        pure += [Block(category, tuple(members[i : i + concurrency])) for i in range(0, full, concurrency)]
        rest += members[full:]
    mixed = [tuple(rest[i : i + concurrency]) for i in range(0, len(rest), concurrency)]
    return pure + [Block(_common(members, conversations), members) for members in mixed]


def _common(members: Sequence[int], conversations: Sequence[Conversation]) -> str | None:
    found = {conversations[member].category for member in members}
    return found.pop() if len(found) == 1 else None


def rotated(arms: Sequence[T], turn: int) -> list[T]:
    """The arms in the order of this turn: each is first as often as any other."""
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]
