"""The model's description from GGUF metadata: llama.cpp's key names, and its defaults for absent keys."""

from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.gguf import GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
# Control tokens that end a turn or a document, by their text, as llama.cpp finds them: files name only one.
END_TOKENS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"}
    | {"<eos>", "</s>"}
)
CONTROL_TOKEN = 3
GEMMA_LOCAL_THETA = 10000.0
GEMMA_PATTERN = 6  # of six layers, the last attends to everything


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Description of the model in `file`. Names a required key that is absent, refuses one not supported."""
    meta = _Metadata(file)
    arch = meta.arch
    gemma = arch == "gemma3"
    num_layers = meta.integer("block_count")
    hidden_size, num_heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", hidden_size // num_heads)
    meta.must_equal("attention.value_length", head_dim, "key_length")
    meta.must_equal("rope.dimension_count", head_dim, "the head dimension (partial rotary embedding)")
    windows = _windows(meta, num_layers)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise PacelineError(f"{file.parts[0]}: tensor 'token_embd.weight' is missing")
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
        rms_norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        max_context=meta.integer("context_length"),
        rope=_rope(meta, file),
        local_rope=RopeConfig(meta.number("rope.freq_base_swa", GEMMA_LOCAL_THETA)) if gemma else None,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=arch in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=float(torch.tensor(hidden_size**0.5)) if gemma else 1.0,
        attention_scale=query_size**-0.5,
        sliding_windows=windows,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=end_token_ids(file.metadata),
    )


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a generation: those the file names, then control tokens known by their text."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    ids += [i for i, kind in enumerate(types) if kind == CONTROL_TOKEN and tokens[i] in END_TOKENS]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


class _Metadata:
    """Typed access to the keys of one architecture; errors name the file and the key."""

    def __init__(self, file: GgufFile) -> None:
        self.path, self.values = file.parts[0], file.metadata
        if "general.architecture" not in file.metadata:
            raise PacelineError(f"{self.path}: metadata key 'general.architecture' is missing")
        self.arch = file.architecture
        if self.arch not in ARCHITECTURES:
            raise PacelineError(
                f"{self.path}: architecture {self.arch!r} is not supported",
                hint=f"supported: {', '.join(ARCHITECTURES)}",
            )
        if self.get("expert_count"):
            raise PacelineError(f"{self.path}: mixture-of-experts models are not supported ({self.arch})")
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale"):
            if self.get(key):
                raise PacelineError(f"{self.path}: {self.arch}.{key} is not supported")

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.arch}.{key}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            if default is None:
                raise PacelineError(f"{self.path}: metadata key '{self.arch}.{key}' is missing")
            return default
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise PacelineError(f"{self.path}: '{self.arch}.{key}' differs between layers, which is not supported")
            return value[0]
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise PacelineError(f"{self.path}: '{self.arch}.{key}' is {value!r}, not a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise PacelineError(f"{self.path}: '{self.arch}.{key}' is {value!r}, not a positive number")
        return shortest_float(value)

    def must_equal(self, key: str, expected: int, meaning: str) -> None:
        value = self.get(key)
        if value is not None and self.integer(key) != expected:
            raise PacelineError(f"{self.path}: '{self.arch}.{key}' is {value}, but {meaning} is {expected}")


def shortest_float(value: float) -> float:
    """The shortest decimal that is this float32: 9.999999974752427e-07 was written as 1e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if torch.tensor(short, dtype=torch.float32) == torch.tensor(value, dtype=torch.float32):
            return short
    return float(value)


def _windows(meta: _Metadata, num_layers: int) -> tuple[int | None, ...]:
    window = meta.get("attention.sliding_window")
    if not window:
        return (None,) * num_layers
    window = meta.integer("attention.sliding_window")
    pattern = meta.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise PacelineError(
                f"{meta.path}: sliding_window_pattern has {len(pattern)} entries for {num_layers} layers"
            )
        return tuple(window if local else None for local in pattern)
    if meta.arch == "llama" and pattern is None:  # Mistral: every layer
        return (window,) * num_layers
    if meta.arch != "gemma3" and pattern is None:
        raise PacelineError(
            f"{meta.path}: '{meta.arch}.attention.sliding_window' is {window}, no key says for which layers"
        )
    period = pattern or GEMMA_PATTERN
    return tuple(None if (layer + 1) % period == 0 else window for layer in range(num_layers))


def _rope(meta: _Metadata, file: GgufFile) -> RopeConfig:
    kind = meta.get("rope.scaling.type")
    if kind is None:
        kind = "linear" if meta.get("rope.scaling.factor") or meta.get("rope.scale_linear") else "none"
    if kind not in ("none", "linear", "yarn"):
        raise PacelineError(f"{meta.path}: rope scaling type {kind!r} is not supported", hint="supported: linear, yarn")
    factors = None
    if "rope_freqs.weight" in file.tensors:
        factors = tuple(file.read("rope_freqs.weight", torch.float32).flatten().tolist())
    theta = meta.number("rope.freq_base", 10000.0)
    if kind == "none":
        return RopeConfig(theta, freq_factors=factors)
    linear = meta.get("rope.scale_linear")
    factor = meta.number("rope.scaling.factor", float(linear) if linear else None)
    if kind == "linear":
        return RopeConfig(theta, kind="linear", factor=factor, freq_factors=factors)
    if meta.get("rope.scaling.yarn_log_multiplier") or meta.get("rope.scaling.yarn_ext_factor") not in (
        None,
        1.0,
    ):
        raise PacelineError(f"{meta.path}: yarn with a log multiplier or an extrapolation factor is not supported")
    attention = "rope.scaling.yarn_attn_factor"
    attention = attention if meta.get(attention) is not None else "rope.scaling.attn_factor"
    return RopeConfig(
        theta,
        kind="yarn",
        factor=factor,
        original_max_position=meta.integer("rope.scaling.original_context_length", meta.integer("context_length")),
        beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=meta.number(attention) if meta.get(attention) is not None else None,
        freq_factors=factors,
    )
