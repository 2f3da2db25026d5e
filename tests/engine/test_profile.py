"""The profile: found again on the same machine, and as good as none if anything is wrong with it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_decoder

from paceline.drafters.auto import AutoDrafter
from paceline.drafters.composite import Member
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.ngram import NgramDrafter
from paceline.engine.acceptance import FULL_LENGTH, MOST_KEPT, PositionRates
from paceline.engine.costs import CostTable, DraftCosts, TargetCosts
from paceline.engine.measure import Measurement
from paceline.engine.methods import auto_policy
from paceline.engine.policy import AutoPolicy
from paceline.engine.profile import Profile, ProfileStore
from paceline.models.load import load_model
from paceline.ops.native import library


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileStore:
    monkeypatch.setattr("paceline.engine.profile.home", lambda: tmp_path)
    return ProfileStore.of(tiny_decoder("llama"), "suffix")


def some_profile() -> Profile:
    acceptance = PositionRates()
    for _ in range(100):
        acceptance.add(1, ("suffix", 2), 3, True)
    lengths = PositionRates(FULL_LENGTH)
    lengths.add(1, ("m", 0), 1, True)
    costs = CostTable(TargetCosts((1, 16), (1.0, 2.0)), {"m": DraftCosts(0.5, 0.25)}, 0.1)
    return Profile(costs, acceptance, lengths)


def test_it_is_found_again(store: ProfileStore) -> None:
    assert store.load() is None
    store.save(some_profile())
    again = ProfileStore.of(tiny_decoder("llama"), "suffix").load()
    assert again is not None and again.costs == some_profile().costs
    assert again.acceptance.chances(7, ("suffix", 2), 3)[2] > 0.8
    assert again.acceptance.chances(7, ("suffix", 2), 4)[3] < 0.2
    assert again.lengths.chances(7, ("m", 0), 3) == some_profile().lengths.chances(7, ("m", 0), 3)
    assert again.lengths.chances(7, ("other", 0), 3) == [1.0, 1.0, 1.0]
    assert max(again.acceptance._pooled["suffix", 2].tried) <= MOST_KEPT


def test_another_machine_or_other_drafters_have_their_own(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(some_profile())
    assert ProfileStore.of(tiny_decoder("llama"), "draft_model").load() is None
    assert ProfileStore.of(tiny_decoder("qwen3"), "suffix").load() is None
    monkeypatch.setattr("paceline.engine.profile.device_name", lambda device: "another")
    assert ProfileStore.of(tiny_decoder("llama"), "suffix").load() is None


@pytest.mark.skipif(library.level() is None, reason="no native operators")
def test_one_model_in_several_precisions_has_several(tiny_llama_dir: Path) -> None:
    """Their shapes and torch's dtype are the same."""
    decoders = [load_model(str(tiny_llama_dir), dtype=dtype).decoder for dtype in ("bf16", "int8", "int4")]
    assert len({ProfileStore.of(decoder, "eagle3").path for decoder in decoders}) == 3


def test_a_file_that_was_copied_is_foreign(store: ProfileStore) -> None:
    store.save(some_profile())
    value = json.loads(store.path.read_text())
    value["facts"]["device"] = "another"
    store.path.write_text(json.dumps(value))
    assert store.load() is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace('"seconds"', '"secs"'),
        lambda text: text.replace("2.0", "-2.0", 1),
        lambda text: text.replace("2.0", "NaN", 1),
        lambda text: text.replace("2.0", '"two"', 1),
        lambda text: text.replace('"right"', '"left"'),
        lambda text: text.replace('"per_token": 0.1', '"per_token": null'),
        lambda text: text.replace('"acceptance": [', '"acceptance": [3, '),
    ],
)
def test_a_damaged_file_is_none(store: ProfileStore, damage) -> None:  # type: ignore[no-untyped-def]
    store.save(some_profile())
    text = store.path.read_text()
    damaged = damage(text)
    assert damaged != text
    store.path.write_text(damaged)
    assert store.load() is None
    store.save(some_profile())
    assert store.load() is not None


def test_a_disk_that_takes_nothing_is_no_error(store: ProfileStore) -> None:
    store.path.parent.parent.mkdir(exist_ok=True)
    store.path.parent.write_text("a file where the folder should be")
    store.save(some_profile())
    assert store.load() is None


def test_rates_by_hand() -> None:
    """What is known of all counts as ten trials of a request; a class of drafts has rates of its own."""
    acceptance = PositionRates()
    kind = ("m", 0)
    assert acceptance.chances(1, kind, 2) == pytest.approx([0.6, 0.36])  # the first guess
    acceptance.add(1, kind, 1, False)  # one token, right
    pooled = (1 + 4 * 0.6) / 5
    own = (1 + 10 * pooled) / 11
    assert acceptance.chances(1, kind, 1) == pytest.approx([own])
    assert acceptance.chances(2, kind, 1) == pytest.approx([pooled])
    assert acceptance.chances(1, ("m", 3), 1) == pytest.approx([0.5])
    acceptance.forget(1)
    assert acceptance.chances(1, kind, 1) == pytest.approx([pooled])


def test_chances_follow_what_is_seen_now() -> None:
    acceptance = PositionRates()
    for _ in range(50):
        acceptance.add(1, ("m", 0), 0, True)
    assert acceptance.chances(1, ("m", 0), 4) == [] or acceptance.chances(1, ("m", 0), 4)[0] < 0.05
    for _ in range(20):
        acceptance.add(1, ("m", 0), 4, False)
    assert acceptance.chances(1, ("m", 0), 4)[3] > 0.5


def test_a_busy_machines_figures_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used, and the next start measures again; a calm one's are kept as measured, whatever they drifted to."""
    monkeypatch.setattr("paceline.engine.profile.home", lambda: tmp_path)
    target: Any = SimpleNamespace(decoder=tiny_decoder("llama"))
    calm, asked = [False, True], []

    def measuring(*arguments: object, **options: object) -> Measurement:
        asked.append(calm[len(asked)])
        return Measurement(CostTable(TargetCosts((1, 16), (1.0 + len(asked), 9.0))), asked[-1])

    monkeypatch.setattr("paceline.engine.methods.measured", measuring)

    def policy() -> AutoPolicy:
        drafter = AutoDrafter([Member(NgramDrafter(1, 3), 4)])
        return auto_policy(drafter, target, SpeculativeConfig("auto"))

    assert policy().costs.target.seconds[0] == 2.0
    assert not list(tmp_path.rglob("*.json"))
    used = policy()
    assert asked == [False, True] and used.costs.target.seconds[0] == 3.0
    for _ in range(100):
        used.costs.saw_pass(60.0, 1, 1, 0)
    used.acceptance.add(1, ("ngram", 2), 3, True)
    assert used.costs.target.seconds[0] > 50
    used.save(Profile(used.costs, used.acceptance, used.lengths))
    again = policy()
    assert len(asked) == 2 and again.costs.target.seconds[0] == 3.0
    assert again.acceptance.chances(5, ("ngram", 2), 1) == used.acceptance.chances(5, ("ngram", 2), 1)
