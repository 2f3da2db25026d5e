"""Heads that come with the package: made by `bench/heads.py`, found for their target in any precision, and no other."""

import json
import shutil
from itertools import accumulate
from operator import mul
from pathlib import Path

import heads
import pytest
import torch
from train.making import target_of

from paceline.cli.main import main
from paceline.core.params import SamplingParams
from paceline.drafters.auto import AutoDrafter
from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.engine.costs import CostTable, DraftCosts, TargetCosts
from paceline.engine.llm import LLM
from paceline.engine.measure import Measurement
from paceline.engine.request import RequestOptions
from paceline.models import shipped
from paceline.models.shipped import shipped_head, shipped_heads, shipped_methods

SMALL = ("--draft-vocab-size", "64")
PLAN = heads.Plan(
    data=("--prompts", "{prompts}", "--max-tokens", "16", "--temperature", "0", "1"),
    training=("--steps", "2", "--hold-aside", "2", "--evaluate-tokens", "6", "--batch-tokens", "120"),
    lanes=(
        (("eagle3", "--ttt-steps", "2", *SMALL),),
        (("medusa", "--num-heads", "2", *SMALL), ("early_exit", "--layers", "2", *SMALL)),
    ),
)


@pytest.fixture(scope="module")
def made(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package folder with the heads of a tiny target."""
    folder = tmp_path_factory.mktemp("heads")
    (folder / "prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(8)))
    data = tuple(str(folder / "prompts.txt") if option == "{prompts}" else option for option in PLAN.data)
    plan = heads.Plan(data, PLAN.training, PLAN.lanes)
    heads.make(("--model", str(tiny_llama_dir)), "tiny", folder / "work", folder / "package", plan)
    return folder


@pytest.fixture
def package(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shipped, "FOLDER", made / "package")
    return made / "package"


def test_a_second_run_has_nothing_to_do(
    made: Path, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ("--prompts", str(made / "prompts.txt"), *PLAN.data[2:])
    kept = {path: path.read_bytes() for path in (made / "work").glob("*/model.safetensors")}
    lines = (made / "work/data.jsonl").read_text()
    steps = {path: path.read_text() for path in (made / "work").glob("*/log.jsonl")}
    plan = heads.Plan(data, PLAN.training, PLAN.lanes)
    heads.make(("--model", str(tiny_llama_dir)), "tiny", made / "work", made / "again", plan)
    assert len(kept) == 3 and all(path.read_bytes() == held for path, held in kept.items())
    assert (made / "work/data.jsonl").read_text() == lines
    assert all(path.read_text() == text for path, text in steps.items())
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"head"')]
    assert [one["head"] for one in told] == ["tiny/eagle3", "tiny/medusa", "tiny/early_exit"]
    assert all(one["decoded_acceptance_length"] >= 1 for one in told)


def test_a_head_that_is_too_large_is_not_shipped(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "LARGEST", 1000)
    with pytest.raises(SystemExit, match="a head in the package may take 0"):
        heads.ship(made / "work/eagle3", tmp_path / "package/tiny/eagle3")
    assert not (tmp_path / "package").exists()


def test_a_failure_ends_all_lanes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    long = ("data", "generate", "--model", str(tmp_path / "nowhere"), "--prompts", str(tmp_path / "none"))
    with pytest.raises(SystemExit) as ended:
        heads.in_lanes([[("no-such-command",), ("never",)], [(*long, "--out", str(tmp_path / "data.jsonl"))]])
    assert ended.value.code not in (None, 0)
    assert "paceline never" not in capfd.readouterr().err


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_they_are_found_for_their_target_in_any_precision(package: Path, tiny_llama_dir: Path, dtype: str) -> None:
    target = target_of(tiny_llama_dir, dtype)
    assert set(shipped_heads(target)) == {"eagle3", "medusa", "early_exit"} == shipped_methods()
    for method in ("eagle3", "medusa"):
        assert create_drafter(SpeculativeConfig(method=method), target).name == method
    exiting = create_drafter(SpeculativeConfig(method="early_exit"), target)
    bare = create_drafter(SpeculativeConfig(method="early_exit", early_exit_layer=1), target)
    assert (exiting.needs.early_layer, bare.needs.early_layer) == (2, 1)
    drafter = create_drafter(SpeculativeConfig(method="auto"), target)
    assert isinstance(drafter, AutoDrafter) and list(drafter.by_name) == ["suffix", "eagle3"]


def test_they_are_listed_and_taken_by_requests(
    package: Path, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["methods", str(tiny_llama_dir), "--json"]) == 0
    listed = {method["name"]: method for method in json.loads(capsys.readouterr().out)["methods"]}
    assert listed["eagle3"]["heads"] == [str(package / "tiny/eagle3")] and listed["medusa"]["ready"]
    llm = LLM(target_of(tiny_llama_dir), "none")
    params = SamplingParams(temperature=0, max_tokens=8)
    plain, drafted = (
        llm.generate({"prompt_token_ids": [1, 2, 3]}, params, RequestOptions(method=method))[0].outputs[0]
        for method in ("none", "eagle3")
    )
    assert plain.token_ids == drafted.token_ids and drafted.speculation.num_draft_tokens > 0


def test_another_target_of_the_same_shape_has_none(
    package: Path, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(tiny_llama_dir, other)
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + torch.ones(1, dtype=torch.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["methods", str(other), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["methods"]
    assert not any(str(package) in json.dumps(method) for method in listed)
    target = target_of(other)
    assert shipped_heads(target) == {} and shipped_head("eagle3", target) is None
    drafter = create_drafter(SpeculativeConfig(method="auto"), target)
    assert isinstance(drafter, AutoDrafter) and list(drafter.by_name) == ["suffix"]
    assert main(["generate", "--model", str(other), "--method", "eagle3", "-n", "4", "prompt"]) == 1


@pytest.mark.parametrize(("acceptance", "taken"), [([0.9, 0.9], True), ([0.05, 0.0], False), (None, False)])
def test_auto_takes_a_head_only_if_it_can_pay(
    package: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    acceptance: list[float] | None, taken: bool,
) -> None:  # fmt: skip
    """By its evaluation, and by costs as measured: here a pass costs 1 and a draft 0.2."""
    own = tmp_path / "package"
    shutil.copytree(package, own)
    monkeypatch.setattr(shipped, "FOLDER", own)
    file = own / "tiny/eagle3/evaluation.json"
    value = json.loads(file.read_text())
    assert len(value["acceptance_by_position"]) == 4
    assert value["decoded_acceptance_length"] <= 1 + sum(accumulate(value["acceptance_by_position"], mul)) + 0.01
    if acceptance is None:
        file.unlink()
    else:
        file.write_text(json.dumps({**value, "acceptance_by_position": acceptance}))
    costs = CostTable(TargetCosts((1, 8), (1.0, 1.0)), {"eagle3": DraftCosts(0.2, 0.2)})
    monkeypatch.setattr("paceline.engine.methods.measured", lambda *_, **__: Measurement(costs, calm=False))
    llm = LLM(target_of(tiny_llama_dir))
    drafter = llm.engine.speculation.drafters["auto"]
    assert isinstance(drafter, AutoDrafter)
    assert list(drafter.by_name) == ["suffix", *(["eagle3"] if taken else [])]
    assert bool(drafter.needs.hidden_layers) == taken == bool(llm.engine.speculation.taps)
    report = llm.policy_report()
    assert report is not None and list(report["left_out"]) == ([] if taken else ["eagle3"])
    prompt, params = {"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(target_of(tiny_llama_dir), "none").generate(prompt, params)
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_a_package_without_heads_is_as_it_was(
    tmp_path: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "nowhere")
    target = target_of(tiny_llama_dir)
    assert shipped_methods() == frozenset() and shipped_heads(target) == {}
    drafter = create_drafter(SpeculativeConfig(method="auto"), target)
    assert isinstance(drafter, AutoDrafter) and list(drafter.by_name) == ["suffix"]
    assert main(["generate", "--model", str(tiny_llama_dir), "--method", "eagle3", "-n", "4", "prompt"]) == 1
    assert "needs a draft head" in capsys.readouterr().err


def test_generating_by_a_method_alone_takes_its_head(
    package: Path, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for method in ("none", "eagle3", "auto"):
        command = ["generate", "--model", str(tiny_llama_dir), "--json", "-n", "12", "--method", method, "prompt 3"]
        assert main(command) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["token_ids"] == answers[1]["token_ids"] == answers[2]["token_ids"]
    assert answers[1]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
