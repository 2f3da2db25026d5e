"""A small model that is trained to draft, pruned from the target: its configuration and its first weights."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.ops.packed import unpacked


def pruned(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """The configuration of some layers of a model. Raises PacelineError for layers that it does not have."""
    strange = next((i for i in layers if not 0 <= i < config.num_layers), None)
    if strange is not None or not layers or list(layers) != sorted(set(layers)):
        raise PacelineError(
            f"the student's layers are {list(layers)}; they must be some of 0 to {config.num_layers - 1}, in order"
        )
    windows = tuple(config.sliding_windows[i] for i in layers)
    return replace(config, num_layers=len(layers), sliding_windows=windows)


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` of a model's layers, the first and the last among them, evenly spread."""
    if count == 1:
        return (0,)
    return tuple(sorted({round(i * (num_layers - 1) / (count - 1)) for i in range(count)}))


def pruned_weights(target: Decoder, layers: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The student's first weights, in the prepared layout: the target's own. Biases and extra norms come along."""
    weights = {"embed": target.embedding, "norm": target.norm}
    if not target.config.tie_embeddings:
        weights["head"] = unpacked(target.head).weight
    for place, index in enumerate(layers):
        layer = target.layers[index]
        for name in ("qkv", "output", "gate_up", "down"):
            own = unpacked(getattr(layer, name))
            weights[f"layers.{place}.{name}"] = own.weight
            if own.bias is not None:
                weights[f"layers.{place}.{name}_bias"] = own.bias
        norms = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "post_attention_norm", "post_mlp_norm")
        for name in norms:
            if getattr(layer, name) is not None:
                weights[f"layers.{place}.{name}"] = getattr(layer, name)
    return {name: tensor.detach().to(dtype).clone() for name, tensor in weights.items()}
