"""`bench/acceptance.py`: what its counts mean, that a batch changes none of them, and that a run takes up the last."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import acceptance
import pytest
from acceptance_cells import Answer, Cell, copying, measure, repetition
from acceptance_prompts import CHAT, COPYING, TEMPLATES
from acceptance_tables import (
    PLAIN,
    Arm,
    best_skips,
    copies,
    key,
    parted_rows,
    repeats,
    report,
    row,
    table_rows,
    tables,
    verdict,
)

from paceline.cli.layer_skip_search import Skips, Trial
from paceline.core.params import SamplingParams
from paceline.decode import decode
from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.models.load import LoadedModel, load_model


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3], 0.0),
        ([1, 2, 3, 4], 0.0),
        (list(range(20)), 0.0),
        ([7] * 11, 7 / 8),  # eight 4-grams, all alike
        ([1, 2, 3, 4, 5, 1, 2, 3, 4, 6], 1 / 7),
        ([1, 2, 3, 4] * 3, 5 / 9),
    ],
)
def test_repetition_by_hand(tokens: list[int], expected: float) -> None:
    assert repetition(tokens) == pytest.approx(expected)


def test_copying_by_hand() -> None:
    assert copying([1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert copying([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]) == copying([1, 2, 3], [1, 2, 3]) == 0


def test_there_are_prompts_enough_and_none_twice() -> None:
    tuning = (Path(acceptance.__file__).parent / "tuning_prompts.txt").read_text().splitlines()
    everything = [*CHAT, *COPYING, *TEMPLATES, *tuning]
    assert len(set(everything)) == len(everything)
    assert min(len(CHAT), len(COPYING), len(TEMPLATES)) >= 20


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(str(tiny_llama_dir), dtype="fp32")


@pytest.mark.parametrize(
    "config",
    [
        {"method": "early_exit", "early_exit_layer": 2, "draft_confidence_threshold": 0.0},
        {"method": "lookahead"},
        {"method": "ngram"},
    ],
    ids=lambda config: config["method"],
)
def test_a_batch_counts_what_single_requests_do(model: LoadedModel, config: dict[str, Any]) -> None:
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9] * 150, [1, 2]]
    cell, plain = (measure(model, "a", prompts, own, 40) for own in (config, PLAIN))
    own = SpeculativeConfig.from_dict(config)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for prompt, answer, alone in zip(prompts, cell.answers, plain.answers, strict=True):
        steps = list(decode(model.decoder, prompt, params, create_drafter(own, model), own.num_speculative_tokens))
        assert (answer.passes, answer.tokens) == (len(steps), 40)
        assert answer.drafted == sum(step.num_draft_tokens for step in steps)
        assert answer.accepted == sum(step.num_accepted_tokens for step in steps)
        assert answer.digest == alone.digest and alone.passes == 40
    assert 0 < cell.draft_seconds < cell.seconds


def test_a_failing_drafter_is_no_result(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are decoded plainly: the counts would look like drafts that are never right."""
    monkeypatch.setattr("paceline.drafters.ngram.NgramDrafter.propose", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match=r"'ngram'.* failed on 2 requests"):
        measure(model, "a", [[1, 2, 3], [4, 5]], {"method": "ngram"}, 8)


# Tables


def answer(passes: int, repeats: float = 0.0, digest: str = "d", copied: float = 0.0) -> Answer:
    return Answer(12, passes, 4 * passes, 12 - passes, digest, repeats, copied)


def cell(name: str, config: dict[str, Any], *answers: Answer) -> Cell:
    return Cell(name, config, 4, answers, seconds=8.0, draft_seconds=2.0)


def test_a_row_by_hand() -> None:
    answers, plain = [answer(3), answer(6)], [answer(12), answer(12)]
    line = row("it", answers, plain, [cell("a", PLAIN)])
    assert line == {
        "arm": "it",
        "prompts": 2,
        "passes": 9,
        "of_plain": 9 / 24,
        "acceptance_length": 24 / 9,
        "acceptance_rate": 15 / 36,
        "drafted_a_pass": 4.0,
        "draft_share": 0.25,
        "identical": True,
    }
    assert not row("it", [answer(3), answer(6, digest="other")], plain)["identical"]


def test_answers_that_repeat_themselves_are_told_from_the_others() -> None:
    """By plain decoding's own output, over both sets."""
    arm = Arm("lookahead", {"method": "lookahead"}, ("chat", "templates"))
    cells = {
        key("chat", PLAIN): cell("chat", PLAIN, answer(12, 0.5), answer(12, 0.49)),
        key("templates", PLAIN): cell("templates", PLAIN, answer(12, 0.9)),
        key("chat", arm.config): cell("chat", arm.config, answer(4), answer(11)),
        key("templates", arm.config): cell("templates", arm.config, answer(2)),
    }
    groups = parted_rows([arm], cells, "repeating", "others", repeats)
    assert [(line["prompts"], line["passes"]) for line in groups["repeating"] + groups["others"]] == [(2, 6), (1, 11)]
    del cells[key("templates", arm.config)]
    assert parted_rows([arm], cells, "repeating", "others", repeats) == {"repeating": [], "others": []}
    assert table_rows([arm], cells) == []


def test_prompts_that_are_copied_from_are_told_from_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """By plain decoding's own output, beside the table of all."""
    arm = Arm("ngram", {"method": "ngram"}, ("copying",))
    cells = {
        key("copying", PLAIN): cell("copying", PLAIN, answer(12, copied=0.5), answer(12, copied=0.49)),
        key("copying", arm.config): cell("copying", arm.config, answer(3), answer(9)),
    }
    results = report({"copying": [arm]}, cells)
    assert {name: [line["of_plain"] for line in rows] for name, rows in results.items()} == {
        "copying": [0.5],
        "copied": [0.25],
        "not_copied": [0.75],
    }
    out = capsys.readouterr().out
    assert "really copied from (half of the answer's 4-grams stand in the prompt): 1 prompts" in out
    assert copies(answer(1, copied=1.0)) and not copies(answer(1))


