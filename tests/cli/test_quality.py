"""`paceline quality`: its figures by hand, and a text that comes with the package."""

import json
from pathlib import Path

import pytest
import tiny
import torch

from paceline.cli import main as cli
from paceline.models import quality
from paceline.models.decoder import Decoder
from paceline.ops.native import library


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def logits(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    from paceline.models.decoder import Segment

    return decoder.logits(decoder.forward([Segment(decoder.new_pool(64).new_sequence(), ids)]).hidden).double()


def test_figures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "WINDOW", 20)
    monkeypatch.setattr(quality, "_ROWS", 3)
    model, reference = tiny.tiny_decoder(seed=1), tiny.tiny_decoder(seed=2)
    ids = tiny.prompt(41)  # two windows, and a token that nothing follows
    kl, same, loss = [], [], []
    for window in (ids[:20], ids[20:40]):
        p, q = logits(reference, window).softmax(-1), logits(model, window).softmax(-1)
        kl += [float(torch.nn.functional.kl_div(b.log(), a, reduction="sum")) for a, b in zip(p, q, strict=True)]
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
        loss += [float(-q[i, token].log()) for i, token in enumerate(window[1:])]
    got = quality.compare(model, reference, ids)
    assert got.tokens == 40
    assert got.mean_kl == pytest.approx(sum(kl) / 40)
    assert got.same_top1 == sum(same) / 40
    assert got.perplexity == pytest.approx(torch.tensor(loss).mean().exp().item(), rel=1e-5)


def test_a_model_against_itself_is_perfect() -> None:
    model = tiny.tiny_decoder()
    got = quality.compare(model, model, tiny.prompt(50))
    assert (got.mean_kl, got.same_top1) == (0, 1)
    assert got.perplexity == got.reference_perplexity > 1


def test_of_a_model(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if library.level() is None:
        pytest.skip("no native operators")
    arguments = ["quality", str(tiny_llama_dir), "--dtype", "int8", "--max-tokens", "60"]
    assert cli.main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == 60 and "Q8_0" in result["weights"] and result["reference"].startswith("fp32")
    assert 0 < result["mean_kl"] < 1 and result["same_top1"] > 0.5
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert f"mean KL {result['mean_kl']:.5f}" in out and "perplexity" in out


def test_a_text_that_will_not_do(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quality", str(tiny_llama_dir), "--dtype", "bf16", "--text", str(tmp_path / "none")]) == 1
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "short").write_text("a")
    assert cli.main(["quality", str(tiny_llama_dir), "--dtype", "bf16", "--text", str(tmp_path / "short")]) == 1
    assert "less than two tokens" in capsys.readouterr().err
