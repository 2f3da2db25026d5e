"""From measurements to rows, against figures worked out by hand."""

import json
from typing import Any

import pytest

from paceline.bench.answers import Answer, Measured, StepCosts
from paceline.bench.clock import drafts_of_depth
from paceline.bench.prompts import Conversation
from paceline.bench.report import tables
from paceline.bench.run import Unit
from paceline.bench.specs import PLAIN
from paceline.bench.summary import differences, summarise
from paceline.engine.statistics import SpeculationStatistics

CONVERSATIONS = [Conversation(f"{i}", category, ("x",)) for i, category in enumerate(["chat", "chat", "code", "code"])]


def answer(
    tokens: list[int], seconds: float, first: float = 0.5, passes: list[tuple[int, int, int]] | None = None
) -> Answer:
    """passes: tokens, drafted, accepted of each; plain decoding's unless given."""
    statistics = SpeculationStatistics()
    for one in passes or [(1, 0, 0)] * len(tokens):
        statistics.add(*one)
    depths = drafts_of_depth([(tuple(range(-1, n - 1)), n) for _, n, _ in passes or () if n])
    return Answer(tuple(tokens), seconds, first, 1, "", 0, statistics, depths)


def measured(*answers: Answer, seconds: float | None = None, costs: StepCosts | None = None) -> Measured:
    whole = max(each.seconds for each in answers) if seconds is None else seconds
    return Measured(answers, whole, costs or StepCosts(0.0, 3.0, 1.0, 4), 1000)


def unit(members: tuple[int, ...], *, block: int = 0, turn: int = 0, **arms: Measured) -> Unit:
    categories = {CONVERSATIONS[member].category for member in members}
    category = categories.pop() if len(categories) == 1 else None
    return Unit(len(members), block, category, members, turn, arms)


def row(rows: list[dict[str, Any]], category: str, arm: str) -> dict[str, Any]:
    (found,) = [each for each in rows if (each["category"], each["arm"]) == (category, arm)]
    return found


def test_a_row_by_hand() -> None:
    tokens = list(range(9))
    fast = answer(tokens, 2.5, 0.5, [(1, 2, 0), (3, 2, 2), (2, 2, 1), (3, 3, 2)])
    units = [unit((0,), plain=measured(answer(tokens, 4.5)), fast=measured(fast, costs=StepCosts(1.0, 2.0, 1.0, 4)))]
    rows = summarise(units, CONVERSATIONS, ["plain", "fast"])
    assert [(each["category"], each["arm"]) for each in rows] == [
        ("chat", "plain"), ("chat", "fast"), ("all", "plain"), ("all", "fast"),
    ]  # fmt: skip
    found = row(rows, "chat", "fast")
    assert found["tokens"] == 9 and found["tokens_per_second"] == pytest.approx(3.6)
    assert found["ratio"]["point"] == pytest.approx(4.5 / 2.5) and found["ratio"]["low"] is None
    assert found["decode_ratio"]["point"] == pytest.approx((8 / 2.0) / (8 / 4.0))
    assert found["acceptance"] == {
        "length": 9 / 4,
        "rate": 5 / 9,
        "drafted": 9,
        "accepted": 5,
        "by_position": [3 / 4, 2 / 4, 0 / 1],  # a third token was drafted once
        "histogram": [1, 1, 2],
    }
    assert found["time_share"] == {"draft": 0.25, "target": 0.5, "overhead": 0.25}
    assert found["target_passes"] == 4
    assert found["first_token_s"] == {"mean": 0.5, "median": 0.5, "most": 0.5}
    assert found["token_s"]["mean"] == pytest.approx(2.0 / 8)
    assert found["peak_memory_bytes"] == 1000 and found["differing"] == 0
    plain = row(rows, "chat", PLAIN)
    assert plain["ratio"]["point"] == 1 and plain["acceptance"]["length"] == 1 and plain["acceptance"]["rate"] is None


def test_turns_of_a_conversation_are_one_sample_and_all_time_counts() -> None:
    units = []
    for block, seconds in enumerate((1.0, 3.0)):
        for turn in (0, 1):
            plain, fast = measured(answer([1, 2], 4.0)), measured(answer([1, 2], seconds))
            units.append(unit((block,), block=block, turn=turn, plain=plain, fast=fast))
    found = row(summarise(units, CONVERSATIONS, ["plain", "fast"]), "chat", "fast")["ratio"]
    assert found["samples"] == 2
    assert found["point"] == pytest.approx(16 / 8)
    assert (found["low"], found["high"]) == (pytest.approx(8 / 6), pytest.approx(8 / 2))


