"""GGUF files: every tensor type, row order, splits, and files that are damaged in every way."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_samples import Raw, Sample, model_sample, tiny_model

from paceline.errors import PacelineError
from paceline.models import gguf as gguf_module
from paceline.models.gguf import open_gguf
from paceline.models.gguf_header import TENSOR_TYPES

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> Raw:
    """Valid blocks of any type: random bytes whose half-precision scales are finite."""
    block, size = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(kind))
    blocks = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scales = {
        "Q4_0": [0],
        "Q4_1": [0, 2],
        "Q5_0": [0],
        "Q5_1": [0, 2],
        "Q8_0": [0],
        "Q4_K": [0, 2],
        "Q5_K": [0, 2],
    }
    for at in scales.get(kind.name, [size - 2]):  # Q6_K's scale stands last
        values = random.uniform(-2, 2, (rows, columns // block)).astype(np.float16)
        blocks[:, :, at : at + 2] = values.view(np.uint8).reshape(rows, columns // block, 2)
    return Raw(blocks.reshape(rows, -1), kind)


def plain(kind: GGMLQuantizationType, rows: int, columns: int) -> Raw:
    values = np.random.default_rng(int(kind)).normal(size=(rows, columns)).astype(np.float32)
    return Raw(gguf.quants.quantize(values, kind), kind)


def mixed_file(folder: Path) -> Path:
    """One tensor of each type, embedding and output among them."""
    tensors = {"token_embd.weight": random_blocks(GGMLQuantizationType.Q6_K, 40, 512)}
    tensors["output.weight"] = random_blocks(GGMLQuantizationType.Q8_0, 40, 512)
    for index, kind in enumerate(TENSOR_TYPES):
        kind = GGMLQuantizationType(kind)
        make = plain if GGML_QUANT_SIZES[kind][0] == 1 else random_blocks
        tensors[f"blk.{index}.ffn_up.weight"] = make(kind, 33, 512)
    return Sample("qwen2", {}, tensors).write(folder / "mixed.gguf")


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_sample(tiny_model("llama")).write(tmp_path_factory.mktemp("gguf") / "llama.gguf")


def test_sizes_of_tensor_types_are_ggufs() -> None:
    assert len(TENSOR_TYPES) == 11
    for type_id, ours in TENSOR_TYPES.items():
        theirs = GGMLQuantizationType(type_id)
        assert (ours.name, ours.block_elements, ours.block_bytes) == (theirs.name, *GGML_QUANT_SIZES[theirs])


@pytest.mark.parametrize("chunk", [1 << 18, 1024])
def test_every_type_is_dequantised_as_gguf_py_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(gguf_module, "CHUNK_ELEMENTS", chunk)  # 1024: chunks of two rows, and a last one of one
    path = mixed_file(tmp_path)
    file = open_gguf(path)
    reference = gguf.GGUFReader(path).tensors
    assert {tensor.tensor_type.name for tensor in reference} == {kind.name for kind in TENSOR_TYPES.values()}
    for tensor in reference:
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.isfinite(expected).all()
        assert torch.equal(file.read(tensor.name, torch.float32), expected), tensor.name
        assert torch.equal(file.read(tensor.name, torch.bfloat16), expected.to(torch.bfloat16)), tensor.name
        assert torch.equal(file.read(tensor.name, torch.float64), expected.double()), tensor.name


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("biased", [False, True])
def test_weights_are_the_models_own(tmp_path: Path, model_type: str, biased: bool) -> None:
    """Names, row order of q and k (4 heads, 2 kv heads), Gemma's norms: those of the model written."""
    bias = {} if model_type in ("mistral", "qwen2") else {"attention_bias": biased}
    model = tiny_model(model_type, tie_word_embeddings=biased, **bias)
    file = open_gguf(model_sample(model).write(tmp_path / "model.gguf"))
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    weights = dict(file.weights(torch.float32))
    assert sorted(weights) == sorted(expected) == sorted(file.weight_names())
    for name, value in expected.items():
        effective = value + 1 if model_type == "gemma3_text" and name.endswith("norm.weight") else value
        assert torch.equal(weights[name], effective), name


