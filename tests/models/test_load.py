"""From a name to a decoder: where it is looked for, what is refused, and what comes out."""

import json
import logging
import os

import pytest
import torch
from tiny_files import byte_alphabet, llama_weights, write_folder, write_gguf

from paceline.errors import PacelineError
from paceline.models import gguf, load, sources
from paceline.models.hub import PATTERNS, WITHOUT_WEIGHTS, HubId
from paceline.models.load import FolderSource, GGUFSource, load_model, resolve
from paceline.models.precision import precision_of
from paceline.ops.native import library

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


# --- names ----------------------------------------------------------------------------------------


def test_order_of_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "pull", lambda entry, progress: tmp_path / f"{entry.alias}.gguf")
    monkeypatch.setattr(HubId, "fetch", lambda self, patterns=(): tmp_path / "snapshot")
    assert resolve("smollm2-135m") == GGUFSource(tmp_path / "smollm2-135m.gguf")
    assert resolve("owner/name") == FolderSource(tmp_path / "snapshot")
    (tmp_path / "snapshot").write_text("a file")
    assert resolve("owner/name:f.gguf") == GGUFSource(tmp_path / "snapshot")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve("owner/name").path.resolve() == tmp_path / "owner" / "name"
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve("smollm2-135m").path.resolve() == tmp_path / "smollm2-135m"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm", "did you mean smollm2-135m?"),
        ("zzz", "`paceline models` lists the catalog"),
        ("./owner/name", "`paceline models` lists the catalog"),
        ("/no/such/file.gguf", "`paceline models` lists the catalog"),
        ("~nobody-of-this-name/model", "`paceline models` lists the catalog"),
        ("a\0b", "`paceline models` lists the catalog"),
        (5000 * "a", "`paceline models` lists the catalog"),
    ],
    ids=lambda value: value[:20],
)
def test_unknown_name(name, hint):
    with pytest.raises(PacelineError, match=r"no model .*no such folder or file") as caught:
        load_model(name)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"device": "abacus"}, "unknown device 'abacus'"),
        ({"device": "meta"}, "device type 'meta' is not supported"),
        ({"device": "cuda:99"}, "device cuda:99 is not available"),
        ({"max_context": 0}, "max_context 0 is not possible: the model has 64 positions"),
        ({"max_context": 65}, "max_context 65 is not possible"),
    ],
)
def test_impossible_options(tmp_path, option, message):
    folder = write_folder(tmp_path / "m", llama_weights())
    with pytest.raises(PacelineError, match=message):
        load_model(str(folder), **option)


# --- safetensors folders --------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_folder(tmp_path, shards):
    weights = llama_weights()
    model = load_model(str(write_folder(tmp_path / "m", weights, shards)), max_context=40)
    assert (model.precision, model.tokenizer, model.notes) == ("bf16", None, ())
    assert model.origin == f"folder {tmp_path / 'm'}"
    assert model.config.max_context == model.decoder.config.max_context == 40
    assert same(model.decoder.embedding, weights[EMBEDDINGS])
    assert same(model.decoder.norm, weights["model.norm.weight"])


@pytest.mark.parametrize(
    ("stored", "asked", "precision", "dtype"),
    [
        (torch.float32, "auto", "fp32", torch.float32),
        (torch.float64, "auto", "fp64", torch.float64),
        (torch.bfloat16, "auto", "bf16", torch.bfloat16),
        (torch.float16, "auto", "fp32", torch.float32),
        (torch.float32, "bf16", "bf16", torch.bfloat16),
        (torch.bfloat16, "float64", "fp64", torch.float64),
    ],
)
def test_precision(tmp_path, stored, asked, precision, dtype):
    weights = llama_weights(stored)
    model = load_model(str(write_folder(tmp_path / "m", weights)), dtype=asked)
    assert model.precision == precision
    assert same(model.decoder.embedding, weights[EMBEDDINGS].to(dtype))
    assert bool(model.notes) == (stored == torch.float16)


def parts(folder) -> sources.ModelParts:
    return FolderSource(folder).read(None, load.silent)


def test_tied_without_head(tmp_path):
    folder = write_folder(tmp_path, llama_weights(tied=True), tie_word_embeddings=True)
    assert "head" not in parts(folder).weights
    assert parts(folder).notes == ()


def test_untied_with_head(tmp_path):
    weights = llama_weights()
    assert same(parts(write_folder(tmp_path, weights)).weights["head"], weights[HEAD])


def test_untied_without_head_is_refused(tmp_path):
    with pytest.raises(PacelineError, match=r"weight lm_head\.weight is missing"):
        parts(write_folder(tmp_path, llama_weights(tied=True)))


