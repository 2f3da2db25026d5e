"""The model's description from a Hugging Face `config.json`: everything in it is honoured or refused by name."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from paceline.errors import PacelineError
from paceline.models.config import FAMILIES, ROPE_KINDS, ModelConfig, RopeConfig, require_integer, require_number
from paceline.values import shown

# Keys that change the arithmetic of some model and are not implemented, each with the values that change nothing
# (null never does). transformers' classes of our families ignore most of them; the code that wrote them did not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    # rotary embedding
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_ratio": (1,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "position_embedding_type": ("rope",),
    "alibi": (False,),
    "use_dynamic_ntk": (False,),
    # attention
    "attn_logit_softcapping": (),
    "attention_multiplier": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    "dual_chunk_attention_config": (),
    "use_logn_attn": (False,),
    "clip_qkv": (),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    # scales of embeddings, residuals, logits
    "embedding_multiplier": (1,),
    "scale_emb": (1,),
    "residual_multiplier": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "use_parallel_residual": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "final_logit_softcapping": (),
}
_NEUTRAL_OF_FAMILY: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"sliding_window": (), "use_sliding_window": (False,)},
    "gemma3": {"hidden_act": ("gelu_pytorch_tanh",)},  # it goes by hidden_activation
}
_INTEGERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "sliding_window_pattern"),
)
_NUMBERS = ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")

_ROPE_KEYS = {"rope_type", "type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}
_ROPE_KEYS_OF_KIND: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
    | {"finetuned"},  # a remark
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def config_from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """Our description of a Hugging Face `config.json`; its defaults and both rope spellings come from transformers.

    Raises PacelineError naming the key for a value that is impossible, or that asks for what is not implemented.
    """
    raw = _text_config(config)
    family = _family(raw)
    for part in (config, raw):
        _refuse_unsupported(part, _NEUTRAL | _NEUTRAL_OF_FAMILY.get(family, {}))
    _check_values(raw)
    _refuse_unknown_rope(raw, family)
    eos_token_ids = _eos_union(config, raw, generation_config or {})
    bos_token_ids = _token_ids("bos_token_id", config if "bos_token_id" in config else raw)
    from transformers import AutoConfig

    try:
        hf = AutoConfig.for_model(**deepcopy(raw))  # transformers writes into what it is given
    except Exception as error:  # transformers raises whatever the value at fault provoked
        raise PacelineError(f"not a valid configuration: {_one_line(error)}") from error
    ropes, windows = _ropes(hf, family), _windows(hf, family)
    head_dim = require_integer("head_dim", getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
    gemma = family == "gemma3"
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
        embedding_scale=hf.hidden_size**0.5 if gemma else 1.0,
        attention_scale=(hf.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        sliding_windows=windows,
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=eos_token_ids,
    )


def check_layer_count(config: Mapping[str, Any], tensors: Iterable[str]) -> None:
    """Refuse more layers than there are tensors, before anything is made for each of them."""
    layers = _text_config(config).get("num_hidden_layers")
    most = sum(1 for _ in tensors)
    if type(layers) is int and layers > most:
        raise PacelineError(
            f"num_hidden_layers is {layers}, but there are only {most} tensors",
            hint="the file is incomplete, or its config describes another model",
        )


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    if "text_config" not in config:
        return dict(config)
    if not isinstance(config["text_config"], Mapping):
        raise PacelineError(f"text_config is {shown(config['text_config'])}, not an object")
    text = dict(config["text_config"])
    text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", True))
    return text


def _family(raw: Mapping[str, Any]) -> str:
    model_type = raw.get("model_type")
    if model_type is None:
        raise PacelineError("config.json has no model_type", hint="is this a language model's folder?")
    family = "gemma3" if model_type in ("gemma3_text", "gemma3") else str(model_type)
    if family not in FAMILIES:
        raise PacelineError(
            f"model type {shown(model_type)} is not supported", hint=f"supported: {', '.join(FAMILIES)}"
        )
    return family


def _refuse_unsupported(part: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for key, harmless in neutral.items():
        value = part.get(key)
        if value is not None and value not in harmless:
            quantised = key in ("quantization_config", "compression_config")
            raise PacelineError(
                f"{key} is not supported ({_shortened(value)})",
                hint="quantised checkpoints are read as GGUF files" if quantised else None,
            )


def _check_values(raw: Mapping[str, Any]) -> None:
    for key in _INTEGERS:
        if raw.get(key) is not None:
            require_integer(key, raw[key])
    for key in _NUMBERS:
        if raw.get(key) is not None:
            require_number(key, raw[key])
    for key in _FLAGS:
        if raw.get(key) is not None and not isinstance(raw[key], bool):
            raise PacelineError(f"{key} is {shown(raw[key])}, not true or false")


def _refuse_unknown_rope(raw: Mapping[str, Any], family: str) -> None:
    """Before transformers reads the rope parameters: it drops what it does not know."""
    given = {key: raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key) is not None}
    for key, scaling in given.items():
        if not isinstance(scaling, Mapping):
            raise PacelineError(f"{key} is {_shortened(scaling)}, not an object")
        entries = [scaling]
        if family == "gemma3" and key == "rope_parameters":
            if stray := sorted(set(scaling) - set(_LAYER_TYPES)):
                raise PacelineError(f"rope_parameters: {stray[0]} belongs to no layer type")
            entries = [entry for entry in scaling.values() if entry is not None]
        for entry in entries:
            if not isinstance(entry, Mapping):
                raise PacelineError(f"{key} holds {_shortened(entry)}, not an object")
            _check_rope(key, entry)
    if all(given.values()) and len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise PacelineError("rope_scaling and rope_parameters are both given, and differ")


def _check_rope(where: str, entry: Mapping[str, Any]) -> None:
    kind = entry.get("rope_type", entry.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise PacelineError(f"rope type {shown(kind)} is not supported", hint=f"supported: {', '.join(ROPE_KINDS)}")
    given = {key: value for key, value in entry.items() if value is not None}
    if unknown := sorted(set(given) - _ROPE_KEYS - _ROPE_KEYS_OF_KIND[kind]):
        raise PacelineError(f"{where}: {unknown[0]} is not supported for rope type {shown(kind)}")
    if given.get("partial_rotary_factor", 1) != 1:
        raise PacelineError(f"{where}: partial_rotary_factor {shown(given['partial_rotary_factor'])} is not supported")
    if kind in ("linear", "llama3") and (missing := sorted(_ROPE_KEYS_OF_KIND[kind] - set(given))):
        raise PacelineError(f"{where}: rope type {shown(kind)} needs {missing[0]}")
    for key in set(given) - {"rope_type", "type", "partial_rotary_factor", "truncate", "finetuned"}:
        require_number(f"{where}: {key}", given[key])


def _ropes(hf: Any, family: str) -> tuple[RopeConfig, RopeConfig | None]:
    parameters = hf.rope_parameters
    if family == "gemma3":
        return _rope(parameters["full_attention"], hf), _rope(parameters["sliding_attention"], hf)
    return _rope(parameters, hf), None


def _rope(parameters: Mapping[str, Any], hf: Any) -> RopeConfig:
    _check_rope("rope_parameters", parameters)
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
        attention_factor=parameters.get("attention_factor"),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
    )


def _windows(hf: Any, family: str) -> tuple[int | None, ...]:
    window: int | None = getattr(hf, "sliding_window", None)
    types: list[str] | None = getattr(hf, "layer_types", None)
    if family in ("llama", "mistral"):  # every layer alike, whatever layer_types says
        uniform = "sliding_attention" if family == "mistral" and window else "full_attention"
        if types is not None and set(types) != {uniform}:
            raise PacelineError(f"layer_types that differ from {uniform} are not supported in a {family} model")
        return (window if uniform == "sliding_attention" else None,) * int(hf.num_hidden_layers)
    assert types is not None  # transformers makes them for the other families
    for kind in types:
        if kind not in _LAYER_TYPES:
            raise PacelineError(
                f"layer type {shown(kind)} is not supported", hint=f"supported: {', '.join(_LAYER_TYPES)}"
            )
    if window is None and "sliding_attention" in types:
        raise PacelineError("layer_types names sliding_attention, but there is no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _activation(name: str) -> str:
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
    if name not in known:
        raise PacelineError(f"activation {shown(name)} is not supported", hint=f"supported: {', '.join(known)}")
    return known[name]


def _token_ids(key: str, config: Mapping[str, Any]) -> list[int]:
    value = config.get(key)
    tokens = value if isinstance(value, list) else [value]
    return [require_integer(key, token, low=0) for token in tokens if token is not None]


def _eos_union(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end-of-sequence id that any of the files names: a chat model may use one that the other omits."""
    return tuple(dict.fromkeys(token for config in configs for token in _token_ids("eos_token_id", config)))


def _shortened(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