def test_quantised_query_rows_are_put_back_in_order(tmp_path: Path) -> None:
    """Rows are moved as blocks: the values must be those of rows moved after dequantisation."""
    blocks = random_blocks(GGMLQuantizationType.Q4_K, 128, 256)
    values = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}
    tensors = {"blk.0.attn_q.weight": blocks, "blk.0.attn_k.weight": blocks, "blk.0.attn_v.weight": blocks}
    file = open_gguf(Sample("llama", values, tensors).write(tmp_path / "q.gguf"))
    stored = torch.from_numpy(gguf.quants.dequantize(blocks.blocks, blocks.type))

    def restored(heads: int) -> torch.Tensor:
        head_dim = 128 // heads
        order = [h * head_dim + half + 2 * i for h in range(heads) for half in (0, 1) for i in range(head_dim // 2)]
        return stored[order]

    assert torch.equal(file.read("blk.0.attn_q.weight", torch.float32), restored(4))
    assert torch.equal(file.read("blk.0.attn_k.weight", torch.float32), restored(2))
    assert torch.equal(file.read("blk.0.attn_v.weight", torch.float32), stored)


def test_unknown_tensors_keep_their_name(tmp_path: Path) -> None:
    sample = model_sample(tiny_model("qwen3"))
    sample.tensors["blk.0.ssm_conv1d.weight"] = np.zeros((2, 32))
    assert "blk.0.ssm_conv1d.weight" in open_gguf(sample.write(tmp_path / "x.gguf")).weight_names()


def test_rope_factors_are_no_weight(tmp_path: Path) -> None:
    sample = model_sample(tiny_model("llama"))
    sample.tensors["rope_freqs.weight"] = np.ones(16)
    file = open_gguf(sample.write(tmp_path / "x.gguf"))
    assert not any("rope" in name for name in [*file.weight_names(), *dict(file.weights(torch.float32))])


# --- files that are not what they should be ---


def error_of(path: Path) -> str:
    with pytest.raises(PacelineError) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value) and path.name.split("-")[0] in str(caught.value)
    return str(caught.value)


def test_cut_short_anywhere(llama_file: Path, tmp_path: Path) -> None:
    whole, path = llama_file.read_bytes(), tmp_path / "cut.gguf"
    for size in [*range(4, 3000, 131), *range(3000, len(whole), 20011), len(whole) - 33]:
        path.write_bytes(whole[:size])
        assert "cut short" in error_of(path), size
    path.write_bytes(whole)
    assert len(open_gguf(path).tensors) == 21


def test_what_is_cut_is_named(llama_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama_file.read_bytes()[:-100])
    last = max(open_gguf(llama_file).tensors.values(), key=lambda tensor: tensor.offset)
    end = last.offset + last.num_rows * last.row_bytes
    message = error_of(path)
    assert repr(last.name) in message and str(end) in message and str(path.stat().st_size) in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "cut short"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IQ", 8, 10) + b"short",
            "cut short",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "value type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 61), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1), "array of arrays"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff", "damaged"),
    ],
)
def test_damaged_headers(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert says in error_of(path)


def test_no_such_file(tmp_path: Path) -> None:
    assert "no such file" in error_of(tmp_path / "none.gguf")
    assert "no such file" in error_of(tmp_path)


def test_big_endian_file(tmp_path: Path) -> None:
    sample = model_sample(tiny_model("llama"))
    assert "big-endian" in error_of(sample.write(tmp_path / "big.gguf", endianess=gguf.GGUFEndian.BIG))


@pytest.mark.parametrize(("type_id", "says"), [(99, "type 99"), (23, "IQ4_XS (23)"), (26, "I32 (26)")])
def test_other_tensor_types_are_named(llama_file: Path, tmp_path: Path, type_id: int, says: str) -> None:
    data, name = bytearray(llama_file.read_bytes()), b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # number of dimensions, dimensions
    assert struct.unpack_from("<I", data, at) == (0,)
    struct.pack_into("<I", data, at, type_id)
    path = tmp_path / "typed.gguf"
    path.write_bytes(data)
    assert says in error_of(path) and "'blk.1.ffn_up.weight'" in error_of(path)


def test_offset_beyond_the_end(llama_file: Path, tmp_path: Path) -> None:
    data, name = bytearray(llama_file.read_bytes()), b"blk.1.ffn_up.weight"
    struct.pack_into("<Q", data, data.index(name) + len(name) + 4 + 2 * 8 + 4, 1 << 40)
    path = tmp_path / "far.gguf"
    path.write_bytes(data)
    assert "'blk.1.ffn_up.weight'" in error_of(path)


def test_row_that_is_no_whole_block(tmp_path: Path) -> None:
    data = bytearray(mixed_file(tmp_path).read_bytes())
    name = b"blk.2.ffn_up.weight"  # Q4_0
    at = data.index(name) + len(name) + 4
    assert struct.unpack_from("<Q", data, at) == (512,)
    struct.pack_into("<Q", data, at, 500)
    (tmp_path / "odd.gguf").write_bytes(data)
    assert "Q4_0" in error_of(tmp_path / "odd.gguf")


# --- split files ---


def write_split(folder: Path) -> list[Path]:
    sample = model_sample(tiny_model("llama"))
    writer_path = folder / "model.gguf"
    sample.write(writer_path, split_max_tensors=8)
    return sorted(folder.glob("model-*.gguf"))


def test_split_file_is_the_whole(llama_file: Path, tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    assert len(parts) == 3
    whole = dict(open_gguf(llama_file).weights(torch.float32))
    for given in parts:  # any part stands for all
        file = open_gguf(given)
        weights = dict(file.weights(torch.float32))
        assert weights.keys() == whole.keys()
        assert all(torch.equal(weights[name], value) for name, value in whole.items())
        assert file.metadata["llama.block_count"] == 2
        assert list(file.parts) == parts


def test_missing_part_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[1].unlink()
    assert "model-00002-of-00003.gguf is missing" in error_of(parts[0])


def test_cut_part_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[2].write_bytes(parts[2].read_bytes()[:-200])
    assert "model-00003-of-00003.gguf" in error_of(parts[0])


def test_parts_that_changed_places(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[2].write_bytes(parts[1].read_bytes())
    assert "holds part 2 of 3, its name says 3 of 3" in error_of(parts[0])


def test_renamed_part(tmp_path: Path) -> None:
    renamed = write_split(tmp_path)[0].rename(tmp_path / "model.gguf")
    assert "one of 3 parts" in error_of(renamed)


def test_part_of_another_split(tmp_path: Path) -> None:
    """Same names, another number of tensors: the count in the first part tells."""
    parts = write_split(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    sample = model_sample(tiny_model("llama"))
    del sample.tensors["output_norm.weight"]
    sample.write(other / "model.gguf", split_max_tensors=8)
    parts[2].write_bytes((other / parts[2].name).read_bytes())
    message = error_of(parts[0])
    assert "21" in message or "another part" in message
