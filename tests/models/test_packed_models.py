"""Models whose matrices stay packed: the very weights of the dequantised model, and no token changed by drafting."""

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from drafters.scripted import ScriptedDrafter, bush, oracle
from gguf_samples import Raw, Sample, model_sample, tiny_model
from ops.packed_samples import sample
from tiny_files import llama_weights, write_folder, write_gguf

from paceline.core.params import SamplingParams
from paceline.decode import decode
from paceline.drafters.base import Drafter
from paceline.drafters.none import NoDrafter
from paceline.errors import PacelineError
from paceline.models import load, packing, probe
from paceline.models.decoder import Decoder
from paceline.models.gguf import GgufFile, open_gguf
from paceline.models.gguf_config import config_from_gguf
from paceline.models.layout import prepare
from paceline.models.load import load_model
from paceline.ops.dense import DenseLinear
from paceline.ops.native import library
from paceline.ops.packed import PackedLinear, linear_of, look_up, shape_of

if isinstance(missing := library.load(), library.Missing):
    pytest.skip(f"native operators {missing.reason}", allow_module_level=True)
LEVELS = missing.levels
# as in a real mixture: query, key and value of several types, one matrix not quantised
TYPES = {
    "token_embd": "Q6_K",
    "attn_q": "Q4_K",
    "attn_k": "Q4_0",
    "attn_v": "Q6_K",
    "attn_output": "Q5_0",
    "ffn_gate": "Q4_1",
    "ffn_up": "Q5_K",
    "ffn_down": "Q8_0",
    "output": "Q5_1",
}
PARAMS = [SamplingParams(temperature=0, max_tokens=20), SamplingParams(temperature=0.8, seed=5, max_tokens=20)]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3_text"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    tied = request.param == "qwen2"
    shape = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 200, "tie_word_embeddings": tied}
    written = model_sample(tiny_model(request.param, **shape))
    return open_gguf(quantised(written).write(tmp_path_factory.mktemp("packed") / "model.gguf"))


def quantised(written: Sample) -> Sample:
    for number, (name, values) in enumerate(written.tensors.items()):
        kind = TYPES.get(name.split(".")[-2])
        if kind is None or values.ndim != 2 or name.startswith("blk.1.attn_output"):
            continue
        type_id = gguf.GGMLQuantizationType[kind]
        if kind.endswith("K"):  # gguf-py reads these, but does not make them
            blocks = sample(type_id, *values.shape, seed=number, scale=0.002).rows.numpy()
        else:
            blocks = gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), type_id)
        written.tensors[name] = Raw(blocks, type_id)
    return written


def decoders(file: GgufFile) -> tuple[Decoder, Decoder]:
    """With packed matrices, and with the same ones dequantised to bf16."""
    config = config_from_gguf(file)
    return tuple(
        Decoder(config, dict(prepare(config, weights, torch.bfloat16)), torch.bfloat16)
        for weights in (file.packed_weights(), file.weights(torch.bfloat16))
    )


def test_every_weight_is_the_dequantised_one(file: GgufFile) -> None:
    packed, plain = decoders(file)
    pairs = list(zip(packed.packed_linears(), plain.linears(), strict=True))
    assert len(pairs) == 4 * plain.config.num_layers + 1
    for ours, theirs in pairs:
        assert torch.equal(ours.weight(), theirs.weight)
        assert (ours.bias is None) == (theirs.bias is None)
    ids = torch.tensor([0, 199, 7, 7])
    assert torch.equal(look_up(ids, packed.embedding), look_up(ids, plain.embedding))
    types = [part.type for part in packed.layers[0].qkv.parts]
    assert types == ["Q4_K", "Q4_0", "Q6_K"]


