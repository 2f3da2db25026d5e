"""The model's description from GGUF metadata: llama.cpp's key names, and its defaults for absent keys."""

from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig, RopeConfig, described_by
from paceline.models.gguf import GgufFile
from paceline.models.gguf_metadata import Metadata
from paceline.values import shown

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
# Control tokens that end a turn or a document, by their text, as llama.cpp finds them: files name only one.
END_TOKENS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"}
    | {"<eos>", "</s>"}
)
CONTROL_TOKEN = 3
GEMMA_LOCAL_THETA = 10000.0
GEMMA_PATTERN = 6  # of six layers, the last attends to everything
_READ = frozenset(
    {"block_count", "context_length", "embedding_length", "feed_forward_length", "expert_count"}
    | {f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length", "scale")}
    | {f"attention.{name}" for name in ("layer_norm_rms_epsilon", "sliding_window", "sliding_window_pattern")}
    | {f"rope.{name}" for name in ("dimension_count", "freq_base", "freq_base_swa", "scale_linear")}
    | {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "attn_factor")}
    | {f"rope.scaling.yarn_{name}" for name in ("log_multiplier", "ext_factor", "attn_factor")}
    | {f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
    # say nothing about the arithmetic; the tensors say how large the vocabulary is
    | {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon"}
    | {"expert_used_count", "pooling_type", "decoder_start_token_id"}
)
# Not implemented: the values that change nothing. Any other key of the architecture is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "nextn_predict_layers": (0,),
    "leading_dense_block_count": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.shared_kv_layers": (0,),
}


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Description of the model in `file`. Names a required key that is absent, refuses one not supported."""
    with described_by(file.parts[0]):
        return _config(file)


def _config(file: GgufFile) -> ModelConfig:
    meta, arch = _architecture_keys(file), file.architecture
    gemma = arch == "gemma3"
    num_layers = meta.integer("block_count")
    if num_layers > len(file.tensors):  # before anything is made for each layer
        raise meta.refusal("block_count", f"is {num_layers}, but there are only {len(file.tensors)} tensors")
    hidden_size, num_heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", hidden_size // num_heads)
    _must_equal(meta, "attention.value_length", head_dim, "key_length")
    _must_equal(meta, "rope.dimension_count", head_dim, "the head dimension (partial rotary embedding)")
    windows = _windows(meta, arch, num_layers)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise PacelineError("tensor 'token_embd.weight' is missing")
    tokens = Metadata(meta.path, file.metadata, "tokenizer.ggml.")
    family = "mistral" if arch == "llama" and any(windows) else arch
    # Gemma 3's 27B model (62 layers) scales by hidden_size / num_heads, the smaller ones by head_dim.
    query_size = hidden_size // num_heads if gemma and num_layers == 62 else head_dim
    return ModelConfig(
        family=family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=meta.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=meta.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=_number(meta, "attention.layer_norm_rms_epsilon"),
        max_context=meta.integer("context_length"),
        rope=_rope(meta, _frequency_factors(file, head_dim)),
        local_rope=RopeConfig(_number(meta, "rope.freq_base_swa", GEMMA_LOCAL_THETA)) if gemma else None,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=arch in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        attention_scale=_attention_scale(meta, query_size),
        sliding_windows=windows,
        bos_token_id=tokens.whole("bos_token_id"),
        eos_token_ids=end_token_ids(tokens),
    )


def end_token_ids(tokenizer: Metadata) -> tuple[int, ...]:
    """Ids that end a generation: those the file names, then control tokens known by their text."""
    ids = [tokenizer.whole(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = tokenizer.texts("tokens") or [], tokenizer.wholes("token_type") or []
    pairs = enumerate(zip(tokens, types, strict=False))  # the tokenizer checks that there are as many
    ids += [i for i, (token, kind) in pairs if kind == CONTROL_TOKEN and token in END_TOKENS]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _architecture_keys(file: GgufFile) -> Metadata:
    """The keys of the file's architecture, none of which asks for anything that is not implemented."""
    path, general = file.parts[0], Metadata(file.parts[0], file.metadata, "general.")
    arch = general.required("architecture", general.text("architecture"))
    if arch not in ARCHITECTURES:
        raise PacelineError(
            f"{path}: architecture {shown(arch)} is not supported", hint=f"supported: {', '.join(ARCHITECTURES)}"
        )
    if (kind := general.text("type")) not in (None, "model"):
        raise PacelineError(f"{path}: general.type is {shown(kind)}, not a model", hint="name the model's own file")
    meta = Metadata(path, file.metadata, f"{arch}.")
    if meta.get("expert_count") not in (None, 0):
        raise PacelineError(f"{path}: mixture-of-experts models are not supported ({arch})")
    for key, value in file.metadata.items():
        name = key.removeprefix(meta.prefix)
        if key.startswith(meta.prefix) and name not in _READ and value not in _NEUTRAL.get(name, ()):
            raise meta.refusal(name, "is not supported, and ignoring it could change the outputs")
    return meta


def _must_equal(meta: Metadata, key: str, expected: int, meaning: str) -> None:
    if meta.get(key) is not None and meta.integer(key) != expected:
        raise meta.refusal(key, f"is {meta.get(key)}, but {meaning} is {expected}")


def shortest_float(value: float) -> float:
    """The shortest decimal that is this float32: 9.999999974752427e-07 was written as 1e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if torch.tensor(short, dtype=torch.float32) == torch.tensor(value, dtype=torch.float32):
            return short
    return float(value)


def _number(meta: Metadata, key: str, default: float | None = None) -> float:
    return shortest_float(meta.number(key, default))


def _attention_scale(meta: Metadata, query_size: int) -> float:
    given = meta.get("attention.scale") not in (None, 0)
    return _number(meta, "attention.scale") if given else query_size**-0.5


def _windows(meta: Metadata, arch: str, num_layers: int) -> tuple[int | None, ...]:
    key, pattern_key = "attention.sliding_window", "attention.sliding_window_pattern"
    if meta.get(key) in (None, 0):
        return (None,) * num_layers
    window, pattern = meta.integer(key), meta.get(pattern_key)
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(local, bool) for local in pattern):
            raise meta.refusal(pattern_key, f"has {len(pattern)} entries for {num_layers} layers, or not flags")
        return tuple(window if local else None for local in pattern)
    if arch == "llama" and pattern is None:  # Mistral: every layer
        return (window,) * num_layers
    if arch != "gemma3" and pattern is None:
        raise meta.refusal(key, f"is {window}, no key says for which layers")
    period = meta.integer(pattern_key, GEMMA_PATTERN)
    return tuple(None if (layer + 1) % period == 0 else window for layer in range(num_layers))


def _frequency_factors(file: GgufFile, head_dim: int) -> tuple[float, ...] | None:
    info = file.tensors.get("rope_freqs.weight")
    if info is None:
        return None
    if info.shape != (head_dim // 2,):
        raise PacelineError(
            f"{file.parts[0]}: tensor 'rope_freqs.weight' has shape {list(info.shape)}, not [{head_dim // 2}]"
        )
    return tuple(file.read("rope_freqs.weight", torch.float32).tolist())


def _rope(meta: Metadata, factors: tuple[float, ...] | None) -> RopeConfig:
    kind, theta = meta.text("rope.scaling.type"), _number(meta, "rope.freq_base", 10000.0)
    factor = None
    for key in ("rope.scale_linear", "rope.scaling.factor"):  # the old name and the new one
        if meta.get(key) is not None:
            factor = _number(meta, key)
    if kind is None:
        kind = "none" if factor is None else "linear"
    if kind not in ("none", "linear", "yarn"):
        raise PacelineError(
            f"{meta.path}: rope scaling type {shown(kind)} is not supported", hint="supported: linear, yarn"
        )
    if kind == "none":
        if factor not in (None, 1.0):
            raise meta.refusal("rope.scaling.type", f"is 'none', but a scaling factor of {factor} is given")
        return RopeConfig(theta, freq_factors=factors)
    if factor is None:
        factor = _number(meta, "rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(theta, kind="linear", factor=factor, freq_factors=factors)
    if meta.get("rope.scaling.yarn_log_multiplier") or meta.get("rope.scaling.yarn_ext_factor") not in (None, 1.0):
        raise PacelineError(f"{meta.path}: yarn with a log multiplier or an extrapolation factor is not supported")
    attention = "rope.scaling.yarn_attn_factor"
    attention = attention if meta.get(attention) is not None else "rope.scaling.attn_factor"
    return RopeConfig(
        theta,
        kind="yarn",
        factor=factor,
        original_max_position=meta.integer("rope.scaling.original_context_length", meta.integer("context_length")),
        beta_fast=_number(meta, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_number(meta, "rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_number(meta, attention) if meta.get(attention) is not None else None,
        freq_factors=factors,
    )
