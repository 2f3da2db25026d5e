"""`paceline bench` from end to end, on a tiny random model."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.method import MethodArm
from paceline.bench.peers import base
from paceline.cli.main import COMMANDS, main
from paceline.core.proposal import Proposal
from paceline.drafters.ngram import NgramDrafter

PROMPTS = [
    {"id": "a/1", "category": "copy", "turns": ["one two three one two three one two " * 3, "and again"]},
    {"id": "a/2", "category": "copy", "turns": ["red green blue red green blue"]},
    {"id": "b/1", "category": "talk", "turns": ["What is a tree?"]},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    return path


@pytest.fixture
def bench(tiny_llama_dir: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs `paceline bench --model TINY --prompts FILE …` and returns (status, stdout, stderr)."""

    def run(*arguments: str, model: str = str(tiny_llama_dir)) -> tuple[int, str, str]:
        status = main(["bench", "--model", model, "--prompts", str(prompts), "-n", "24", *arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def last_line(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])


def rows(result: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if all(row[key] == value for key, value in wanted.items())]


def test_methods_on_prompts(bench: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    status, out, err = bench(
        "--methods", "ngram,layer_skip,suffix+ngram", "--concurrency", "1,2", "--ignore-eos", "--output", str(file)
    )
    assert status == 0, err
    result = last_line(out)
    labels = ["plain", "ngram", "layer_skip", "suffix+ngram"]
    assert [arm["label"] for arm in result["arms"]] == labels
    assert result["prompts"]["categories"] == {"copy": 2, "talk": 1}
    assert not result["interrupted"] and not result["differences"] and not result["broken_promise"]
    assert {"date", "machine", "load", "busy", "versions", "revision", "arguments"} <= result["provenance"].keys()
    assert result["provenance"]["arguments"]["methods"] == "ngram,layer_skip,suffix+ngram"
    assert result["model"]["exact"] == "bitwise" and result["settings"]["max_tokens"] == 24
    for concurrency in (1, 2):
        for label in labels:
            own = rows(result, concurrency=concurrency, arm=label)
            answers = Counter({row["category"]: row["answers"] for row in own})  # a group without any has no rows
            assert answers["all"] + answers["looping"] == 4  # three prompts, one of two turns
            assert answers["copy"] + answers["talk"] == answers["all"]
            assert all(row["differing"] == 0 for row in own)
            for row in own:
                acceptance = row["acceptance"]
                passes = sum(acceptance["histogram"])
                assert passes + acceptance["accepted"] == 24 * row["answers"]
                assert sum(k * n for k, n in enumerate(acceptance["histogram"])) == acceptance["accepted"]
                assert all(0 <= rate <= 1 for rate in acceptance["by_position"])
                assert row["units"] == 0 or sum(row["time_share"].values()) == pytest.approx(1)
            if label == "plain":
                assert all(row["ratio"]["point"] == 1 for row in own if row["ratio"])
    # the engine drafted: what was seen from outside is what it counted itself
    (first,) = rows(result, concurrency=1, arm="layer_skip", category="all")
    assert first["acceptance"]["drafted"] > 0 and first["acceptance"]["by_position"]
    # of two at a time, the second turn is alone: 3 units
    everything = json.loads(file.read_text())
    assert {key: value for key, value in everything.items() if key != "units"} == result
    assert [unit["conversations"] for unit in everything["units"]] == [
        ["a/1"], ["a/1"], ["a/2"], ["b/1"], ["a/1", "a/2"], ["a/1"], ["b/1"],
    ]  # fmt: skip
    assert [unit["turn"] for unit in everything["units"]] == [0, 1, 0, 0, 0, 1, 0]
    assert set(everything["units"][0]["measured"]) == set(labels)
    # and for people
    table = "\n".join(out.splitlines()[:-1])
    for word in ("concurrency 1", "concurrency 2", "layer_skip", "tokens/s", "accepted by position"):
        assert word in table


def test_a_second_turn_finds_the_first_in_the_cache(bench: Callable[..., Any]) -> None:
    status, out, err = bench("--methods", "ngram", "--ignore-eos")
    assert status == 0, err
    result = last_line(out)
    for label in ("plain", "ngram"):
        cached = sum(row["cached_prompt_tokens"] for row in rows(result, arm=label) if row["category"] != "copy")
        assert cached >= 64 and cached % 64 == 0


def test_sampled_answers_are_the_same_too(bench: Callable[..., Any]) -> None:
    status, out, err = bench("--methods", "ngram,suffix", "--temperature", "0.8", "--seed", "3")
    assert status == 0, err
    result = last_line(out)
    assert not result["differences"] and result["settings"]["temperature"] == 0.8


def test_a_draft_model_and_a_configuration(bench: Callable[..., Any], tiny_llama_dir: Path) -> None:
    """The target as its own draft model: every draft is right."""
    sure = {"method": "draft_model", "model": str(tiny_llama_dir), "draft_confidence_threshold": 0}
    config = json.dumps(sure | {"num_draft_tokens": 2, "label": "two"})
    status, out, err = bench(
        "--methods", "draft_model", "--draft-model", str(tiny_llama_dir), "-k", "5", "--method-config", config
    )
    assert status == 0, err
    for label, count in (("draft_model", 5), ("two", 2)):
        for row in rows(last_line(out), arm=label):
            if row["answers"]:
                assert row["acceptance"]["rate"] == 1
                found = row["acceptance"]["by_position"]
                assert found == [1.0] * len(found)
                assert len(found) == count or label == "draft_model"  # which ends its drafts where it is in doubt


def test_another_engine_beside_ours(bench: Callable[..., Any]) -> None:
    status, out, err = bench("--methods", "ngram", "--peer", "transformers", "--concurrency", "1,2", "--dtype", "fp32")
    assert status == 0, err
    result = last_line(out)
    peers = [arm["label"] for arm in result["arms"] if arm["kind"] == "peer"]
    assert peers == ["transformers", "transformers+lookup"]
    assert result["settings"]["ignore_eos"] and "ends of text are ignored" in err
    for label in peers:
        assert rows(result, arm=label, concurrency=1) and not rows(result, arm=label, concurrency=2)
        tokens = sum(row["tokens"] for row in rows(result, arm=label) if row["category"] in ("all", "looping"))
        assert tokens == 4 * 24
    assert not result["differences"]
    assert any("not measured at 2" in note for note in result["notes"])


def test_an_engine_that_is_missing_is_named_and_the_run_goes_on(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(base.PEERS, "vllm", base.Peer("no_such_engine", "paceline.bench.peers.of_vllm", "no-such"))
    status, out, err = bench("--methods", "ngram", "--peer", "vllm")
    assert status == 0
    assert "vllm is left out: it is not installed" in err.splitlines()
    assert last_line(out)["left_out"] == [{"name": "vllm", "why": "it is not installed"}]


def test_an_engine_that_cannot_run_the_model_says_why(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(base.PEERS, "llama.cpp", base.Peer("json", "paceline.bench.peers.of_llama_cpp", "json"))
    status, out, _ = bench("--methods", "ngram", "--peer", "llama.cpp")
    assert status == 0
    (left_out,) = last_line(out)["left_out"]
    assert left_out["name"] == "llama.cpp" and "reads GGUF files" in left_out["why"]


def test_ctrl_c_shows_what_is_measured(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    answer, calls = MethodArm.answer, iter(range(1000))

    def interrupted(self: MethodArm, *arguments: Any) -> Any:
        if next(calls) == 5:  # in the third unit of two arms
            raise KeyboardInterrupt
        return answer(self, *arguments)

    monkeypatch.setattr(MethodArm, "answer", interrupted)
    status, out, err = bench("--methods", "ngram")
    assert status == 130 and "interrupted" in err and "Traceback" not in err
    result = last_line(out)
    assert result["interrupted"]
    assert sum(row["answers"] for row in rows(result, arm="ngram") if row["category"] in ("all", "looping")) == 2


def test_ctrl_c_before_anything_is_measured(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(MethodArm, "warm_up", interrupted)
    status, out, _ = bench("--methods", "ngram")
    assert status == 130
    assert last_line(out)["rows"] == [] and last_line(out)["interrupted"]


def test_a_broken_promise_is_an_error(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose answers differ although its arithmetic is exact has a fault: here, one that we put there."""
    collect = MethodArm._collect

    def altered(self: MethodArm, seconds: float, output: Any, *rest: Any) -> Any:
        answer = collect(self, seconds, output, *rest)
        if self.label == "ngram":
            object.__setattr__(answer, "token_ids", (*answer.token_ids[:-1], 0))
        return answer

    monkeypatch.setattr(MethodArm, "_collect", altered)
    status, out, err = bench("--methods", "ngram", "--ignore-eos")
    assert status == 1 and "error: answers differ" in err
    result = last_line(out)
    assert result["broken_promise"] and {each["arm"] for each in result["differences"]} == {"ngram"}
    assert all(each["position"] == 23 for each in result["differences"])


def test_a_drafter_that_fails_is_told(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: NgramDrafter, sequences: Sequence[Any], budgets: Sequence[int]) -> list[Proposal]:
        raise ZeroDivisionError

    monkeypatch.setattr(NgramDrafter, "propose", broken)
    status, out, err = bench("--methods", "ngram", "--limit", "1")
    assert status == 0
    (arm,) = [arm for arm in last_line(out)["arms"] if arm["label"] == "ngram"]
    assert arm["faults"] > 0 and "the drafter of ngram failed" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "ngrm"], "unknown speculative method 'ngrm'"),
        (["--methods", ","], "--methods names none"),
        (["--methods", "draft_model"], "method draft_model needs a draft model"),
        (["--method-config", "{"], "is not JSON"),
        (["--peer", "sglang"], "--peer sglang is unknown"),
        (["--peer", "transformers", "--temperature", "1"], "contradicts --peer"),
        (["--concurrency", "0"], "--concurrency 0"),
        (["--concurrency", "1,x"], "--concurrency 1,x"),
        (["--head", "medusa"], "--head medusa is not METHOD=FOLDER"),
        (["--limit", "0"], "--limit is 0"),
        (["-n", "1"], "--max-tokens is 1"),
        (["-k", "-1"], "--num-draft-tokens is -1"),
        (["--temperature", "-1"], "--temperature"),
        (["--seed", "-1"], "--seed is -1"),
        (["--prompts", "no-such-file"], "no-such-file: No such file"),
        (["--output", "no/such/folder/x"], "--output no/such/folder/x"),
        (["--dtype", "int3"], "unknown --dtype 'int3'"),
        (["--raw"], "2 turns, and --raw completes a single text"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    arguments: list[str], message: str, bench: Callable[..., Any]
) -> None:
    status, out, err = bench(*arguments, model="no-such-model")
    error, hint = err.splitlines()
    assert status == 1 and out == ""
    assert error.startswith("error: ") and message in error
    assert hint.startswith("hint: ")


def test_a_refusal_imports_nothing_heavy(prompts: Path) -> None:
    code = (
        "import sys\nfrom paceline.cli.main import main\n"
        f"main(['bench', '--prompts', {str(prompts)!r}, '--raw'])\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == "[]"


def test_an_output_file_is_only_made_at_the_end(bench: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    status, _, _ = bench("--output", str(file), model="no-such-model")
    assert status == 1 and not file.exists()


def test_a_model_without_a_chat_template_is_told_to_go_raw(
    bench: Callable[..., Any], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    import shutil

    folder = tmp_path / "plain"
    shutil.copytree(tiny_llama_dir, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    status, _, err = bench("--methods", "ngram", model=str(folder))
    assert status == 1 and "has no chat template" in err and "--raw" in err
    single = tmp_path / "single.jsonl"
    single.write_text('{"prompt": "one two one two"}\n')
    status, out, err = bench("--methods", "ngram", "--raw", "--prompts", str(single), model=str(folder))
    assert status == 0, err
    assert last_line(out)["settings"]["raw"]


def test_the_command_is_listed() -> None:
    assert "bench" in COMMANDS
