"""A small model that is trained to draft: pruned from the target, and its forward over whole texts with a gradient.

The same weights run in `Decoder` when it drafts (or answers, for on-policy training): the tensors are shared, the
forward is written once more, for whole documents and without a cache; a test compares the two.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig, RopeConfig, inverse_frequencies
from paceline.models.decoder import Decoder
from paceline.ops.activation import gated
from paceline.ops.linear import Linear
from paceline.ops.norm import rms_norm
from paceline.ops.rotary import RotaryTable, rotary_table, rotate
from paceline.train.batch import Batch


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
        weights["head"] = target.head.weight
    for place, index in enumerate(layers):
        layer = target.layers[index]
        for name in ("qkv", "output", "gate_up", "down"):
            own: Linear = getattr(layer, name)
            weights[f"layers.{place}.{name}"] = own.weight
            if own.bias is not None:
                weights[f"layers.{place}.{name}_bias"] = own.bias
        norms = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "post_attention_norm", "post_mlp_norm")
        for name in norms:
            if getattr(layer, name) is not None:
                weights[f"layers.{place}.{name}"] = getattr(layer, name)
    return {name: tensor.detach().to(dtype).clone() for name, tensor in weights.items()}


def student_states(student: Decoder, batch: Batch) -> torch.Tensor:
    """What the output layer reads at every token [T, d], differentiable in the student's weights."""
    c = student.config
    x = F.embedding(batch.ids, student.embedding) * c.embedding_scale
    rotary = {rope: _rotary(student, rope, batch) for rope in (c.rope, c.local_rope) if rope is not None}
    documents = batch.spans()
    for layer in student.layers:
        heads = _product(layer.qkv, rms_norm(x, layer.attention_norm, c.rms_norm_eps)).view(len(x), -1, c.head_dim)
        q, k, v = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, c.rms_norm_eps), rms_norm(k, layer.k_norm, c.rms_norm_eps)
        rope = c.local_rope if layer.window is not None and c.local_rope is not None else c.rope
        q, k = rotate(q, rotary[rope]) * c.attention_scale, rotate(k, rotary[rope])
        mixed = torch.cat([_attend(q[a:b], k[a:b], v[a:b], layer.window) for a, b in documents])
        y = _product(layer.output, mixed.flatten(1))
        x = x + (y if layer.post_attention_norm is None else rms_norm(y, layer.post_attention_norm, c.rms_norm_eps))
        y = _product(layer.gate_up, rms_norm(x, layer.mlp_norm, c.rms_norm_eps))
        y = _product(layer.down, gated(y, c.activation))
        x = x + (y if layer.post_mlp_norm is None else rms_norm(y, layer.post_mlp_norm, c.rms_norm_eps))
    return rms_norm(x, student.norm, c.rms_norm_eps)


def _product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, linear.weight, linear.bias)


def _rotary(student: Decoder, rope: RopeConfig, batch: Batch) -> RotaryTable:
    frequencies, factor = inverse_frequencies(rope, student.config.head_dim, student.config.max_context)
    return rotary_table(batch.positions, frequencies.to(batch.ids.device), factor, student.embedding.dtype)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention within a document; q [n, heads, head_dim], scaled."""
    n = len(q)
    places = torch.arange(n, device=q.device)
    seen = places[None] <= places[:, None]
    if window is not None:
        seen &= places[None] > places[:, None] - window
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k.to(q.dtype), v.to(q.dtype)))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0, enable_gqa=True)
    return out[0].transpose(0, 1)