def test_loops_are_told_apart_by_plain_decodings_answers() -> None:
    straight, circle = list(range(40)), [3] * 40
    units = [
        unit((0,), block=0, plain=measured(answer(straight, 4.0)), fast=measured(answer(straight, 2.0))),
        unit((1,), block=1, plain=measured(answer(circle, 4.0)), fast=measured(answer(circle, 0.5))),
    ]
    rows = summarise(units, CONVERSATIONS, ["plain", "fast"])
    for category in ("chat", "all"):
        found = row(rows, category, "fast")
        assert found["answers"] == 1 and found["ratio"]["point"] == pytest.approx(2)
    assert row(rows, "looping", "fast")["ratio"]["point"] == pytest.approx(8)


def test_blocks_of_several_categories_have_a_decoding_speed_alone() -> None:
    straight, circle = list(range(40)), [3] * 40
    plain = measured(answer(straight, 4.5), answer(circle, 4.5), answer(straight, 8.5))
    fast = measured(answer(straight, 2.5), answer(circle, 1.0), answer(straight, 8.5))
    rows = summarise([unit((0, 1, 2), plain=plain, fast=fast)], CONVERSATIONS, ["plain", "fast"])
    chat, code = row(rows, "chat", "fast"), row(rows, "code", "fast")
    assert chat["ratio"] is code["ratio"] is chat["time_share"] is None and chat["units"] == 0
    assert chat["answers"] == code["answers"] == 1
    assert chat["decode_ratio"]["point"] == pytest.approx(2) and code["decode_ratio"]["point"] == pytest.approx(1)
    assert row(rows, "all", "fast")["ratio"]["point"] == pytest.approx(1)  # a third of its tokens go in circles
    assert row(rows, "looping", "fast")["ratio"] is None


def test_an_engine_that_tells_little_has_gaps_and_no_inventions() -> None:
    quiet = Measured((Answer((1, 2, 3), 2.0, None),), 2.0)
    units = [unit((0,), plain=measured(answer([1, 2, 4], 4.0)), peer=quiet)]
    rows = summarise(units, CONVERSATIONS, ["plain", "peer"])
    found = row(rows, "all", "peer")
    assert found["ratio"]["point"] == pytest.approx(2)
    for gap in ("decode_ratio", "acceptance", "time_share", "target_passes", "first_token_s", "token_s"):
        assert found[gap] is None
    assert found["differing"] == 1


def test_differences_say_where() -> None:
    plain = measured(answer([1, 2, 3], 1.0), answer([1, 2], 1.0))
    other = measured(answer([1, 5, 3], 1.0), answer([1, 2, 9], 1.0))
    found = differences([unit((0, 1), plain=plain, other=other)], CONVERSATIONS)
    assert [(d["arm"], d["conversation"], d["position"], d["token"], d["plain_token"]) for d in found] == [
        ("other", "0", 1, 5, 2),
        ("other", "1", 2, 9, None),
    ]


def test_depths_of_trees_and_scratch_nodes() -> None:
    assert drafts_of_depth([((-1, 0, 1), 3), ((-1, -1, 0), 3), ((-1, 0, 1), 1)]) == (3, 2, 1)
    assert drafts_of_depth([]) == ()


def test_the_table_shows_every_arm_and_gaps_as_dashes() -> None:
    quiet = Measured((Answer((1, 2, 3), 2.0, None),), 2.0)
    units = [unit((0,), plain=measured(answer([1, 2, 3], 4.0)), peer=quiet)]
    rows = summarise(units, CONVERSATIONS, ["plain", "peer"])
    lines = list(tables(rows))
    assert lines[1] == "chat · concurrency 1 · 1 answer"
    assert [line.split()[0] for line in lines[2:5]] == ["arm", "plain", "peer"]
    assert lines[4].split()[1:5] == ["1.5", "2.000", "-", "-"]
    assert len({len(line) for line in lines[2:5]}) == 1
    json.dumps(rows, allow_nan=False)
