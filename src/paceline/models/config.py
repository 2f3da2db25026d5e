"""What a decoder is made of: one frozen description that every loader fills and the decoder is built from."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import PacelineError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base frequency and the scaling that stretches it.

    `freq_factors` (GGUF's `rope_freqs.weight`, [head_dim / 2]) divide the inverse frequencies and stand in for
    `llama3` where a file carries them instead of its parameters.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise PacelineError(f"rope type {self.kind!r} is not supported", hint=f"supported: {', '.join(ROPE_KINDS)}")
        if self.kind in ("llama3", "yarn") and self.original_max_position is None:
            raise PacelineError(f"rope type {self.kind!r} needs original_max_position_embeddings")
        if self.kind == "llama3" and (self.low_freq_factor is None or self.high_freq_factor is None):
            raise PacelineError("rope type 'llama3' needs low_freq_factor and high_freq_factor")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and conventions of a decoder-only transformer."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int
    rope: RopeConfig
    local_rope: RopeConfig | None  # of the sliding-window layers, where they have their own (Gemma 3)
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sandwich_norms: bool  # a norm after each sublayer as well as before it (Gemma 3)
    activation: str  # "silu" or "gelu_tanh"
    embedding_scale: float
    attention_scale: float
    sliding_windows: tuple[int | None, ...]  # [num_layers], None = full attention
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise PacelineError(
                f"model family {self.family!r} is not supported", hint=f"supported: {', '.join(FAMILIES)}"
            )
        if self.num_heads % self.num_kv_heads:
            raise PacelineError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if len(self.sliding_windows) != self.num_layers:
            raise PacelineError(f"{len(self.sliding_windows)} layer types are given for {self.num_layers} layers")
        if self.activation not in ("silu", "gelu_tanh"):
            raise PacelineError(f"activation {self.activation!r} is not supported")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "ModelConfig":
        fields = json.loads(text)
        for name in ("rope", "local_rope"):
            if fields[name] is not None:
                rope = dict(fields[name])
                if rope["freq_factors"] is not None:
                    rope["freq_factors"] = tuple(rope["freq_factors"])
                fields[name] = RopeConfig(**rope)
        for name in ("sliding_windows", "eos_token_ids"):
            fields[name] = tuple(fields[name])
        return ModelConfig(**fields)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_context: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32, and the factor on cos and sin, as transformers computes them.

    Sources: Su et al. 2104.09864; linear interpolation 2306.15595; YaRN 2309.00071; llama3: Llama 3.1's release.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = rope.theta**exponent  # [head_dim / 2]
    inv_freq = 1.0 / frequencies
    if rope.freq_factors is not None:
        inv_freq = inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float32)
    match rope.kind:
        case "linear":
            return inv_freq / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, inv_freq), 1.0
        case "yarn":
            return _yarn(rope, frequencies, head_dim)
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    assert rope.original_max_position and rope.low_freq_factor and rope.high_freq_factor
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / rope.factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(medium, smoothed, scaled)


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    assert rope.original_max_position
    original = rope.original_max_position

    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    attention_factor = rope.attention_factor
    if attention_factor is None:
        if rope.mscale and rope.mscale_all_dim:
            attention_factor = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
        else:
            attention_factor = magnitude()

    def correction_dim(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolation = 1 - ramp
    interpolated, extrapolated = 1.0 / (rope.factor * frequencies), 1.0 / frequencies
    return interpolated * (1 - extrapolation) + extrapolated * extrapolation, float(attention_factor)


def config_from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """Our description of a Hugging Face `config.json`; its defaults and both rope spellings come from transformers."""
    raw = _text_config(config)
    family = _family(raw)
    _refuse_unknown_rope(raw)
    from transformers import AutoConfig

    hf = AutoConfig.for_model(**raw)
    ropes, windows = _ropes(hf, raw), _windows(hf, raw)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    gemma = family == "gemma3"
    if gemma and (hf.final_logit_softcapping or hf.attn_logit_softcapping):
        raise PacelineError("logit soft-capping is not supported")
    bias = bool(getattr(hf, "attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=hf.rms_norm_eps,
        max_context=hf.max_position_embeddings,
        rope=ropes[0],
        local_rope=ropes[1],
        tie_embeddings=bool(hf.tie_word_embeddings),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        activation=_activation(hf.hidden_activation if gemma else hf.hidden_act),
        # transformers keeps the factor in float32 before it takes the weights' precision
        embedding_scale=float(torch.tensor(hf.hidden_size**0.5)) if gemma else 1.0,
        attention_scale=(hf.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        sliding_windows=windows,
        bos_token_id=_first(config.get("bos_token_id", raw.get("bos_token_id"))),
        eos_token_ids=_eos_union(config, raw, generation_config or {}),
    )


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    raw = dict(config)
    if "text_config" in raw:
        text = dict(raw["text_config"])
        text.setdefault("tie_word_embeddings", raw.get("tie_word_embeddings", True))
        return text
    return raw


def _family(raw: Mapping[str, Any]) -> str:
    model_type = raw.get("model_type")
    if model_type is None:
        raise PacelineError("config.json has no model_type", hint="is this a language model's folder?")
    family = "gemma3" if model_type in ("gemma3_text", "gemma3") else str(model_type)
    if family not in FAMILIES:
        raise PacelineError(f"model type {model_type!r} is not supported", hint=f"supported: {', '.join(FAMILIES)}")
    return family


def _refuse_unknown_rope(raw: Mapping[str, Any]) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        scaling = raw.get(key)
        if not isinstance(scaling, Mapping):
            continue
        per_layer_type = [value for value in scaling.values() if isinstance(value, Mapping)]
        for entry in per_layer_type or [scaling]:
            kind = entry.get("rope_type", entry.get("type", "default"))
            if kind not in ROPE_KINDS:
                raise PacelineError(f"rope type {kind!r} is not supported", hint=f"supported: {', '.join(ROPE_KINDS)}")
            if entry.get("partial_rotary_factor", 1.0) != 1.0:
                raise PacelineError("a partial rotary embedding is not supported")


def _ropes(hf: Any, raw: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig | None]:
    parameters = hf.rope_parameters
    if "full_attention" in parameters:
        return _rope(parameters["full_attention"], hf), _rope(parameters["sliding_attention"], hf)
    return _rope(parameters, hf), None


def _rope(parameters: Mapping[str, Any], hf: Any) -> RopeConfig:
    kind = parameters.get("rope_type", "default")
    original = parameters.get("original_max_position_embeddings")
    factor = parameters.get("factor")
    if kind == "yarn" and factor is None and original:
        factor = hf.max_position_embeddings / original
    return RopeConfig(
        theta=float(parameters["rope_theta"]),
        kind=kind,
        factor=1.0 if factor is None else float(factor),
        original_max_position=original or (hf.max_position_embeddings if kind in ("yarn", "llama3") else None),
        low_freq_factor=parameters.get("low_freq_factor"),
        high_freq_factor=parameters.get("high_freq_factor"),
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        attention_factor=parameters.get("attention_factor", parameters.get("attn_factor")),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
    )


def _windows(hf: Any, raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    window: int | None = getattr(hf, "sliding_window", None)
    layer_types = getattr(hf, "layer_types", None)
    if layer_types is None:
        return (window if hf.model_type == "mistral" else None,) * int(hf.num_hidden_layers)
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise PacelineError(f"layer type {sorted(unknown)[0]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _activation(name: str) -> str:
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
    if name not in known:
        raise PacelineError(f"activation {name!r} is not supported", hint=f"supported: {', '.join(known)}")
    return known[name]


def _first(value: Any) -> int | None:
    first = value[0] if isinstance(value, list) else value
    return None if first is None else int(first)


def _eos_union(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end-of-sequence id that any of the files names: a chat model may use one that the other omits."""
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is not None:
                ids[int(token)] = None
    return tuple(ids)
