"""The one layer of a feature head, in training: its first weights, and the layer made of them."""

import torch

from paceline.models.config import ModelConfig
from paceline.models.head_layer import HeadLayer
from paceline.models.head_matrices import HeadMatrices
from paceline.train.recipe import Initial, Parameters, in_one_call


def initial_layer(draw: Initial, config: ModelConfig, width: int, prefix: str) -> dict[str, torch.Tensor]:
    """Random weights of a Llama layer whose attention reads `width` values a row."""
    size, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (q_width, width),
        "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width),
        "self_attn.o_proj": (size, q_width),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    tensors = {f"{prefix}{name}.weight": draw.matrix(*shape) for name, shape in shapes.items()}
    for name in ("self_attn.o_proj", "mlp.down_proj"):  # at first the layer adds little to what it reads
        tensors[f"{prefix}{name}.weight"] *= 0.1
    return {**tensors, f"{prefix}post_attention_layernorm.weight": draw.ones(size)}


def trained_layer(parameters: Parameters, config: ModelConfig, prefix: str) -> HeadLayer:
    """The layer that inference runs, made of the trained tensors."""
    own = {name.removeprefix(prefix): tensor for name, tensor in parameters.items() if name.startswith(prefix)}
    some = next(iter(own.values()))
    layer = HeadLayer(config, own, HeadMatrices(some.dtype, some.device))
    in_one_call((layer.qkv, layer.output, layer.gate_up, layer.down))
    return layer
