"""A model as a Hugging Face folder: config.json, model.safetensors and tokenizer files that others read too."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.hf_config import config_from_hf
from paceline.models.home import write_json
from paceline.models.layout import canonical_parts
from paceline.models.tokenizer import Tokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def write_hf_folder(
    folder: Path, config: ModelConfig, prepared: Mapping[str, torch.Tensor], tokenizer: Tokenizer | None
) -> None:
    """Write a model whose weights are in the prepared layout (`models.layout`). Raises PacelineError if it cannot be
    said in Hugging Face's words."""
    from safetensors.torch import save_file

    described = describe(config, prepared["embed"].dtype)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in canonical_weights(config, prepared)}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer)
    write_json(folder / "config.json", described)


def describe(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json, which our own reader understands as `config` again."""
    if config.family not in ARCHITECTURES:
        raise PacelineError(f"a {config.family} model cannot be written as a folder yet")
    windows = set(config.sliding_windows)
    described = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[config.activation],
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_context,
        "rope_parameters": _rope(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": _DTYPES[dtype],
    }
    if config.family == "mistral":
        described["sliding_window"] = config.sliding_windows[0]
    elif windows != {None}:
        described["use_sliding_window"] = True
        described["sliding_window"] = next(window for window in windows if window is not None)
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.sliding_windows]
        described["layer_types"] = kinds
    understood = config_from_hf(described)
    if understood != config:
        other = [name for name in ModelConfig.__slots__ if getattr(understood, name) != getattr(config, name)]
        raise PacelineError(f"the model's {other[0]} cannot be written into a config.json")
    return described


def _rope(rope: RopeConfig) -> dict[str, Any]:
    if rope.freq_factors is not None:
        raise PacelineError("the model's rope has frequency factors of a GGUF file, which config.json has no word for")
    named = {"rope_type": rope.kind, "rope_theta": rope.theta}
    named |= {name: getattr(rope, name) for name in _ROPE_FIELDS.get(rope.kind, ()) if getattr(rope, name) is not None}
    if rope.original_max_position is not None:
        named["original_max_position_embeddings"] = rope.original_max_position
    return named


def canonical_weights(config: ModelConfig, prepared: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Under Hugging Face's names; the inverse of `layout.prepare`, Gemma's norms apart."""
    taken: dict[str, int] = {}
    weights = []
    for name, part in canonical_parts(config).items():
        start = taken.get(part.name, 0)
        taken[part.name] = start + part.shape[0]
        weights.append((name, prepared[part.name][start : taken[part.name]]))
    return weights


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer.backend.save(str(folder / "tokenizer.json"), pretty=False)
    info = tokenizer.info
    tokens = tokenizer.token_strings()
    named: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **info.special_tokens}
    for name, token_id in (("bos_token", info.bos_id), ("eos_token", info.eos_id)):
        if token_id is not None:
            named[name] = tokens[token_id]
    templates = info.chat_templates
    if templates:
        single = templates["default"] if set(templates) == {"default"} else None
        named["chat_template"] = single or [{"name": name, "template": text} for name, text in templates.items()]
    named["clean_up_tokenization_spaces"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(named, ensure_ascii=False, indent=1), encoding="utf-8")
