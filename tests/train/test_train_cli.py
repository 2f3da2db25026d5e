"""`paceline data` and `paceline train`, from a bare target to a drafter that `paceline generate` uses."""

import json
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.models.home import sole_writer


@pytest.fixture(scope="module")
def data(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"prompt {i}\n" for i in range(8)))
    out = folder / "data.jsonl"
    options = ["--prompts", str(prompts), "--max-tokens", "20", "--temperature", "0"]
    assert main(["data", "generate", "--model", str(tiny_llama_dir), "--out", str(out), *options]) == 0
    return out


RUN = ("--steps", "4", "--hold-aside", "2", "--evaluate-tokens", "8", "--batch-tokens", "100", "--json")
HEADS: dict[str, tuple[str, ...]] = {
    "eagle3": ("--ttt-steps", "2", "--draft-vocab-size", "64"),
    "medusa": ("--num-heads", "2", "--draft-vocab-size", "64"),
    "early_exit": ("--layers", "1", "--draft-vocab-size", "64"),
    "eagle": ("--ttt-steps", "1"),
    "draft_model": ("--layers", "2", "--on-policy", "0.5"),
}


@pytest.mark.parametrize("method", HEADS)
def test_a_drafter_is_trained_and_used(
    method: str, data: Path, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(tiny_llama_dir), tmp_path / "head"
    capsys.readouterr()
    arguments = ["train", method, "--model", model, "--data", str(data), "--out", str(out), *HEADS[method], *RUN]
    assert main(arguments) == 0
    told = capsys.readouterr()
    summary = json.loads(told.out)
    assert summary["steps"] == 4 and summary["evaluation"]["decoded_acceptance_length"] >= 1
    if "--draft-vocab-size" in HEADS[method]:
        assert summary["draft_vocabulary"]["size"] == 64 and 0 < summary["draft_vocabulary"]["training"] <= 1
    assert "6 samples, 2 held aside, skipped: none" in told.err and "--cache-features would take" in told.err
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["target"]["weights"].startswith("tensors:") and provenance["samples"]["training"] == 6
    answers = []
    for options in (["--method", "none"], ["--method", method, "--draft-model", str(out)]):
        assert main(["generate", "--model", model, "--json", "-n", "12", *options, "prompt 3"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    drafted = answers[1]["metrics"]["speculative_decoding"]["num_draft_tokens"]
    assert drafted > 0 or method == "early_exit"  # which drafts where it is confident


def test_two_runs_do_not_write_one_result(
    data: Path, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out, more = ["--model", str(tiny_llama_dir)], tmp_path / "out", tmp_path / "more.jsonl"
    commands = {
        more: ["data", "generate", *model, "--prompts", str(data.parent / "prompts.txt"), "--max-tokens", "2"],
        out: ["train", "early_exit", *model, "--data", str(data), *HEADS["early_exit"], *RUN],
    }
    for path, command in commands.items():
        with sole_writer(path):
            assert main([*command, "--out", str(path)]) == 1
        assert f"error: another process is writing {path}\n" in capsys.readouterr().err
        assert not path.exists()
        assert main([*command, "--out", str(path)]) == 0


TUNED: dict[str, tuple[str, ...]] = {
    "layerskip": ("--layers", "2", "--every", "2"),
    "medusa": ("--joint", "--num-heads", "2", "--draft-vocab-size", "64", "--heads-weight", "0.5"),
}


@pytest.mark.parametrize("kind", TUNED)
def test_another_target_is_trained_and_used(
    kind: str, data: Path, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(tiny_llama_dir), tmp_path / "out"
    capsys.readouterr()
    run = (*RUN, "--steps", "3", "--lr", "1e-2")  # the last of two counts
    assert main(["train", kind, "--model", model, "--data", str(data), "--out", str(out), *TUNED[kind], *run]) == 0
    told = capsys.readouterr()
    summary = json.loads(told.out)
    assert summary["steps"] == 3 and summary["evaluation"]["decoded_acceptance_length"] >= 1
    assert "this makes another target: the answers will be its own" in told.err
    assert summary["target"] == str(out / "target" if kind == "medusa" else out)
    assert summary["drafter"] == (str(out) if kind == "medusa" else None)
    assert json.loads((Path(summary["target"]) / "provenance.json").read_text())["samples"]["training"] == 6
    drafting = ["--method", summary["method"], *(["--draft-model", str(out)] if summary["drafter"] else [])]
    answers = []
    for options in (["--method", "none"], drafting):
        assert main(["generate", "--model", summary["target"], "--json", "-n", "12", *options, "prompt 3"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert answers[0] == answers[1]
    if summary["drafter"]:
        assert main(["generate", "--model", model, "-n", "4", *drafting, "prompt 3"]) == 1
        assert "has other weights" in capsys.readouterr().err


def test_what_cannot_be_is_refused_in_a_line(
    data: Path, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_llama_dir)
    base = ["train", "eagle3", "--model", model, "--out", str(tmp_path / "head")]
    for options, message in (
        (["--data", str(tmp_path / "none")], "cannot be read"),
        (["--data", str(data), "--hold-aside", "8"], "holds 8 samples, and --hold-aside takes 8"),
        (["--data", str(data), "--steps", "0", "--hold-aside", "1"], "steps is 0"),
        (["--data", str(data), "--divergence", "x", "--hold-aside", "1"], "--divergence x is unknown"),
        (["--data", str(data), "--max-length", "5"], "holds no sample of use"),
    ):
        assert main([*base, *options]) == 1
        error = capsys.readouterr().err
        assert f"error: {message}" in error or (message in error and "error:" in error)
        assert "Traceback" not in error
    joint = ["train", "medusa", "--model", model, "--out", str(tmp_path / "head"), "--data", str(data)]
    assert main([*joint, "--hold-aside", "1", "--backbone-rate", "0.1"]) == 1
    assert "--backbone-rate is of --joint" in capsys.readouterr().err
