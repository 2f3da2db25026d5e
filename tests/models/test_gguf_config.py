"""Configuration from GGUF metadata, against transformers' for the model that was written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_samples import model_sample, tiny_model

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig, inverse_frequencies
from paceline.models.gguf import open_gguf
from paceline.models.gguf_config import config_from_gguf, end_token_ids, shortest_float
from paceline.models.gguf_metadata import Metadata
from paceline.models.hf_config import config_from_hf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def read(sample: Any, folder: Path) -> ModelConfig:
    return config_from_gguf(open_gguf(sample.write(folder / "model.gguf")))


def error_of(sample: Any, folder: Path) -> str:
    with pytest.raises(PacelineError) as caught:
        read(sample, folder)
    assert "\n" not in str(caught.value) and "model.gguf" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "changes", "keys"),
    [
        ("llama", {}, {}),
        ("llama", {"head_dim": 16, "rms_norm_eps": 1e-5}, {"attention__key_length": None}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope__freq_base": 5e5}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        ),
        (
            "qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.25,
                    "beta_fast": 16.0,
                    "beta_slow": 2.0,
                }
            },
            {
                "rope__freq_base": 1e6,
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 64,
                "rope__scaling__yarn_attn_factor": 1.25,
                "rope__scaling__yarn_beta_fast": 16.0,
                "rope__scaling__yarn_beta_slow": 2.0,
            },
        ),
        ("mistral", {"sliding_window": 48}, {"attention__sliding_window": 48}),
        ("qwen2", {"tie_word_embeddings": True, "head_dim": 16}, {}),
        ("qwen3", {}, {"rope__dimension_count": 32}),
        (
            "gemma3_text",
            {"num_hidden_layers": 12, "sliding_window": 24, "query_pre_attn_scalar": 32},
            {"rope__freq_base": 1e6, "attention__sliding_window": 24},
        ),
        (
            "gemma3_text",
            {
                "num_hidden_layers": 6,
                "sliding_window": 24,
                "query_pre_attn_scalar": 32,
                "layer_types": ["full_attention", "sliding_attention"] * 3,
            },
            {
                "rope__freq_base": 1e6,
                "attention__sliding_window": 24,
                "attention__sliding_window_pattern": [False, True] * 3,
            },
        ),
    ],
)
def test_config_equals_transformers(
    tmp_path: Path, model_type: str, changes: dict[str, Any], keys: dict[str, Any]
) -> None:
    model = tiny_model(model_type, **changes)
    ours = read(model_sample(model, **keys), tmp_path)
    theirs = config_from_hf(model.config.to_dict())
    assert ours == theirs


def test_gemma_27b_scales_by_its_width(tmp_path: Path) -> None:
    """62 layers are the 27B model: query_pre_attn_scalar 168 = 5376 / 32 there, head_dim elsewhere."""
    sample = model_sample(tiny_model("gemma3_text"), block_count=62)
    sample.tensors |= {f"filler.{n}": sample.tensors["output_norm.weight"] for n in range(62)}
    assert read(sample, tmp_path).attention_scale == (64 / 4) ** -0.5


def test_llama3_factors_come_as_a_tensor(tmp_path: Path) -> None:
    """`rope_freqs.weight` as the converter computes it gives transformers' llama3 frequencies."""
    model = tiny_model("llama", rope_parameters=LLAMA3)
    sample = model_sample(model, rope__freq_base=5e5)
    frequencies = 1.0 / (5e5 ** (np.arange(0, 32, 2) / 32))
    wavelengths = 2 * np.pi / frequencies
    smooth = np.clip((32 / wavelengths - 1.0) / 3.0, 0, 1)
    sample.tensors["rope_freqs.weight"] = 1 / ((1 - smooth) / 8 + smooth)
    ours = read(sample, tmp_path)
    assert ours.rope.freq_factors is not None and len(ours.rope.freq_factors) == 16
    assert ours.rope.freq_factors[0] == 1 and ours.rope.freq_factors[-1] == 8
    theirs = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(inverse_frequencies(ours.rope, 32, 256)[0], theirs, rtol=1e-6, atol=0)
    assert ModelConfig.from_json(ours.to_json()) == ours


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "context_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_missing_key_is_named(tmp_path: Path, key: str) -> None:
    sample = model_sample(tiny_model("qwen3"))
    sample.values[f"qwen3.{key}"] = None
    assert f"'qwen3.{key}' is missing" in error_of(sample, tmp_path)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"expert_count": 8}, "mixture-of-experts"),
        ({"rope__dimension_count": 16}, "'llama.rope.dimension_count' is 16"),
        ({"attention__value_length": 64}, "'llama.attention.value_length' is 64, but key_length is 32"),
        ({"rope__scaling__type": "longrope"}, "'longrope'"),
        ({"attention__head_count_kv": [2, 4]}, "'llama.attention.head_count_kv' differs between layers"),
        ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping"),
        ({"block_count": 0}, "'llama.block_count' is 0"),
        ({"context_length": "long"}, "'llama.context_length' is 'long'"),
        ({"attention__layer_norm_rms_epsilon": 0.0}, "'llama.attention.layer_norm_rms_epsilon' is 0.0"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "'llama.attention.layer_norm_rms_epsilon' is nan"),
        ({"block_count": 10**9}, "'llama.block_count' is 1000000000, but there are only 21 tensors"),
        ({"embedding_scale": 12.0}, "'llama.embedding_scale' is not supported"),
        ({"residual_scale": 0.22}, "'llama.residual_scale' is not supported"),
        ({"logit_scale": 0.0625}, "'llama.logit_scale' is not supported"),
        ({"attention__clamp_kqv": 8.0}, "'llama.attention.clamp_kqv' is not supported"),
        ({"attention__causal": False}, "'llama.attention.causal' is not supported"),
        ({"attention__scale": -1.0}, "'llama.attention.scale' is -1.0"),
        ({"attention__of_tomorrow": 2}, "'llama.attention.of_tomorrow' is not supported"),
        ({"rope__scaling__factor": 0.0}, "'llama.rope.scaling.factor' is 0.0"),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, "a scaling factor of 4.0 is given"),
        ({"attention__sliding_window": 16, "attention__sliding_window_pattern": "x"}, "pattern' is 'x'"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    assert says in error_of(model_sample(tiny_model("llama"), **keys), tmp_path)


def test_neutral_values_change_nothing(tmp_path: Path) -> None:
    neutral = {"embedding_scale": 1.0, "attention__causal": True, "attention__clamp_kqv": 0.0, "attention__scale": 0.0}
    model = tiny_model("llama")
    assert read(model_sample(model, **neutral), tmp_path) == config_from_hf(model.config.to_dict())


def test_an_attention_scale_is_honoured(tmp_path: Path) -> None:
    assert read(model_sample(tiny_model("llama"), attention__scale=0.25), tmp_path).attention_scale == 0.25


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix"])
def test_a_file_that_holds_no_model(tmp_path: Path, kind: str) -> None:
    sample = model_sample(tiny_model("llama"))
    sample.values["general.type"] = kind
    assert f"general.type is {kind!r}" in error_of(sample, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("eos_token_id", "x", "'tokenizer.ggml.eos_token_id' is 'x', not a whole number"),
        ("eos_token_id", 96, "end-of-sequence token is 96"),
        ("bos_token_id", 1.5, "'tokenizer.ggml.bos_token_id' is 1.5"),
        ("token_type", 3, "'tokenizer.ggml.token_type' is 3, not a list of whole numbers"),
        ("tokens", [1, 2], "'tokenizer.ggml.tokens' is [1, 2], not a list of texts"),
    ],
)
def test_wrongly_typed_tokenizer_keys(tmp_path: Path, key: str, value: Any, says: str) -> None:
    sample = model_sample(tiny_model("llama"))
    sample.values[f"tokenizer.ggml.{key}"] = value
    assert says in error_of(sample, tmp_path)


