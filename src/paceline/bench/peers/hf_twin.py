"""transformers' model with the weights of ours: the other direction of `models.adopt`."""

from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.layout import canonical_parts
from paceline.models.load import LoadedModel
from paceline.models.packing import PACKED
from paceline.ops.linear import Linear
from paceline.ops.packed import unpacked

ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim")


def hf_twin(model: LoadedModel) -> Any:
    """Shares every tensor that need not be changed. Raises PacelineError where transformers has no such model, or no
    numbers to compute with."""
    from transformers import AutoModelForCausalLM

    if model.precision in PACKED:
        raise PacelineError(
            f"transformers needs {model.name}'s weights as numbers, and they are packed", hint="use --dtype bf16"
        )
    config = hf_config(model.config)
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=model.decoder.dtype)
    weights = canonical_weights(model.decoder)
    if model.config.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    twin.load_state_dict(weights, strict=True, assign=True)
    twin.tie_weights()
    _fill_buffers(twin, config, model.decoder)
    return twin.requires_grad_(False).eval()


def canonical_weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Hugging Face's names and conventions; rows of our fused matrices, as views."""
    pieces: dict[str, list[tuple[int, str, int]]] = {}
    for name, part in canonical_parts(decoder.config).items():
        pieces.setdefault(part.name, []).append((part.index, name, part.shape[0]))
    weights: dict[str, torch.Tensor] = {}
    for prepared, members in pieces.items():
        members.sort()
        tensor = _held(decoder, prepared)
        rows = [count for *_, count in members]
        for (_, name, _), piece in zip(members, torch.split(tensor, rows), strict=True):
            weights[name] = piece
    if decoder.config.family == "gemma3":  # ours are effective; its modules add the 1 themselves
        for name in weights:
            if name.endswith("norm.weight"):
                weights[name] = weights[name] - 1
    return weights


def _held(decoder: Decoder, prepared: str) -> torch.Tensor:
    """A tensor by its name in the prepared layout."""
    top = {"embed": decoder.embedding, "norm": decoder.norm, "head": unpacked(decoder.head).weight}
    if prepared in top:
        return top[prepared]
    _, index, name = prepared.split(".")
    held = getattr(decoder.layers[int(index)], name.removesuffix("_bias"))
    if isinstance(held, Linear):
        held = held.bias if name.endswith("_bias") else held.weight
    assert isinstance(held, torch.Tensor)
    return held


def hf_config(config: ModelConfig) -> Any:
    """A configuration that means the same. Raises PacelineError for what transformers cannot be told."""
    from transformers import AutoConfig

    gemma = config.family == "gemma3"
    if any(rope is not None and rope.freq_factors is not None for rope in (config.rope, config.local_rope)):
        raise PacelineError("the model's file has rope_freqs, which transformers cannot be told")
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": None,
        "rope_parameters": _ropes(config),
    }
    window = next((window for window in config.sliding_windows if window is not None), None)
    types = ["full_attention" if window is None else "sliding_attention" for window in config.sliding_windows]
    own: dict[str, dict[str, Any]] = {
        "llama": {},
        "mistral": {"sliding_window": window},
        "qwen2": {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": types},
        "qwen3": {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": types},
        "gemma3": {
            "sliding_window": window,
            "layer_types": types,
            "query_pre_attn_scalar": round(config.attention_scale**-2),
            "hidden_activation": "gelu_pytorch_tanh",
        },
    }
    if not gemma:
        common["hidden_act"] = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[config.activation]
    return AutoConfig.for_model("gemma3_text" if gemma else config.family, **common, **own[config.family])


def _ropes(config: ModelConfig) -> dict[str, Any]:
    if config.local_rope is None:
        return _rope(config.rope)
    return {"full_attention": _rope(config.rope), "sliding_attention": _rope(config.local_rope)}


def _rope(rope: RopeConfig) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        given = {key: getattr(rope, key) for key in ROPE_KEYS}
        parameters |= {key: value for key, value in given.items() if value is not None}
        if rope.original_max_position is not None:
            parameters["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    return parameters


def _fill_buffers(twin: Any, config: Any, decoder: Decoder) -> None:
    """What a model holds besides weights: made anew, since `meta` made nothing."""
    rotary = twin.model.rotary_emb
    twin.model.rotary_emb = type(rotary)(config=config).to(decoder.device)
    scale = getattr(twin.model.embed_tokens, "embed_scale", None)
    if scale is not None:
        twin.model.embed_tokens.embed_scale = torch.tensor(decoder.config.embedding_scale, device=decoder.device)
