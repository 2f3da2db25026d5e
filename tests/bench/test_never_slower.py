"""`bench/never_slower.py`: how many blocks a cell gets, and that a run is gone on with."""

import json
import sys
from pathlib import Path

import never_slower
import pytest
from never_slower import Sample, blocks_of, too_wide


def sample(category: str, number: int, seconds: float) -> Sample:
    return Sample(1, category, number, {"none": 10, "auto": 10}, {"none": 1.0, "auto": seconds}, ())


def test_cells_that_vary_get_more_blocks() -> None:
    """By the interval's width alone: one that is surely slower is as done as one that is surely faster."""
    steady = [sample("steady", i, 1.0 + 0.001 * i) for i in range(6)]
    slower = [sample("slower", i, 2.0) for i in range(6)]
    shaky = [sample("shaky", i, 1.0 + 0.2 * (i % 2)) for i in range(6)]
    alone = [sample("alone", 0, 1.0)]
    assert too_wide([*steady, *slower, *shaky, *alone], 0.03) == [(1, "shaky"), (1, "alone")]
    assert too_wide(shaky, 0.2) == []


def test_prompts_come_round() -> None:
    prompts = {"a": [(1,), (2,), (3,)]}
    blocks = list(blocks_of((2, "a"), prompts, 4, waves=1))
    assert [block.prompts for block in blocks] == [((1,), (2,)), ((3,), (1,)), ((2,), (3,)), ((1,), (2,))]
    assert [block.key for block in blocks] == [(2, "a", number) for number in range(4)]
    waves = {count: list(blocks_of((count, "a"), prompts, 2, waves=2)) for count in (1, 2)}
    assert [block.prompts for block in waves[2]] == [((1,), (2,), (3,), (1,)), ((2,), (3,), (1,), (2,))]
    assert [block.prompts for block in waves[1]] == [((1,),), ((2,),)]


def test_a_run_is_gone_on_with(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, log = tmp_path / "prompts.jsonl", tmp_path / "log.jsonl"
    prompts.write_text(json.dumps({"turns": ["say it again"], "category": "chat"}) + "\n")
    monkeypatch.setattr(never_slower, "encode", lambda model, text: tuple(len(word) for word in text.split()[:20]))
    options = ["--prompts", str(prompts), "--model", str(tiny_llama_dir), "--log", str(log),
               "--per-category", "1", "--tokens", "4", "--blocks", "2", "--width", "0"]  # fmt: skip

    def cells(most: int, concurrency: int = 1) -> dict[str, int]:
        own = ["--most-blocks", str(most), "--concurrency", str(concurrency)]
        monkeypatch.setattr(sys, "argv", ["never_slower.py", *options, *own])
        never_slower.main()
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
        return {row["category"]: row["auto"]["samples"] for row in rows}

    assert cells(2) == {"chat": 2, "random words": 2}
    before = len(log.read_text().splitlines())
    assert cells(4) == {"chat": 4, "random words": 4}
    added = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    assert [(line["category"], line["number"]) for line in added if "category" in line] == [
        ("chat", 2), ("random words", 2), ("chat", 3), ("random words", 3)]  # fmt: skip
    assert cells(2, concurrency=2) == {"chat": 2, "random words": 2}  # beside what is there
