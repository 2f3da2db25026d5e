"""A loaded head's weights under their published names, each linear layer by itself."""

import torch

from paceline.models.head_layer import HeadLayer
from paceline.models.heads import DraftVocabulary, Eagle3Head, EagleHead, MedusaHeads
from paceline.ops.packed import AnyLinear, unpacked

Tensors = dict[str, torch.Tensor]


def layer_tensors(layer: HeadLayer, prefix: str) -> Tensors:
    """Of a head's one layer."""
    c = layer.config
    q, kv, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    tensors = {
        **_split(layer.qkv, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}),
        **_split(layer.output, {"self_attn.o_proj": c.hidden_size}),
        **_split(layer.gate_up, {"mlp.gate_proj": inner, "mlp.up_proj": inner}),
        **_split(layer.down, {"mlp.down_proj": c.hidden_size}),
        "post_attention_layernorm.weight": layer.mlp_norm,
    }
    if layer.q_norm is not None and layer.k_norm is not None:
        tensors |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _split(linear: AnyLinear, rows: dict[str, int]) -> Tensors:
    names, sizes, plain = list(rows), list(rows.values()), unpacked(linear)
    tensors = dict(zip((f"{name}.weight" for name in names), torch.split(plain.weight, sizes), strict=True))
    if plain.bias is not None:
        tensors |= dict(zip((f"{name}.bias" for name in names), torch.split(plain.bias, sizes), strict=True))
    return tensors


def eagle_tensors(head: EagleHead) -> Tensors:
    """With the embedding, which EAGLE's published heads carry."""
    return {
        "embed_tokens.weight": head.embedding,
        **_split(head.fc, {"fc": head.layer.config.hidden_size}),
        **layer_tensors(head.layer, "layers.0."),
    }


def eagle3_tensors(head: Eagle3Head, prefix: str, with_embedding: bool) -> Tensors:
    """With output rows of its own and, for a reduced vocabulary, d2t (offsets) and t2d."""
    w = head.weights
    tensors = {
        **_split(w.fc, {"fc": head.layer.config.hidden_size}),
        **layer_tensors(head.layer, prefix),
        f"{prefix}hidden_norm.weight": w.feature_norm,
        f"{prefix}input_layernorm.weight": w.embedding_norm,
        "norm.weight": w.output_norm,
        "lm_head.weight": unpacked(w.output).weight,
        **{f"fc_norm.{i}.weight": norm for i, norm in enumerate(w.fuse_norms)},
    }
    if w.input_norm is not None:
        tensors["input_norm.weight"] = w.input_norm
    if with_embedding:
        tensors["embed_tokens.weight"] = w.embedding
    return tensors | vocabulary_tensors(head.vocabulary)


def vocabulary_tensors(vocabulary: DraftVocabulary) -> Tensors:
    if vocabulary.ids is None:
        return {}
    ids = vocabulary.ids.cpu()
    return {"d2t": ids - torch.arange(len(ids)), "t2d": vocabulary.mask()}


def medusa_tensors(heads: MedusaHeads, block: str, output: str) -> Tensors:
    """`block`, `output`: names with {head} and {layer}. Every head gets output rows of its own, also shared ones."""
    tensors: Tensors = {}
    for number, head in enumerate(heads.heads):
        for layer, linear in enumerate(head.blocks):
            tensors |= _split(linear, {block.format(head=number, layer=layer): len(unpacked(linear).weight)})
        tensors[output.format(head=number, layer=len(head.blocks))] = unpacked(head.output).weight
    return tensors
