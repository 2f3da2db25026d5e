"""Who runs together, and in which order."""

from paceline.bench.blocks import Block, blocks, rotated
from paceline.bench.prompts import Conversation


def conversations(*categories: str) -> list[Conversation]:
    return [Conversation(f"{i}", category, ("hello",)) for i, category in enumerate(categories)]


def test_one_at_a_time_each_is_a_block() -> None:
    assert blocks(conversations("a", "b", "a"), 1) == [Block("a", (0,)), Block("a", (2,)), Block("b", (1,))]


def test_full_blocks_of_a_category_come_first_and_the_rest_is_joined() -> None:
    found = blocks(conversations(*"aaaabbbbbc"), 3)
    assert found == [Block("a", (0, 1, 2)), Block("b", (4, 5, 6)), Block(None, (3, 7, 8)), Block("c", (9,))]
    assert sorted(member for block in found for member in block.members) == list(range(10))


def test_a_block_is_never_larger_than_there_are_prompts() -> None:
    assert blocks(conversations("a", "a"), 16) == [Block("a", (0, 1))]


def test_every_arm_is_first_as_often_as_any_other() -> None:
    orders = ["".join(rotated("abc", turn)) for turn in range(6)]
    assert orders == ["abc", "bca", "cab"] * 2
