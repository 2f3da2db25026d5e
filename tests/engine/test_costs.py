"""The cost table: predictions by hand, drift, and measurement by a clock that the tests turn."""

import json
import math

import pytest
from tiny import tiny_decoder

from paceline.drafters.base import Drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.early_exit import EarlyExitDrafter
from paceline.drafters.layer_skip import LayerSkipDrafter
from paceline.engine.costs import DRIFTED, CostTable, DraftCosts, TargetCosts, interpolated, never_falling
from paceline.engine.measure import ROUNDS, Trial, assembled, measured, timed

TARGET = TargetCosts((1, 16, 32), (1.0, 2.0, 6.0), 100, (1, 16), (0.01, 0.02), 0.5)


class HandClock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("rows", "sequences", "context", "seconds"),
    [
        (1, 1, 100, 1.0),
        (16, 1, 100, 2.0),
        (24, 1, 100, 4.0),
        (64, 1, 100, 14.0),  # the last line goes on
        (16, 4, 100, 3.5),
        (16, 1, 200, 4.0),
        (1, 1, 0, 0.5),  # never below half of what a row costs
    ],
)
def test_a_prediction(rows: int, sequences: int, context: int, seconds: float) -> None:
    assert TARGET.at(rows, sequences, context) == pytest.approx(seconds)


def test_drafts_are_predicted() -> None:
    costs = DraftCosts(first=1.0, each=0.5, per_sequence=0.1, per_token_behind=0.01)
    assert costs.at([]) == costs.at([0, 0]) == 0
    assert costs.at([1]) == 1.0
    assert costs.at([3]) == 2.0
    assert costs.at([3, 2], behind=10) == pytest.approx(2.0 + 0.2 + 0.1)


def test_more_rows_never_cost_less() -> None:
    assert never_falling([1.0, 3.0, 2.0, 4.0, 1.0]) == [1.0, 2.5, 2.5, 2.5, 2.5]
    assert interpolated((1, 3), (1.0, 5.0), 2) == 3.0
    assert interpolated((4,), (1.0,), 9) == 1.0


def test_a_table_of_noisy_figures() -> None:
    table = assembled({1: 2.0, 16: 1.0, 4: 3.0}, {1: 12.0, 16: 2.0}, 2.5, 100, 200)
    assert table.rows == (1, 4, 16) and table.seconds == (2.0, 2.0, 2.0)
    assert table.slopes == pytest.approx((0.05, 0.05))
    assert table.per_sequence == pytest.approx(0.5 / 3)


def test_a_slower_machine_is_noticed() -> None:
    """Its figures are those of the machine as it is; the shape stays."""
    table = CostTable(TARGET)
    for _ in range(200):
        table.saw_pass(3.0, 1, 1, 100)
    assert table.pass_seconds(1, 1, 100) == pytest.approx(3.0, rel=0.02)
    assert table.pass_seconds(16, 1, 100) == pytest.approx(6.0, rel=0.05)
    again = CostTable.from_json(table.to_json())
    assert again.pass_seconds(1, 1, 100) == pytest.approx(3.0, rel=0.02)
    assert abs(table._speed.log_ratio) < DRIFTED  # the table itself was scaled


def test_one_slow_step_says_little() -> None:
    table = CostTable(TARGET)
    for seconds in (1.0, 1.0, 1.0, 1.0, 50.0):
        table.saw_pass(seconds, 1, 1, 100)
    assert table.pass_seconds(1, 1, 100) < 1.1


def test_steps_that_are_unlike_the_others_have_a_correction_of_their_own() -> None:
    """Rows cost more than was measured: where it is seen, that is believed."""
    table = CostTable(TARGET)
    for _ in range(50):
        table.saw_pass(1.0, 1, 1, 100)
        table.saw_pass(3.0, 16, 1, 100)
    assert table.pass_seconds(1, 1, 100) == pytest.approx(1.0, rel=0.1)
    assert table.pass_seconds(16, 1, 100) == pytest.approx(3.0, rel=0.1)


def test_what_has_not_been_seen_for_long_is_slower_on_a_slower_machine() -> None:
    """Twice the time of drafting steps is no reason to think that plain ones are as fast as ever."""
    table = CostTable(TARGET)
    for seconds in [1.0] * 5:
        table.saw_pass(seconds, 1, 1, 100)
    for seconds in [3.0] * 40 + [6.0] * 20:
        table.saw_pass(seconds, 16, 1, 100)
    assert table.pass_seconds(16, 1, 100) == pytest.approx(6.0, rel=0.1)
    assert table.pass_seconds(1, 1, 100) == pytest.approx(2.0, rel=0.1)


def test_drafts_follow_the_machine_though_the_kinds_of_steps_took_that_for_their_own() -> None:
    """A first step as fast as was measured, and all others twice as fast: then drafts are, too."""
    table = CostTable(TARGET, {"draft": DraftCosts(1.0, 1.0)})
    for _ in range(30):
        for rows, seconds in ((1, 1.0), (2, 1.0), (8, 1.0)):
            table.saw_pass(seconds if table._num_steps < 3 else seconds / 2, rows, 1, 100)
    assert table.pass_seconds(1, 1, 100) == pytest.approx(0.5, rel=0.05)
    assert table.draft_costs("draft").first == pytest.approx(0.5, rel=0.1)