def test_what_is_missing_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert not verdict({"layer_skip": []}, ["the best set is left out"])
    assert "NOT COMPLETE: the best set is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "shares", "identical", "good"),
    [
        ("copying", {"ngram": 0.5, "suffix": 0.9}, True, True),
        ("copying", {"ngram": 0.51, "suffix": 0.4}, True, False),
        ("copying", {"ngram": 0.4}, False, False),
        ("copying", {"suffix": 0.4}, True, False),  # what was not measured is not enough
        ("repeating", {"lookahead": 0.75, "ngram": 0.9}, True, True),
        ("repeating", {"lookahead": 0.76}, True, False),
        ("repeating", {}, True, False),
        ("others", {"lookahead": 0.99}, True, True),
        ("others", {"lookahead": 0.4}, False, False),
    ],
)
def test_what_must_come_out(table: str, shares: dict[str, float], identical: bool, good: bool) -> None:
    rows = [{"arm": arm, "of_plain": share, "identical": identical} for arm, share in shares.items()]
    assert verdict({table: rows}) is good


def test_there_is_an_exit_after_every_layer() -> None:
    arms = tables(30, {"skip_mlp_layers": [4]})
    for name in ("early_exit", "always"):
        assert [arm.config["early_exit_layer"] for arm in arms[name]] == list(range(1, 30))
    assert [arm.label for arm in arms["layer_skip"]] == ["default", "tuned"]
    for arm in (arm for own in arms.values() for arm in own):
        SpeculativeConfig.from_dict(arm.config)


def test_the_best_set_of_a_search(tmp_path: Path) -> None:
    log = tmp_path / "search.jsonl"
    assert best_skips(log) is None
    log.write_text('{"model": "m"}\n')
    assert best_skips(log) is None
    trials = [Trial(Skips((1,), ()), 10.0, 2.0), Trial(Skips((1, 2), (0,)), 12.0, 1.5), Trial(Skips((), ()), 9.0, 4.0)]
    log.write_text(
        "".join(f"{line}\n" for line in ['{"model": "m"}', *(json.dumps(asdict(trial)) for trial in trials)])
    )
    assert best_skips(log) == {"skip_attention_layers": [1, 2], "skip_mlp_layers": [0]}


# Runs


def test_a_cell_comes_back_from_the_log() -> None:
    one = cell("a", {"method": "early_exit", "early_exit_layer": 2}, answer(3), answer(4, 0.25))
    assert Cell.parse(json.loads(json.dumps(asdict(one)))) == one


def test_a_run_takes_up_what_the_same_code_wrote(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[tuple[str, str]] = []

    def fake(_: LoadedModel, name: str, prompts: object, config: dict[str, Any], tokens: int) -> Cell:
        measured.append(key(name, config))
        if len(measured) == 3:
            raise KeyboardInterrupt
        return cell(name, config, answer(6))

    monkeypatch.setattr(acceptance, "measure", fake)
    arms = {"a": [Arm(method, {"method": method}, ("chat", "copying")) for method in ("ngram", "suffix")]}
    prompts = {"chat": [[1]], "copying": [[2]]}
    log = tmp_path / "log.jsonl"
    with pytest.raises(SystemExit):
        acceptance.run(model, prompts, arms, 12, log, "code")
    assert measured == [key("chat", PLAIN), key("chat", {"method": "ngram"}), key("copying", PLAIN)]
    cells = acceptance.run(model, prompts, arms, 12, log, "code")
    assert len(cells) == 6 and len(measured) == 3 + 4
    assert acceptance.run(model, prompts, arms, 12, log, "code") == cells
    assert len(measured) == 7
    acceptance.run(model, prompts, arms, 12, log, "other code")
    assert len(measured) == 13
    assert "written by other code" in capsys.readouterr().out


def test_the_script(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """On a tiny model: the last line is the result, the outputs are plain decoding's, and what is left out is said."""
    result = subprocess.run(
        [
            *(sys.executable, acceptance.__file__, "--model", str(tiny_llama_dir), "--dtype", "fp32"),
            *("--table", "early_exit", "layer_skip", "--first", "2", "--tokens", "6"),
            *("--log", str(tmp_path / "log"), "--result", str(tmp_path / "result"), "--search", str(tmp_path / "none")),
        ],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert "NOT COMPLETE: layer_skip's best set" in result.stdout
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "result").read_text())
    assert [line["arm"] for line in found["tables"]["early_exit"]] == ["exit 1", "exit 2"]
    assert all(line["identical"] for line in found["tables"]["early_exit"])
    assert "left out: no trial is in" in result.stderr


def test_another_answer_is_not_overlooked(model: LoadedModel) -> None:
    one = cell("chat", {"method": "ngram"}, answer(6, digest="x"))
    plain = cell("chat", PLAIN, answer(12))
    cells = {key("chat", PLAIN): plain, key("chat", {"method": "ngram"}): one}
    (line,) = table_rows([Arm("ngram", {"method": "ngram"})], cells)
    assert not line["identical"]
    same = replace(one, answers=(answer(6),))
    (line,) = table_rows([Arm("ngram", {"method": "ngram"})], cells | {key("chat", {"method": "ngram"}): same})
    assert line["identical"]
