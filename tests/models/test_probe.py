"""The exactness probe believes what it measures, and finds a planted fault."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F

from paceline.models import probe
from paceline.models.decoder import Decoder


def depends_on_row_count(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias) * (1 + 1e-6 * x.shape[0])


def depends_on_neighbours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias) + 1e-3 * x.mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_sound_model_is_bitwise(dtype: torch.dtype) -> None:
    result = probe.measure(tiny.tiny_decoder("qwen2", dtype=dtype))
    assert result.exact == "bitwise" and result.culprit is None


def test_a_row_dependent_layer_is_reported() -> None:
    decoder = tiny.tiny_decoder("llama")
    decoder.layers[1].down.product = depends_on_neighbours
    result = probe.measure(decoder)
    assert result.exact == "up to ties"
    assert result.culprit is not None


def test_a_layer_that_depends_on_the_row_count_keeps_its_padding_and_stays_exact() -> None:
    decoder = tiny.tiny_decoder("llama")
    for layer in decoder.layers:
        layer.down.product = depends_on_row_count
    result = probe.measure(decoder)
    assert result.exact == "bitwise"
    assert "64 x 96" not in result.unpadded
    probe.apply(decoder, result)
    assert decoder.layers[0].down.padded


def test_one_such_layer_among_sound_ones_of_its_shape_is_found_on_the_whole_model() -> None:
    """The shape's first layer is sound, so padding looks needless; the trial on the whole model puts it back."""
    decoder = tiny.tiny_decoder("llama")
    decoder.layers[2].down.product = depends_on_row_count
    result = probe.measure(decoder)
    probe.apply(decoder, result)
    assert result.exact == "bitwise"
    assert decoder.layers[2].down.padded


def test_the_verdict_is_kept_per_model_shape_and_thread_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    decoder = tiny.tiny_decoder("llama")
    first = probe.probe(decoder)
    assert len(list((tmp_path / "probes").iterdir())) == 1
    monkeypatch.setattr(probe, "measure", lambda *_: pytest.fail("measured again"))
    assert probe.probe(tiny.tiny_decoder("llama", seed=1)) == first
    monkeypatch.setattr(probe, "measure", lambda *_: replace(first, flexible=False))
    assert probe.probe(tiny.tiny_decoder("llama", hidden_size=32)) != first or not first.flexible
    assert len(list((tmp_path / "probes").iterdir())) == 2


def test_a_damaged_verdict_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    decoder = tiny.tiny_decoder("llama")
    first = probe.probe(decoder)
    (file,) = (tmp_path / "probes").iterdir()
    file.write_text("{")
    assert probe.probe(decoder) == first


def sums_in_halves_for_few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What a library does: another order of summation below some number of rows, mostly hidden by bf16's rounding."""
    if x.shape[0] > 4:
        return F.linear(x, weight, bias)
    wide = [F.linear(part.float(), w.float()) for part, w in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)]
    return (wide[0] + wide[1]).to(x.dtype)


def test_another_order_of_summation_is_seen_through_bf16s_rounding() -> None:
    decoder = tiny.tiny_decoder("llama", dtype=torch.bfloat16)
    for layer in decoder.layers:
        layer.down.product = sums_in_halves_for_few_rows
    result = probe.measure(decoder)
    assert result.exact == "bitwise"
    assert "64 x 96" not in result.unpadded


def test_a_weak_or_bad_verdict_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))

    def spoilt(context: int) -> Decoder:
        decoder = tiny.tiny_decoder("llama")
        decoder.config = replace(decoder.config, max_context=context)
        decoder.layers[2].down.product = lambda x, w, b: F.linear(x, w, b) * (1 + 1e-4 * x.abs().max())
        return decoder

    probe.probe(spoilt(3))  # too short a context for any trial
    assert probe.probe(spoilt(512)).exact == "up to ties"
    assert probe.probe(tiny.tiny_decoder("llama")).exact == "bitwise"
