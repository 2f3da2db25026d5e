"""A decoder's forward over whole texts: all rows in one product, no cache, differentiable in its weights.

The same weights run in `Decoder` when it decodes. There a row's bits may depend on nothing but its path, which costs
speed; here they need not, and a frozen target's states come a few times sooner. A test compares the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F

from paceline.models.config import RopeConfig, inverse_frequencies
from paceline.models.decoder import Decoder
from paceline.ops.activation import gated
from paceline.ops.norm import rms_norm
from paceline.ops.packed import AnyLinear, look_up, unpacked
from paceline.ops.rotary import RotaryTable, rotary_table, rotate


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents one after another: ids [T], positions [T] in the own document, where each lies: [start, stop)."""

    ids: torch.Tensor
    positions: torch.Tensor
    spans: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], device: torch.device) -> "Texts":
        lengths = [len(document) for document in documents]
        stops = torch.tensor(lengths).cumsum(0).tolist()
        return cls(
            torch.tensor([token for document in documents for token in document], device=device),
            torch.cat([torch.arange(length) for length in lengths]).to(device),
            list(zip([0, *stops], stops, strict=False)),
        )


def whole_states(
    decoder: Decoder,
    texts: Texts,
    layers: Sequence[int],
    left_out: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> dict[int, torch.Tensor]:
    """States [T, d] at every token: outputs of layers, and for −1 what the output layer reads.

    left_out[layer]: [T] bool, tokens of whole documents that pass this layer by.
    """
    c, found = decoder.config, {}
    x = look_up(texts.ids, decoder.embedding)
    if c.embedding_scale != 1.0:
        x = x * torch.tensor(c.embedding_scale, dtype=x.dtype, device=x.device)
    rotary = {rope: _rotary(decoder, rope, texts) for rope in (c.rope, c.local_rope) if rope is not None}
    last = decoder.config.num_layers - 1 if -1 in layers else max(layers)
    for index, layer in enumerate(decoder.layers[: last + 1]):
        before = x
        heads = _product(layer.qkv, rms_norm(x, layer.attention_norm, c.rms_norm_eps)).view(len(x), -1, c.head_dim)
        q, k, v = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, c.rms_norm_eps), rms_norm(k, layer.k_norm, c.rms_norm_eps)
        rope = c.local_rope if layer.window is not None and c.local_rope is not None else c.rope
        wide = decoder.compute_dtype
        q, k = rotate(q.to(wide), rotary[rope]) * c.attention_scale, rotate(k.to(wide), rotary[rope])
        q, k = q.to(v.dtype), k.to(v.dtype)  # fused attention in bf16 sums in float32, and takes a third of the time
        mixed = torch.cat([_attend(q[a:b], k[a:b], v[a:b], layer.window) for a, b in texts.spans])
        y = _product(layer.output, mixed.flatten(1))
        x = x + (y if layer.post_attention_norm is None else rms_norm(y, layer.post_attention_norm, c.rms_norm_eps))
        y = _product(layer.gate_up, rms_norm(x, layer.mlp_norm, c.rms_norm_eps))
        y = _product(layer.down, gated(y, c.activation))
        x = x + (y if layer.post_mlp_norm is None else rms_norm(y, layer.post_mlp_norm, c.rms_norm_eps))
        if index in left_out:
            x = torch.where(left_out[index][:, None], before, x)
        if index in layers:
            found[index] = x
    if -1 in layers:
        found[-1] = rms_norm(x, decoder.norm, c.rms_norm_eps)
    return found


def _product(layer: AnyLinear, x: torch.Tensor) -> torch.Tensor:
    linear = unpacked(layer)
    return F.linear(x, linear.weight, linear.bias)


def _rotary(decoder: Decoder, rope: RopeConfig, texts: Texts) -> RotaryTable:
    frequencies, factor = inverse_frequencies(rope, decoder.config.head_dim, decoder.config.max_context)
    return rotary_table(texts.positions, frequencies.to(texts.ids.device), factor, decoder.compute_dtype)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention within a document; q [n, heads, head_dim], scaled."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if window is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
    else:
        places = torch.arange(q.shape[2], device=q.device)
        seen = (places[None] <= places[:, None]) & (places[None] > places[:, None] - window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0, enable_gqa=True)
    return out[0].transpose(0, 1)
