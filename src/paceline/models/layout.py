"""The layout that weights are held in: what is multiplied together lies together.

Loaders yield *canonical* weights (Hugging Face names, one tensor at a time, norm weights effective); `prepare` turns
them into the tensors that the decoder holds and that the prepared-weights cache stores.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig
from paceline.ops.packed import is_packed, shape_of

LAYOUT_VERSION = 2


@dataclass(frozen=True, slots=True)
class Part:
    """Where a canonical tensor goes: `index` of `count` row-wise parts of the prepared tensor `name`."""

    name: str
    shape: tuple[int, ...]
    index: int = 0
    count: int = 1


def canonical_parts(config: ModelConfig) -> dict[str, Part]:
    """Every weight that the model needs, by canonical name."""
    matrix = (config.vocab_size, config.hidden_size)
    parts = {
        "model.embed_tokens.weight": Part("embed", matrix),
        "model.norm.weight": Part("norm", (config.hidden_size,)),
    }
    if not config.tie_embeddings:
        parts["lm_head.weight"] = Part("head", matrix)
    for layer in range(config.num_layers):
        for name, part in _layer_parts(config).items():
            parts[f"model.layers.{layer}.{name}"] = replace(part, name=f"layers.{layer}.{part.name}")
    return parts


def _layer_parts(config: ModelConfig) -> dict[str, Part]:
    c = config
    hidden, q_width, kv_width = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    parts: dict[str, Part] = {}

    def linear(name: str, out: int, inner: int, part: str, bias: bool, index: int = 0, count: int = 1) -> None:
        parts[f"{name}.weight"] = Part(part, (out, inner), index, count)
        if bias:
            parts[f"{name}.bias"] = Part(f"{part}_bias", (out,), index, count)

    def norm(name: str, part: str, width: int = hidden) -> None:
        parts[f"{name}.weight"] = Part(part, (width,))

    norm("input_layernorm", "attention_norm")
    for index, (name, width) in enumerate((("q", q_width), ("k", kv_width), ("v", kv_width))):
        linear(f"self_attn.{name}_proj", width, hidden, "qkv", c.qkv_bias, index, 3)
    linear("self_attn.o_proj", hidden, q_width, "output", c.output_bias)
    if c.qk_norm:
        norm("self_attn.q_norm", "q_norm", c.head_dim)
        norm("self_attn.k_norm", "k_norm", c.head_dim)
    if c.sandwich_norms:
        norm("post_attention_layernorm", "post_attention_norm")
        norm("pre_feedforward_layernorm", "mlp_norm")
        norm("post_feedforward_layernorm", "post_mlp_norm")
    else:
        norm("post_attention_layernorm", "mlp_norm")
    linear("mlp.gate_proj", c.intermediate_size, hidden, "gate_up", c.mlp_bias, 0, 2)
    linear("mlp.up_proj", c.intermediate_size, hidden, "gate_up", c.mlp_bias, 1, 2)
    linear("mlp.down_proj", hidden, c.intermediate_size, "down", c.mlp_bias)
    return parts


def is_inert(name: str, config: ModelConfig) -> bool:
    """Leftovers that some checkpoints carry and that change nothing: they are listed, not refused."""
    leftover = name.endswith((".rotary_emb.inv_freq", ".masked_bias", ".attn.bias"))
    return leftover or (config.tie_embeddings and name == "lm_head.weight")


def check_names(config: ModelConfig, names: Iterable[str], where: str) -> list[str]:
    """Refuse a missing or an unknown weight before any is read; return the inert leftovers."""
    needed, given = canonical_parts(config), set(names)
    missing = [name for name in needed if name not in given]
    if missing:
        raise PacelineError(
            f"{where}: weight {missing[0]} is missing" + _and_more(missing),
            hint="the file is incomplete, or its config describes another model",
        )
    inert = sorted(name for name in given if is_inert(name, config))
    unused = sorted(given - set(needed) - set(inert))
    if unused:
        raise PacelineError(
            f"{where}: weight {unused[0]} has no place in a {config.family} model" + _and_more(unused),
            hint="a weight left unused would change the outputs; is this another architecture or an adapter?",
        )
    return inert


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def prepare(
    config: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, where: str = "the model"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Canonical weights in, prepared tensors out, each as soon as its parts are there.

    Packed matrices stay packed, their parts one behind the other.
    Raises PacelineError at a shape that the config does not say, and at the end if a weight never came.
    """
    parts = canonical_parts(config)
    waiting: dict[str, list[torch.Tensor | None]] = {}
    for name, tensor in weights:
        part = parts.pop(name, None)
        if part is None:
            if is_inert(name, config):
                continue
            raise PacelineError(f"{where}: weight {name} has no place in a {config.family} model")
        if (shape := shape_of(tensor)) != part.shape:
            raise PacelineError(
                f"{where}: weight {name} has shape {list(shape)}, the config says {list(part.shape)}",
                hint="config and weights are of different models: fetch them together again",
            )
        # Gemma multiplies by its norm weights in float32; everything else lives in the model's precision
        is_gemma_norm = config.family == "gemma3" and name.endswith("norm.weight")
        if not is_packed(tensor):
            tensor = tensor.to(torch.float32 if is_gemma_norm else dtype)
        pieces = waiting.setdefault(part.name, [None] * part.count)
        pieces[part.index] = tensor
        complete = [piece for piece in pieces if piece is not None]
        if len(complete) == part.count:
            del waiting[part.name]
            yield part.name, complete[0].contiguous() if part.count == 1 else torch.cat(complete)
    if parts:
        raise PacelineError(f"{where}: weight {next(iter(parts))} is missing" + _and_more(list(parts)))
