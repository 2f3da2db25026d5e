"""`paceline methods`: the registry, and what a model has for each method."""

import json
from pathlib import Path

import pytest
import torch
from drafters import head_files
from drafters.test_add_a_drafter import install
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from paceline.cli import main as cli
from paceline.core.verify import RULES
from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.registry import METHODS
from paceline.errors import PacelineError
from paceline.models.load import load_model


@pytest.fixture(autouse=True)
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict]:
    assert cli.main(["methods", *arguments, "--json"]) == 0
    return {method["name"]: method for method in json.loads(capsys.readouterr().out)["methods"]}


def test_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    methods = listed(capsys)
    assert set(methods) >= set(METHODS)
    assert methods["eagle3"]["needs"] == "head" and methods["eagle3"]["drafts"] == ["chain", "tree"]
    assert methods["lookahead"]["lossless_rules"] == ["coupled", "standard"]
    assert methods["suffix"]["options"] == sorted(METHODS["suffix"].options)
    assert cli.main(["methods"]) == 0
    out = capsys.readouterr().out
    for name, method in METHODS.items():
        line = next(line for line in out.splitlines() if line.startswith(name))
        assert method.summary in line and ", ".join(method.rules) in line
    assert all(option in out for method in METHODS.values() for option in method.options)


def test_rules_are_those_that_take_the_shape() -> None:
    """The registry must not import the rules, which need torch, to know their names."""
    for method in METHODS.values():
        lossless = {name for name, rule in RULES.items() if rule.lossless}
        chains_alone = {name for name in lossless if not RULES[name].takes_trees}
        assert set(method.rules) == lossless - (chains_alone if method.shapes == ("tree",) else set())


