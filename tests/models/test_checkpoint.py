"""Safetensors folders that are whole, cut, mixed up or of another kind (public faults K 78-80)."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_files import llama_weights, write_folder

from paceline.errors import PacelineError
from paceline.models.checkpoint import Checkpoint, canonical_name, open_checkpoint
from paceline.models.hf_config import config_from_hf

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"


def read(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    config = config_from_hf(checkpoint.config, checkpoint.generation_config)
    return dict(checkpoint.tensors(config, frozenset()))


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_comes_out_as_it_was_saved(tmp_path, shards):
    weights = llama_weights()
    folder = write_folder(tmp_path / "model", weights, shards)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert {name: stored.shape for name, stored in checkpoint.stored.items()} == {
        name: tuple(tensor.shape) for name, tensor in weights.items()
    }
    found = read(checkpoint)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_own_precision_is_that_of_most_bytes(tmp_path, kind):
    weights = llama_weights(kind)
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float32)
    assert open_checkpoint(write_folder(tmp_path, weights)).dtype() == kind


def test_missing_shard_is_named(tmp_path):
    folder = write_folder(tmp_path, llama_weights(), shards=3)
    (folder / SECOND).unlink()
    with pytest.raises(PacelineError, match=f"shard {SECOND} is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("keep", [-1, -1000, 100, 8, 3, 0])
def test_cut_file_is_named(tmp_path, shards, keep):
    folder = write_folder(tmp_path, llama_weights(), shards)
    path = folder / ("model.safetensors" if shards == 1 else SECOND)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PacelineError, match=f"{path.name} is damaged"):
        open_checkpoint(folder)


def test_grown_file_is_refused(tmp_path):
    folder = write_folder(tmp_path, llama_weights())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(PacelineError, match=r"is damaged: \d+ bytes, \d+ expected"):
        open_checkpoint(folder)


def test_a_shape_that_does_not_fit_its_bytes(tmp_path):
    folder = write_folder(tmp_path, llama_weights())
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [31]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(PacelineError, match=r"tensor model\.norm\.weight has 64 bytes for shape \[31\]"):
        open_checkpoint(folder)


def test_stray_single_file_beside_shards_is_not_read(tmp_path):
    weights = llama_weights()
    folder = write_folder(tmp_path, weights, shards=3)
    stray = {name: torch.zeros_like(tensor) for name, tensor in weights.items()} | {"extra": torch.zeros(1)}
    save_file(stray, folder / "model.safetensors")
    save_file({"extra": torch.zeros(1)}, folder / "other.safetensors")
    found = read(open_checkpoint(folder))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_index_with_old_names(tmp_path):
    folder = write_folder(tmp_path, llama_weights(), shards=3)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {f"transformer.{name}": shard for name, shard in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(PacelineError, match=r"places tensor transformer\.\S+ in model-0000\d"):
        open_checkpoint(folder)


def test_index_that_places_a_tensor_in_the_wrong_shard(tmp_path):
    folder = write_folder(tmp_path, llama_weights(), shards=3)
    index = json.loads((folder / INDEX).read_text())
    assert index["weight_map"]["model.norm.weight"] != SECOND
    index["weight_map"]["model.norm.weight"] = SECOND
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(PacelineError, match=rf"places tensor model\.norm\.weight in {SECOND}"):
        open_checkpoint(folder)


def test_of_two_copies_the_indexed_one_is_read(tmp_path):
    weights = llama_weights()
    folder = write_folder(tmp_path, weights, shards=3)
    first, last = "model.embed_tokens.weight", "model.norm.weight"  # in the shards before and after
    second = load_file(folder / SECOND)
    save_file(second | {name: torch.zeros_like(weights[name]) for name in (first, last)}, folder / SECOND)
    found = read(open_checkpoint(folder))
    assert torch.equal(found[first], weights[first]) and torch.equal(found[last], weights[last])


def test_a_tensor_that_the_index_forgot_is_not_lost(tmp_path):
    """It is either needed or, later, reported as unused: never silently dropped."""
    folder = write_folder(tmp_path, llama_weights(), shards=3)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    assert "model.norm.weight" in open_checkpoint(folder).stored


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"metadata": {}}'])
def test_useless_index(tmp_path, text):
    folder = write_folder(tmp_path, llama_weights(), shards=3)
    (folder / INDEX).write_text(text)
    with pytest.raises(PacelineError, match=r"index\.json"):
        open_checkpoint(folder)


def test_index_may_not_point_outside_the_folder(tmp_path):
    folder = write_folder(tmp_path / "model", llama_weights(), shards=3)
    save_file({"x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"x": "../outside.safetensors"}}')
    with pytest.raises(PacelineError, match="outside"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ([], "has no config.json", "safetensors"),
        (["config.json"], "has no model.safetensors", "weights"),
        (["config.json", "pytorch_model.bin"], "pickled weights", "save_pretrained"),
        (["config.json", "consolidated.00.pth"], "pickled weights", "save_pretrained"),
        (["config.json", "model.Q4_0.gguf"], "has no model.safetensors", "model.Q4_0.gguf"),
        (["config.json", "model-00001-of-00002.safetensors"], "has shards but no", "index"),
    ],
)
def test_folders_that_hold_something_else(tmp_path, files, message, hint):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(PacelineError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert hint in caught.value.hint


def test_config_that_is_not_json(tmp_path):
    folder = write_folder(tmp_path, llama_weights())
    (folder / "config.json").write_text("{,")
    with pytest.raises(PacelineError, match=r"config\.json cannot be read as JSON"):
        open_checkpoint(folder)


def test_unsupported_type_is_named(tmp_path):
    weights = llama_weights()
    weights["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)
    with pytest.raises(PacelineError, match=r"tensor model\.norm\.weight is of type I8"):
        read(open_checkpoint(write_folder(tmp_path, weights)))


def test_gemma_norms_come_out_effective_in_float32(tmp_path):
    w = torch.linspace(-0.5, 0.5, 32, dtype=torch.bfloat16)
    names = [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.pre_feedforward_layernorm.weight",
        "model.layers.0.post_feedforward_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.norm.weight",
    ]
    save_file({n: w.clone() for n in [*names, "model.embed_tokens.weight"]}, tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text", "num_hidden_layers": 1}')
    found = read(open_checkpoint(tmp_path))
    assert found["model.embed_tokens.weight"].dtype == torch.bfloat16
    for name in names:
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], 1.0 + w.float())


def test_multimodal_names_and_vision_part(tmp_path):
    assert canonical_name("language_model.model.norm.weight") == "model.norm.weight"
    assert canonical_name("model.language_model.norm.weight") == "model.norm.weight"
    assert canonical_name("language_model.lm_head.weight") == "lm_head.weight"
    weights = {
        "language_model.model.norm.weight": torch.ones(2),
        "vision_tower.patch.weight": torch.ones(2),
        "multi_modal_projector.weight": torch.ones(2),
    }
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.stored) == ["model.norm.weight"]
    assert sorted(checkpoint.left_out) == ["multi_modal_projector.weight", "vision_tower.patch.weight"]


@pytest.mark.parametrize("shards", [1, 3])
def test_two_tensors_of_one_name_are_refused(tmp_path, shards):
    weights = llama_weights()
    weights["language_model.model.norm.weight"] = weights["model.norm.weight"] + 1
    folder = write_folder(tmp_path / "m", weights, shards=shards)
    with pytest.raises(PacelineError, match=r"holds the weight model\.norm\.weight twice") as caught:
        open_checkpoint(folder)
    assert " language_model.model.norm.weight in model" in str(caught.value)
    assert " model.norm.weight in model" in str(caught.value)
