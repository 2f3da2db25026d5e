"""Tiny random models of every family: transformers' own, and ours with the same weights.

Weights have a standard deviation of 0.35: with the usual 0.02 a model hardly looks at its context, and faults of cache
and positions stay invisible.
"""

from collections.abc import Iterator

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from paceline.models.decoder import Decoder
from paceline.models.hf_config import config_from_hf
from paceline.models.layout import prepare

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def hf_config(family: str, **changes: object) -> PretrainedConfig:
    """Small, with each family's own traits switched on."""
    match family:
        case "llama":
            return LlamaConfig(**{**SHAPE, "rope_parameters": LLAMA3_ROPE, **changes})
        case "mistral":
            return MistralConfig(**{**SHAPE, "sliding_window": 20, **changes})
        case "qwen2":
            return Qwen2Config(**{**SHAPE, **changes})
        case "qwen3":
            return Qwen3Config(**{**SHAPE, "head_dim": 32, **changes})
        case "gemma3":
            local = {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32, "num_hidden_layers": 7}
            return Gemma3TextConfig(**{**SHAPE, **local, **changes})
    raise ValueError(family)


def hf_model(config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """transformers' model with random weights, norms away from 1 and biases away from 0."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    centre = 0.0 if config.model_type == "gemma3_text" else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
            parameter.copy_(centre + 0.15 * noise if "norm" in name else 0.35 * noise)
    return model


def canonical_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.state_dict().items():
        gemma_norm = model.config.model_type == "gemma3_text" and name.endswith("norm.weight")
        yield name, 1.0 + tensor.float() if gemma_norm else tensor


def decoder_of(model: PreTrainedModel, dtype: torch.dtype) -> Decoder:
    """Our decoder with the model's weights."""
    config = config_from_hf(model.config.to_dict())
    return Decoder(config, dict(prepare(config, canonical_weights(model), dtype)), dtype)


def tiny_decoder(
    family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> Decoder:
    return decoder_of(hf_model(hf_config(family, **changes), seed), dtype)


def prompt(length: int, seed: int = 0, vocab_size: int = 256) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
    return ids
