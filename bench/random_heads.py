"""A head with random weights: what a step of it costs does not hang on what it has learnt."""

from collections.abc import Callable
from dataclasses import replace

import torch

from paceline.models.decoder import Decoder
from paceline.models.head_layer import HeadLayer, HeadRows
from paceline.models.head_matrices import HeadMatrices
from paceline.models.heads import DraftVocabulary, Eagle3Head, Eagle3Options, Eagle3Weights


def random_eagle3(
    target: Decoder, draft_vocab_size: int, draft_dtype: str | None = None, context: int = 128
) -> Callable[[], torch.Tensor]:
    """A draft step of an EAGLE-3 head as wide as the target, behind `context` rows: token and state in, logits out."""
    matrices = HeadMatrices.of(target, draft_dtype)
    c, d = target.config, target.config.hidden_size
    q, kv, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size

    def random(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(*shape)).to(matrices.dtype)

    shapes = {
        "self_attn.q_proj": (q, 2 * d),
        "self_attn.k_proj": (kv, 2 * d),
        "self_attn.v_proj": (kv, 2 * d),
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (inner, d),
        "mlp.up_proj": (inner, d),
        "mlp.down_proj": (d, inner),
        "post_attention_layernorm": (d,),
    }
    config = replace(c, num_layers=1, sliding_windows=(None,))
    layer = HeadLayer(config, {f"{name}.weight": random(*shape) for name, shape in shapes.items()}, matrices)
    weights = Eagle3Weights(
        embedding=target.embedding,
        fc=matrices.linear(random(d, 3 * d)),
        fuse_norms=(),
        input_norm=None,
        embedding_norm=random(d),
        feature_norm=random(d),
        output_norm=random(d),
        output=matrices.linear(random(draft_vocab_size, d), finely=True),
    )
    vocabulary = DraftVocabulary(c.vocab_size, torch.arange(draft_vocab_size))
    head = Eagle3Head(layer, weights, vocabulary, Eagle3Options((0, 1, 2)))
    cache = layer.new_pool(context + 1).new_sequence()
    head.forward([HeadRows(cache, [5] * context, random(context, d))])
    cache.commit(range(context))
    feature = random(1, d)
    return lambda: head.logits(head.forward([HeadRows(cache, [7], feature)]))