def test_one_slow_draft_is_half_believed() -> None:
    """Its weights may have been far away, or its processor somewhere else."""
    table = CostTable(TARGET, {"draft": DraftCosts(1.0, 1.0)})
    table.saw_draft("draft", 4.0, [1], 0)
    assert table.draft_costs("draft").first == pytest.approx(2.0)
    for _ in range(40):
        table.saw_draft("draft", 4.0, [1], 0)
    assert table.draft_costs("draft").first == pytest.approx(4.0, rel=0.05)


def test_a_method_that_was_never_measured_is_learnt() -> None:
    table = CostTable(TARGET)
    table.saw_draft("strange", 2.0, [4], 0)
    assert table.draft_costs("strange").at([2]) == pytest.approx(1.0)
    for _ in range(100):
        table.saw_draft("strange", 4.0, [4], 0)
    assert table.draft_costs("strange").at([2]) == pytest.approx(2.0, rel=0.05)


def test_it_survives_being_written() -> None:
    table = CostTable(TARGET, {"draft_model": DraftCosts(1, 2, 3, 4)}, 0.25)
    again = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again.target == TARGET and again.drafts == table.drafts and again.per_token == 0.25


@pytest.mark.parametrize("figure", [-1.0, math.nan, math.inf])
def test_figures_that_cannot_be_are_refused(figure: float) -> None:
    for seconds in ((figure,), (1.0, figure)):
        with pytest.raises(ValueError):
            TargetCosts((1, 2)[: len(seconds)], seconds)
    with pytest.raises(ValueError):
        DraftCosts(1.0, figure)


def test_predicted_speedup_by_hand() -> None:
    """2211.17192, theorem 3.8, where rows are free: (1 − α^(γ+1)) / ((1 − α)(γc + 1))."""
    table = CostTable(TargetCosts((1, 64), (1.0, 1.0)), {"it": DraftCosts(0.1, 0.1)})
    assert table.speedup("it", [0.8] * 5) == pytest.approx((1 - 0.8**6) / (0.2 * 1.5))
    assert table.speedup("free", [0.8] * 5) == pytest.approx((1 - 0.8**6) / 0.2)
    assert table.speedup("it", []) == 1


def test_trials_take_turns_until_the_time_is_out() -> None:
    clock, order = HandClock(), []

    def taking(name: str, seconds: float):  # type: ignore[no-untyped-def]
        def run() -> None:
            order.append(name)
            clock.now += seconds

        return run

    found = timed({"a": Trial(taking("a", 1.0), needed=True), "b": Trial(taking("b", 2.0))}, 100, clock)
    assert order == ["a", "b"] * ROUNDS and found == {"a": 1.0, "b": 2.0}
    order.clear()
    found = timed({"a": Trial(taking("a", 5.0), True), "b": Trial(taking("b", 5.0)), "c": Trial(taking("c", 1), True)},
                  4, clock)  # fmt: skip
    assert order == ["a", "c"] and found == {"a": 5.0, "c": 1.0}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_measuring_disturbs_nobody(name: str) -> None:
    """Whatever the clock says there is a table, of methods of every kind too, and nothing stays with a drafter."""
    target = tiny_decoder(name)
    draft = DraftModelDrafter(tiny_decoder(name, seed=1))
    drafters: dict[str, Drafter] = {
        "draft_model": draft,
        "early_exit": EarlyExitDrafter(target, 1),
        "layer_skip": LayerSkipDrafter(target, [1], [1]),
    }
    table = measured(target, drafters, seconds=0.0).costs
    assert table.drafts.keys() == drafters.keys()
    assert table.pass_seconds(7, 3, 200) > 0
    assert draft.pool.blocks_in_use == 0 and not draft._states


def test_a_model_with_little_room_can_be_measured() -> None:
    table = measured(tiny_decoder("mistral", max_position_embeddings=8), {}, seconds=0.0).costs
    assert table.pass_seconds(1) > 0


@pytest.mark.parametrize(("share", "calm"), [(1.0, True), (0.92, True), (0.85, False)])
def test_a_busy_machine_is_noticed(share: float, calm: bool) -> None:
    """By the time that the measuring thread, which never waits, was kept from the processor."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    assert measured(tiny_decoder("llama"), {}, 50, clock, lambda: share * now[0]).calm is calm


def test_defaults_of_auto() -> None:
    """Every member may draft further than alone: how far is for the policy to say."""
    config = SpeculativeConfig.from_dict({"method": "auto", "methods": ["ngram", "draft_model", "lookahead"]})
    assert config.methods is not None
    assert [member.num_speculative_tokens for member in config.methods] == [24, 8, 31]
    assert config.num_speculative_tokens == 31
