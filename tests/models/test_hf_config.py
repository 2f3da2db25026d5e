"""`config.json`: every value is honoured or refused in one line that names its key."""

import copy
import json
from typing import Any

import pytest
import tiny
from tiny_files import llama_weights, write_folder

from paceline.errors import PacelineError
from paceline.models.hf_config import check_layer_count, config_from_hf
from paceline.models.load import load_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}


def plain(family: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {**tiny.hf_config(family).to_dict(), **changes}
    return config


def refusal(family: str, **changes: Any) -> str:
    with pytest.raises(PacelineError) as caught:
        config_from_hf(plain(family, **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("partial_rotary_factor", 0.5),
        ("no_rope_layers", [1, 0]),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("logit_scale", 0.0625),
        ("logits_scaling", 8.0),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("attention_multiplier", 0.0156),
        ("clip_qkv", 8.0),
        ("use_bidirectional_attention", True),
        ("is_causal", False),
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("attention_chunk_size", 8192),
    ],
)
def test_what_would_change_the_logits_is_refused_by_name(family: str, key: str, value: Any) -> None:
    assert f"{key} is not supported" in refusal(family, **{key: value})


@pytest.mark.parametrize("family", FAMILIES)
def test_values_that_change_nothing_are_accepted(family: str) -> None:
    neutral = {"partial_rotary_factor": 1.0, "logit_scale": 1.0, "is_causal": True, "final_logit_softcapping": None}
    assert config_from_hf(plain(family, **neutral)) == config_from_hf(plain(family))


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("llama", {"sliding_window": 64}, "sliding_window is not supported"),
        ("llama", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("mistral", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "there is no sliding_window"),
        ("gemma3", {"hidden_act": "silu"}, "hidden_act"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("llama", {"text_config": 3}, "text_config is 3"),
        ("llama", {"hidden_act": "relu"}, "activation 'relu'"),
    ],
)
def test_what_a_family_does_not_do(family: str, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(family, **changes)


def test_a_multimodal_configuration_is_checked_at_both_levels() -> None:
    outer = {"model_type": "gemma3", "text_config": plain("gemma3"), "quantization_config": {"bits": 4}}
    with pytest.raises(PacelineError, match="quantization_config is not supported"):
        config_from_hf(outer)


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_type": "linear", "rope_theta": 1e4}, "'linear' needs factor"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 0}, "factor is 0"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": "4"}, "factor is '4'"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_type": "default", "rope_theta": 1e4, "factor": 4.0}, "factor is not supported for rope type 'default'"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}, "mrope_section is not supported"),
        ({**YARN, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta is not supported"),
        ({**YARN, "attn_factor": 2.0}, "attn_factor is not supported"),
        ({**YARN, "beta_fast": float("nan")}, "beta_fast is nan"),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}, "'llama3' needs high_freq_factor"),
        ({"full_attention": {"rope_type": "default", "rope_theta": 1e4}}, "full_attention is not supported"),
        ("yarn", "rope_parameters is 'yarn'"),
    ],
)
def test_rope_parameters(rope: Any, says: str) -> None:
    with pytest.raises(PacelineError) as caught:
        config_from_hf(plain("llama", rope_parameters=rope))
    assert says in str(caught.value)


def test_two_rope_spellings_that_differ() -> None:
    assert "both given" in refusal("llama", rope_scaling=YARN)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [], {}, 10**12])
@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "max_position_embeddings"],
)
def test_impossible_sizes(family: str, key: str, value: Any) -> None:
    assert f"{key} is {value!r}" in refusal(family, **{key: value})


@pytest.mark.parametrize("value", [0, -1e-6, float("nan"), float("inf"), "1e-6", True])
def test_impossible_eps(value: Any) -> None:
    assert f"rms_norm_eps is {value!r}" in refusal("llama", rms_norm_eps=value)


@pytest.mark.parametrize("value", ["</s>", 1.5, -1, [2, "x"], True, 10**6, [1, 256]])
@pytest.mark.parametrize("place", ["config", "generation_config"])
def test_impossible_end_tokens(place: str, value: Any) -> None:
    parts: dict[str, dict[str, Any]] = {"config": plain("llama", vocab_size=256), "generation_config": {}}
    parts[place]["eos_token_id"] = value
    with pytest.raises(PacelineError, match=r"eos_token_id is|end-of-sequence token is"):
        config_from_hf(parts["config"], parts["generation_config"])


def test_heads_without_a_dimension() -> None:
    assert "head_dim is 0" in refusal("qwen2", hidden_size=2, num_attention_heads=4)


def test_the_given_configuration_is_left_alone() -> None:
    config = plain("llama", rope_parameters=dict(YARN))
    before = copy.deepcopy(config)
    config_from_hf(config)
    assert config == before


def test_the_number_of_layers_is_compared_with_the_tensors_first(tmp_path, monkeypatch) -> None:
    folder = write_folder(tmp_path / "m", llama_weights(), num_hidden_layers=10**8)
    with pytest.raises(PacelineError, match=r"config\.json: num_hidden_layers is 100000000, but there are only 21 ten"):
        load_model(str(folder))
    check_layer_count({"num_hidden_layers": 2}, ["a", "b"])


def test_an_error_names_the_file(tmp_path) -> None:
    folder = write_folder(tmp_path / "m", llama_weights())
    flaws: list[tuple[str, Any, str]] = [
        ("rms_norm_eps", -1, "rms_norm_eps is -1"),
        # newer releases of transformers find it first, in words of their own
        ("num_attention_heads", 3, r".*(number of attention heads \(3\)|num_heads 3 is not a multiple)"),
        ("hidden_size", "big", "hidden_size is 'big'"),
        ("hidden_size", -4, "hidden_size is -4"),
    ]
    for key, value, says in flaws:
        (folder / "config.json").write_text(json.dumps(plain("llama", **{key: value})))
        with pytest.raises(PacelineError, match=rf"m/config\.json: {says}") as caught:
            load_model(str(folder))
        assert caught.value.hint