@pytest.mark.parametrize("factors", [np.ones(8), np.ones((2, 8)), np.zeros(16), np.full(16, np.nan)])
def test_frequency_factors_that_cannot_be(tmp_path: Path, factors: Any) -> None:
    sample = model_sample(tiny_model("llama"))
    sample.tensors["rope_freqs.weight"] = factors
    says = error_of(sample, tmp_path)
    assert "'rope_freqs.weight' has shape" in says or "a frequency factor of the rope is" in says


@pytest.mark.parametrize("arch", ["mamba", "qwen2moe", "phi3", "gemma2"])
def test_other_architectures_are_named(tmp_path: Path, arch: str) -> None:
    sample = model_sample(tiny_model("llama"))
    sample.arch = arch
    assert f"architecture {arch!r} is not supported" in error_of(sample, tmp_path)


def test_a_window_for_unknown_layers_is_refused(tmp_path: Path) -> None:
    """Qwen2 slides in its upper layers only, and GGUF has no key for which: neither ignored nor guessed."""
    message = error_of(model_sample(tiny_model("qwen2"), attention__sliding_window=64), tmp_path)
    assert "'qwen2.attention.sliding_window' is 64" in message


def test_end_tokens_are_all_that_end_a_turn() -> None:
    tokens = ["<s>", "</s>", "<|eot_id|>", "<|im_end|>", "x", "<|endoftext|>"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 3]}
    metadata |= {"tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 2}
    # those named first; <|im_end|> is ordinary text in this vocabulary
    assert end_token_ids(Metadata(Path("m.gguf"), metadata, "tokenizer.ggml.")) == (4, 2, 1, 5)


@pytest.mark.parametrize("value", [1e-6, 1e-5, 5e5, 1e6, 10000.0, 1.25, 0.1, 3.1415927])
def test_floats_are_what_was_written(value: float) -> None:
    assert shortest_float(float(np.float32(value))) == value
