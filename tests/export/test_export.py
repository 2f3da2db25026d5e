"""Exports: read again they compute what the head did, and their keys are those of published checkpoints."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from drafters.drafting_by_hand import EMBED, OUTPUT
from drafters.head_files import eagle, eagle3_native, eagle3_speculators, medusa
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from paceline.cli.export import FORMATS
from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.export.formats import FORMS, export_head
from paceline.models.eagle_checkpoint import load_eagle, load_eagle3
from paceline.models.head_checkpoint import load_medusa
from paceline.models.heads import FeatureHead
from paceline.models.load import LoadedModel, load_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The target of `drafting_by_hand`, as a folder."""
    folder = tmp_path_factory.mktemp("target")
    hf = tiny.hf_model(tiny.hf_config("llama", num_hidden_layers=8), dtype=torch.float64)
    hf.save_pretrained(folder)
    return load_model(str(folder))


def states_of(head: FeatureHead, target: LoadedModel) -> torch.Tensor:
    """What a head makes of some features: from them to logits, its layer's attention left out."""
    generator = torch.Generator().manual_seed(3)
    hidden = {i: torch.randn(5, 64, generator=generator, dtype=torch.float64) for i in sorted(set(head.hidden_layers))}
    x, residual = head.inputs(torch.tensor([1, 2, 3, 4, 5]), head.fuse(hidden))
    q, k, v = head.layer.project(x, torch.arange(5))
    mixed = (q.sum(1, keepdim=True) * k.sum(1, keepdim=True)).tanh().expand_as(q) * v.sum()
    return head.logits(head.layer.finish(mixed, residual))


SOURCES = {
    "native": lambda: eagle3_native(EMBED, 8),
    "native, whole vocabulary": lambda: eagle3_native(EMBED, 8, draft_vocab=None),
    "speculators": lambda: eagle3_speculators(EMBED),
    "EAGLE-3.1": lambda: eagle3_speculators(EMBED, fc_norm=True, norm_output=True),
    "normed residual": lambda: eagle3_speculators(EMBED, norm_before_residual=True, qwen3=True),
}
NOT_NATIVE = ("EAGLE-3.1", "normed residual")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("form", ["eagle3", "speculators"])
def test_an_eagle3_head_comes_back_the_same(source: str, form: str, target: LoadedModel, tmp_path: Path) -> None:
    given = str(SOURCES[source]().write(tmp_path / "given"))
    if form == "eagle3" and source in NOT_NATIVE:
        with pytest.raises(PacelineError, match="EAGLE's own code knows no"):
            export_head(given, target, form, 3)
        return
    out = tmp_path / "out"
    out.mkdir()
    export_head(given, target, form, 5).write(out)
    before, after = load_eagle3(given, target.decoder), load_eagle3(str(out), target.decoder)
    assert before.options == after.options
    torch.testing.assert_close(states_of(after, target), states_of(before, target), rtol=0, atol=0)
    config = json.loads((out / "config.json").read_text())
    for flag in ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"):
        assert isinstance(config[flag], bool)
    assert config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in before.options.aux_layers]
    with safe_open(out / "model.safetensors", "pt") as file:
        names = set(file.keys())
    layer = "midlayer." if form == "eagle3" else "layers.0."
    assert {"fc.weight", "norm.weight", "lm_head.weight", f"{layer}hidden_norm.weight"} <= names
    if form == "speculators":
        proposal = config["speculators_config"]["proposal_methods"][0]
        assert proposal["speculative_tokens"] == 5 and "embed_tokens.weight" in names


def test_an_eagle_head_comes_back_the_same(target: LoadedModel, tmp_path: Path) -> None:
    given = str(eagle(EMBED, OUTPUT, bias=True).write(tmp_path / "given"))
    out = tmp_path / "out"
    out.mkdir()
    export_head(given, target, "eagle", 3).write(out)
    before, after = load_eagle(given, target.decoder), load_eagle(str(out), target.decoder)
    torch.testing.assert_close(states_of(after, target), states_of(before, target), rtol=0, atol=0)


@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize("form", ["medusa", "medusa-vllm"])
def test_medusa_heads_come_back_the_same(form: str, own_output: bool, target: LoadedModel, tmp_path: Path) -> None:
    given = str(medusa(OUTPUT, "original", blocks=2, own_output=own_output).write(tmp_path / "given"))
    out = tmp_path / "out"
    out.mkdir()
    export_head(given, target, form, 3).write(out)
    before, after = load_medusa(given, target.decoder), load_medusa(str(out), target.decoder)
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert len(before.heads) == len(after.heads) == 4
    for head in range(4):
        torch.testing.assert_close(after.logits(head, hidden), before.logits(head, hidden), rtol=0, atol=0)
    keys = set(torch.load(out / "medusa_lm_head.pt") if form == "medusa" else _names(out))
    assert ("0.2.weight" if form == "medusa" else "lm_heads.0.weight") in keys  # a vocabulary layer of its own


def _names(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def test_a_reduced_vocabulary_goes_where_the_format_has_one(target: LoadedModel, tmp_path: Path) -> None:
    given = str(medusa(OUTPUT, "vllm", reduced=60).write(tmp_path / "given"))
    out = tmp_path / "out"
    out.mkdir()
    export_head(given, target, "medusa-vllm", 3).write(out)
    before, after = load_medusa(given, target.decoder), load_medusa(str(out), target.decoder)
    hidden = torch.ones(1, 64, dtype=torch.float64)
    assert torch.equal(before.logits(2, hidden), after.logits(2, hidden))


def test_the_command_writes_and_refuses(
    target: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    assert set(FORMATS) == {*FORMS, "hf"}
    given = str(eagle3_native(EMBED, 8).write(tmp_path / "given"))
    out = str(tmp_path / "out")
    command = ["export", given, "--model", target.name, "--format", "speculators", "--out", out]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": out, "format": "speculators"}
    assert main(command) == 1
    assert "is there already" in capsys.readouterr().err
    reduced = str(medusa(OUTPUT, "vllm", reduced=60).write(tmp_path / "reduced"))
    assert main(["export", reduced, "--model", target.name, "--format", "medusa", "--out", str(tmp_path / "m")]) == 1
    assert "has no reduced vocabulary" in capsys.readouterr().err
    folder = tmp_path / "hf"
    assert main(["export", str(tiny_llama_dir), "--format", "hf", "--out", str(folder)]) == 0
    again, before = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tiny_llama_dir))
    ids = torch.tensor([tiny.prompt(12)])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, before(ids).logits)