@pytest.mark.parametrize("equal", [True, False])
def test_tied_with_an_extra_head(tmp_path, equal):
    """The configuration wins, and it is said (transformers 5 would untie a head that differs)."""
    weights = llama_weights()
    if equal:
        weights[HEAD] = weights[EMBEDDINGS].clone()
    found = parts(write_folder(tmp_path, weights, tie_word_embeddings=True))
    assert "head" not in found.weights
    assert found.notes[0] == "not used: lm_head.weight"
    assert [("differs from the embeddings" in note) for note in found.notes[1:]] == ([] if equal else [True])


def test_missing_weight(tmp_path):
    weights = llama_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(PacelineError, match=r"weight model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        parts(write_folder(tmp_path, weights))


def test_unused_weight(tmp_path):
    """Qwen2's biases in a file whose configuration says Llama: dropping them would change every token."""
    weights = llama_weights() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    with pytest.raises(PacelineError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias has no place in a llama"):
        parts(write_folder(tmp_path, weights))


def test_inert_leftovers_are_named(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    found = parts(write_folder(tmp_path, llama_weights() | {name: torch.zeros(4)}))
    assert found.notes == (f"not used: {name}",)


def test_wrong_shape(tmp_path):
    weights = llama_weights() | {"model.norm.weight": torch.zeros(31)}
    folder = write_folder(tmp_path, weights)
    with pytest.raises(PacelineError, match=r"model\.norm\.weight has shape \[31\], .*\[32\]") as caught:
        parts(folder)
    assert str(folder) in str(caught.value) and caught.value.hint


# --- GGUF files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "dtype"), [("auto", torch.bfloat16), ("fp32", torch.float32)])
def test_gguf_equals_the_folder_it_was_made_from(tmp_path, asked, dtype):
    weights = llama_weights(torch.float32)
    path = write_gguf(tmp_path / "m.gguf", weights)
    found = GGUFSource(path).read(precision_of(asked), load.silent)
    expected = FolderSource(write_folder(tmp_path / "m", weights)).read(found.precision, load.silent)
    assert found.weights.keys() == expected.weights.keys()
    assert all(same(found.weights[name].clone(), expected.weights[name]) for name in expected.weights)
    assert found.weights["embed"].dtype == dtype
    assert found.tokenizer.decode(found.tokenizer.encode("é 😊\n", add_special=False)) == "é 😊\n"


@pytest.mark.parametrize(("cap", "asked", "packed", "precision"), [
    ("portable", "auto", True, "file"),
    ("portable", "auto", False, "bf16"),
    ("portable", "fp32", True, "fp32"),
    ("torch", "auto", True, "bf16"),
])  # fmt: skip
def test_a_gguf_stays_as_it_is_stored_where_that_runs(tmp_path, monkeypatch, cap, asked, packed, precision):
    if isinstance(library.load(), library.Missing):
        pytest.skip("no native operators")
    monkeypatch.setenv(library.VARIABLE, cap)
    model = load_model(str(write_gguf(tmp_path / "m.gguf", llama_weights())), dtype=asked, packed=packed)
    assert model.precision == precision
    assert bool(list(model.decoder.packed_linears())) == (precision == "file")


def test_a_folder_keeps_its_precision_packed_or_not(tmp_path):
    folder = write_folder(tmp_path / "m", llama_weights())
    assert {load_model(str(folder), packed=packed).precision for packed in (True, False)} == {"bf16"}


def test_second_start_does_not_open_the_gguf(tmp_path, caplog):
    """Its bytes may even be gone, as long as size and modification time say that nothing has changed."""
    path = write_gguf(tmp_path / "m.gguf", llama_weights())
    first = load_model(str(path))
    stat = path.stat()
    path.write_bytes(bytes(stat.st_size))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with caplog.at_level(logging.WARNING):
        second = load_model(str(path))
    assert same(second.decoder.embedding, first.decoder.embedding)
    assert second.config == first.config
    assert second.tokenizer.encode("a1", False) == first.tokenizer.encode("a1", False)
    assert caplog.records == []


def test_a_changed_gguf_is_prepared_anew(tmp_path):
    weights = llama_weights()
    path = write_gguf(tmp_path / "m.gguf", weights)
    load_model(str(path), dtype="bf16")
    weights[EMBEDDINGS] = -weights[EMBEDDINGS]
    write_gguf(path, weights)
    os.utime(path, ns=(1, 1))  # a clock tick may be longer than this test
    assert same(load_model(str(path), dtype="bf16").decoder.embedding, weights[EMBEDDINGS])


def test_a_copy_under_another_name_shares_the_prepared_weights(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", llama_weights())
    load_model(str(path))
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(GGUFSource, "_recipe", lambda self, dtype: pytest.fail("prepared twice"))
    load_model(str(copy))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 not a model"])
def test_a_file_that_is_not_gguf_is_refused_before_it_is_hashed(tmp_path, monkeypatch, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    monkeypatch.setattr(sources, "file_sha256", lambda *args: pytest.fail("read the whole file"))
    with pytest.raises(PacelineError, match=r"m\.gguf"):
        load_model(str(path))


def test_a_cut_gguf_leaves_nothing_prepared(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_weights())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PacelineError, match="cut short"):
        load_model(str(path))
    assert not (tmp_path / "home" / "prepared").exists()


def test_a_missing_part_is_named(tmp_path):
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", llama_weights())
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(b"")
    with pytest.raises(PacelineError, match=r"m-00003-of-00003\.gguf is missing"):
        load_model(str(path))


def test_parts_are_found_from_any_of_them(tmp_path):
    names = [f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert all([part.name for part in GGUFSource(tmp_path / name).parts()] == names for name in names)


def test_missing_gguf_weight_leaves_nothing_prepared(tmp_path):
    weights = llama_weights()
    del weights["model.norm.weight"]
    path = write_gguf(tmp_path / "m.gguf", weights)
    with pytest.raises(PacelineError, match=r"weight model\.norm\.weight is missing"):
        load_model(str(path))
    assert [p for p in (tmp_path / "home" / "prepared").iterdir() if p.suffix != ".lock"] == []
    assert gguf.open_gguf(path).tensors  # the file itself is sound


# --- tokenizers -----------------------------------------------------------------------------------


def add_tokenizer(folder, added=()):
    """A byte-level tokenizer of 258 tokens, the model's own number, and `added` ones."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*byte_alphabet(), "th", "<|endoftext|>"]
    backend = Backend(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=[("t", "h")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    hf.add_tokens(list(added))
    hf.save_pretrained(str(folder))
    return folder


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_refused(tmp_path):
    folder = add_tokenizer(write_folder(tmp_path / "m", llama_weights()), ["<|im_start|>", "<|im_end|>"])
    with pytest.raises(PacelineError, match=r"its tokenizer has 260 tokens, the model's vocabulary 258"):
        load_model(str(folder))


@pytest.mark.parametrize("added", [[], ["<image_soft_token>"]])
def test_a_tokenizer_that_fits(tmp_path, added):
    """The placeholder is what Gemma 3's text models share with the multimodal ones."""
    folder = add_tokenizer(write_folder(tmp_path / "m", llama_weights()), added)
    assert load_model(str(folder)).tokenizer.vocab_size == 258 + len(added)


def test_the_tokenizers_own_end_ends_an_answer_too(tmp_path):
    """The configuration may name another, or none: each of the files may be the only one that knows."""
    folder = add_tokenizer(write_folder(tmp_path / "m", llama_weights()))
    settings = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [5, 6]}
    (folder / "config.json").write_text(json.dumps(settings))
    model = load_model(str(folder))
    assert model.config.eos_token_ids == model.decoder.config.eos_token_ids == (5, 6, 257)


def test_a_gguf_tokenizer_with_ids_beyond_the_vocabulary_is_refused(tmp_path):
    weights = llama_weights()
    for name in (EMBEDDINGS, HEAD):
        weights[name] = weights[name][:200]
    with pytest.raises(PacelineError, match=r"258 tokens, the model's vocabulary 200|token is 257"):
        load_model(str(write_gguf(tmp_path / "m.gguf", weights)))


def refuse(tokenizer):
    raise PacelineError(f"no {tokenizer.vocab_size}")


def test_a_tokenizer_that_is_not_accepted_costs_no_weights(tmp_path, monkeypatch):
    folder = add_tokenizer(write_folder(tmp_path / "m", llama_weights()))
    file = write_gguf(tmp_path / "m.gguf", llama_weights())
    monkeypatch.setattr(sources, "prepare", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(gguf.GgufFile, "weights", lambda *_: pytest.fail("weights were read"))
    for name in (folder, file):
        with pytest.raises(PacelineError, match="no 258"):
            load_model(str(name), accept=refuse)
    assert not list((tmp_path / "home" / "prepared").glob("[!.]*"))


def test_a_prepared_model_is_checked_too(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", llama_weights())
    load_model(str(file))
    with pytest.raises(PacelineError, match="no 258"):
        load_model(str(file), accept=refuse)


def test_of_a_hub_model_the_tokenizer_is_fetched_first(tmp_path, monkeypatch):
    folder = add_tokenizer(write_folder(tmp_path / "m", llama_weights()))
    asked = []
    monkeypatch.setattr(HubId, "fetch", lambda self, patterns=PATTERNS: asked.append(patterns) or folder)
    with pytest.raises(PacelineError, match="no 258"):
        load_model("owner/name", accept=refuse)
    assert asked == [WITHOUT_WEIGHTS]
    assert load_model("owner/name", accept=lambda tokenizer: None).tokenizer is not None
    assert asked[1:] == [WITHOUT_WEIGHTS, PATTERNS]