def test_what_a_model_has(
    tiny_llama_dir: Path, tmp_path: Path, empty_hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    embed, output = (m.weight.detach() for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    heads = tmp_path / "heads"
    eagle = head_files.eagle(embed, output).write(heads / "eagle")
    medusa = head_files.medusa(output, "original").write(empty_hub_cache / "models--o--medusa/snapshots/abc")
    head_files.eagle3_specforge(embed[:, :48]).write(heads / "other")
    (heads / "damaged").mkdir()
    (heads / "damaged/config.json").write_text("{}")
    (heads / "damaged/model.safetensors").write_text("no")
    methods = listed(capsys, str(tiny_llama_dir), "--heads", str(heads))
    assert methods["eagle"]["heads"] == [str(eagle)] and methods["eagle"]["ready"]
    assert methods["medusa"]["heads"] == [str(medusa)]
    assert not methods["eagle3"]["ready"] and "hidden states" in methods["eagle3"]["misfits"][0]["why"]
    assert not methods["draft_model"]["ready"] and methods["ngram"]["ready"]
    target = load_model(str(tiny_llama_dir), dtype="fp32")
    for name in ("layer_skip", "early_exit"):  # the defaults shown are those that are used
        shown, default = (
            create_drafter(SpeculativeConfig(name, **values), target) for values in (methods[name]["defaults"], {})
        )
        assert shown.layers == default.layers  # type: ignore[attr-defined]
    for name in ("eagle", "medusa"):
        create_drafter(SpeculativeConfig(name, model=methods[name]["heads"][0]), target)
    with pytest.raises(PacelineError):
        create_drafter(SpeculativeConfig("eagle3", model=str(heads / "other")), target)

    assert cli.main(["methods", str(tiny_llama_dir), "--heads", str(heads)]) == 0
    out = capsys.readouterr().out
    for words in (f"ready: head {eagle}", "does not fit", "ready: exits after 1 layer\n", "ready with --draft-model"):
        assert words in out


def test_what_loading_refuses_is_not_called_ready(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its config or its shapes give away, loading says it in the same words."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    embed, output = (m.weight.detach() for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    unnamed, short = head_files.eagle3_speculators(embed, layers=(0, 1, 2)), head_files.medusa(output[:-3], "original")
    unnamed.tensors = {name: tensor for name, tensor in unnamed.tensors.items() if name not in ("d2t", "t2d")}
    foreign, odd = head_files.eagle(embed, output), head_files.eagle(embed, output)
    foreign.config = {"speculators_model_type": "eagle", "transformer_layer_config": foreign.config}
    odd.config = {**odd.config, "num_attention_heads": 5}
    lacking, deep = head_files.eagle(embed, output), head_files.medusa(output, "original")
    lacking.tensors.pop(next(name for name in lacking.tensors if name.endswith("o_proj.weight")))
    cube = next(name for name in deep.tensors if name.endswith("0.linear.weight"))
    deep.tensors[cube] = deep.tensors[cube][None]
    target = load_model(str(tiny_llama_dir), dtype="fp32")
    for number, (method, head, words) in enumerate(
        (
            ("eagle", lacking, "o_proj.weight is missing"),
            ("medusa", deep, f"0.linear.weight has shape [1, {embed.shape[1]}, {embed.shape[1]}]"),
            ("eagle3", unnamed, "there is no d2t"),
            ("eagle", foreign, "config.json does not describe the head's layer"),
            ("eagle", odd, "no multiple of its 5 attention heads"),
            ("medusa", short, "there is no token_map"),
        )
    ):
        folder = head.write(tmp_path / str(number))
        found = listed(capsys, str(tiny_llama_dir), "--heads", str(folder))[method]
        assert not found["ready"] and words in found["misfits"][0]["why"], found
        with pytest.raises(PacelineError) as error:
            create_drafter(SpeculativeConfig(method, model=str(folder)), target)
        assert found["misfits"][0]["why"] in str(error.value)


def test_another_vocabulary_does_not_fit(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    embed, output = (m.weight.detach() for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    head_files.eagle(embed[:100], output[:100]).write(tmp_path / "heads")
    eagle = listed(capsys, str(tiny_llama_dir), "--heads", str(tmp_path / "heads"))["eagle"]
    assert eagle["misfits"][0]["why"] == f"its vocabulary is 100, the target's {len(embed)}"


def test_a_medusa_heads_vocabulary_is_looked_at(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).get_output_embeddings().weight.detach()
    head_files.medusa(torch.cat((output, output)), "original").write(tmp_path / "heads")
    medusa = listed(capsys, str(tiny_llama_dir), "--heads", str(tmp_path / "heads"))["medusa"]
    assert medusa["misfits"][0]["why"] == f"its vocabulary is {2 * len(output)}, the target's {len(output)}"


def test_whatever_lies_in_the_cache_stops_nothing(
    tiny_llama_dir: Path, empty_hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of other tools: pickles with code, empty ones, pickles of other things, indices that are none."""

    def place(name: str) -> Path:
        folder = empty_hub_cache / f"models--o--{name}/snapshots/abc"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return folder

    torch.save({"0.0.linear.weight": Path("code")}, place("code") / "pytorch_model.bin")
    torch.save([torch.ones(1)], place("list") / "pytorch_model.bin")
    torch.save({0: torch.ones(1)}, place("numbers") / "pytorch_model.bin")
    (place("empty") / "pytorch_model.bin").write_bytes(b"")
    (place("cut") / "pytorch_model.bin").write_bytes(b"\x80\x02\x8a\nl")
    (place("index") / "model.safetensors.index.json").write_text("[]")
    (place("map") / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    save_file({"0.0.linear.weight": torch.tensor(1.0)}, place("number") / "model.safetensors")
    methods = listed(capsys, str(tiny_llama_dir))
    assert methods["medusa"]["heads"] == [] and len(methods["medusa"]["misfits"]) == 1


def test_a_method_that_does_not_load_is_shown_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "paceline-odd", {"odd": "odd_one:METHOD"}, odd_one="import no_such_module")
    odd = listed(capsys, str(tiny_llama_dir))["odd"]
    assert not odd["ready"] and "cannot be loaded: ModuleNotFoundError" in odd["error"]
    assert cli.main(["methods"]) == 0
    assert "\nodd: method 'odd' of paceline-odd cannot be loaded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--heads", "/nowhere"], "--heads /nowhere is not a folder"),
        (["--heads", "/tmp"], "--heads needs a MODEL"),
        (["no-such-model"], "no model 'no-such-model'"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"error: {error}")