def run(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    from paceline.models.decoder import Segment

    cache = decoder.new_pool(128).new_sequence()
    return decoder.logits(decoder.forward([Segment(cache, tokens)]).hidden)


def test_logits_are_those_of_the_dequantised_model_but_for_rounding(file: GgufFile) -> None:
    packed, plain = decoders(file)
    tokens = list(range(3, 43))
    ours, theirs = run(packed, tokens).float(), run(plain, tokens).float()
    spread = theirs.std()
    assert (ours - theirs).std() < 0.1 * spread, "activations are rounded to 8 bits, no more"
    assert not torch.equal(ours, theirs.roll(1, 0))


def test_a_fused_layer_of_packed_matrices_has_the_bits_of_its_operators(file: GgufFile) -> None:
    packed = decoders(file)[0]
    fused = run(packed, list(range(3, 43)))
    assert None not in packed.fused
    packed.fused = [None] * len(packed.fused)
    assert torch.equal(run(packed, list(range(3, 43))), fused)


def drafters(text: list[int], vocab: int) -> Iterator[Drafter]:
    lengths = itertools.cycle(range(9))
    yield ScriptedDrafter(text, oracle(lambda: next(lengths), vocab))
    yield ScriptedDrafter(text, bush(vocab))


@pytest.mark.parametrize("level", LEVELS)
def test_no_token_changes(file: GgufFile, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, level)
    target = decoders(file)[0]
    assert {linear.level for linear in target.packed_linears()} == {level}
    result = probe.measure(target)
    assert result.exact == "bitwise", result.culprit
    probe.apply(target, result)
    prompt = list(range(50, 90))
    for params in PARAMS:
        steps = decode(target, prompt, params, NoDrafter(), 0, prefill_rows=1)
        expected = [token for step in steps for token in step.token_ids]
        assert len(set(expected)) > 5, "an answer that never changes would prove nothing"
        for drafter in drafters(prompt + expected, 200):
            for k in (3, 20):
                got = [token for step in decode(target, prompt, params, drafter, k) for token in step.token_ids]
                assert got == expected, k


def test_a_smaller_vocabulary_has_the_first_logits(file: GgufFile) -> None:
    packed = decoders(file)[0]
    tokens = [5, 6, 7]
    assert torch.equal(run(packed.with_vocabulary(37), tokens), run(packed, tokens)[:, :37])


# --- from a name ---


def test_a_gguf_file_is_packed_once_and_mapped_afterwards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_weights())
    first = load_model(str(path), dtype="file")
    assert (first.precision, first.exact) == ("file", "bitwise")
    assert first.treatment == f"BF16 weights, bf16 activations ({library.level()})"
    stat = path.stat()
    path.write_bytes(bytes(stat.st_size))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with caplog.at_level(logging.WARNING):
        second = load_model(str(path), dtype="file")
    assert caplog.records == []
    assert torch.equal(second.decoder.head.packed, first.decoder.head.packed)
    assert torch.equal(run(second.decoder, [1, 2, 3]), run(first.decoder, [1, 2, 3]))


@pytest.mark.parametrize("dtype", ["file", "int8", "int4"])
def test_folder_and_gguf_are_packed_alike(tmp_path: Path, dtype: str) -> None:
    weights = llama_weights(torch.bfloat16)
    folder = load_model(str(write_folder(tmp_path / "m", weights)), dtype=dtype)
    file = load_model(str(write_gguf(tmp_path / "m.gguf", weights)), dtype=dtype)
    for ours, theirs in zip(folder.decoder.packed_linears(), file.decoder.packed_linears(), strict=True):
        assert torch.equal(ours.packed, theirs.packed)
    types = [part.type for linear in folder.decoder.packed_linears() for part in linear.parts]
    # 48 columns, as the lower projection has, make no groups of 32
    assert set(types) == {"file": {"BF16"}, "int8": {"Q8_0", "BF16"}, "int4": {"Q4_1", "Q8_0", "BF16"}}[dtype]
    assert folder.exact == "bitwise"


@pytest.mark.parametrize(("type_id", "steps"), [(8, 254), (3, 15)])
def test_quantised_weights_are_the_nearest(type_id: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_CHUNK", 256)  # four rows at a time, and a last one of two
    weight = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    ((_, packed),) = packing.pack_weights([("w", weight)], {8: "int8", 3: "int4"}[type_id])
    groups = weight.view(-1, 32)
    reach = groups.abs().amax(1) * 2 if type_id == 8 else groups.amax(1) - groups.amin(1)
    allowed = (reach / steps * 0.51 + 0.01 * groups.abs().amax(1))[:, None]
    got = PackedLinear(packed).weight().float().view(-1, 32)
    assert ((got - groups).abs() <= allowed).all()


def test_a_wrong_shape_is_refused(file: GgufFile) -> None:
    config = config_from_gguf(file)
    weights = dict(file.packed_weights())
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(PacelineError, match="has shape"):
        dict(prepare(config, weights.items(), torch.bfloat16))


def test_without_operators_packed_precisions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_weights())
    monkeypatch.setattr(library, "load", lambda: library.Missing("were not built: there was no C++ compiler"))
    for dtype in packing.PACKED:
        with pytest.raises(PacelineError, match="native operators, which were not built"):
            load_model(str(path), dtype=dtype)
    assert load_model(str(path), dtype="bf16").precision == "bf16"


def test_packed_precisions_are_of_the_cpu() -> None:
    with pytest.raises(PacelineError, match="CPU"):
        packing.check_packed_runs("file", torch.device("cuda"))
    assert set(packing.PACKED) < set(load.PRECISIONS)


def test_a_linear_layer_is_of_the_kind_its_weight_is() -> None:
    weight = torch.ones(3, 64, dtype=torch.bfloat16)
    ((_, packed),) = packing.pack_weights([("w", weight)], "file")
    assert isinstance(linear_of(weight), DenseLinear) and isinstance(linear_of(packed), PackedLinear)
    assert shape_of(packed) == shape_of(weight) == (3, 64)
