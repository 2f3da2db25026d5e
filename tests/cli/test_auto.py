"""`auto` is what the command line does unless told otherwise, and it says what it did."""

import io
import json
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main

TEXT = "one two three one two three"


def test_the_default_says_what_it_did(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", "--model", str(tiny_llama_dir), TEXT, "--max-tokens", "40", "--ignore-eos"]
    assert main([*common, "--stats"]) == 0
    err = capsys.readouterr().err.splitlines()
    assert "· method: auto ·" in err[0]
    assert err[-1].startswith("auto: ")
    assert main([*common, "--json", "--draft-model", str(tiny_llama_dir)]) == 0
    answer = json.loads(capsys.readouterr().out)
    report = answer["metrics"]["auto"]
    assert set(report["methods"]) <= {"suffix", "ngram", "draft_model"}
    drafted = sum(method["num_draft_tokens"] for method in report["methods"].values())
    assert drafted == answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
    assert report["summary"]


def test_other_methods_are_silent_about_it(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", "--model", str(tiny_llama_dir), TEXT, "--max-tokens", "5"]
    for method in ("none", "ngram"):
        assert main([*common, "--stats", "--method", method]) == 0
        assert "auto" not in capsys.readouterr().err
        assert main([*common, "--json", "--method", method]) == 0
        assert "auto" not in json.loads(capsys.readouterr().out)["metrics"]


def test_chat_tells_with_the_statistics(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"{TEXT}\n/stats\n/method none\n/stats\n/method auto\n{TEXT}\n/stats\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    draft = ["--draft-model", str(tiny_llama_dir)]
    assert main(["chat", "--model", str(tiny_llama_dir), "--max-tokens", "20", *draft]) == 0
    err = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("auto: ") for line in err) == 2
    assert [line for line in err if line.startswith("method: ")] == ["method: none", "method: auto"]
    assert not any(line.startswith("error") for line in err)
