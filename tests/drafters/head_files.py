"""Tiny draft heads with random weights: their files in every published format, and what they must compute.

Nothing of the package is imported. Keys and configurations are those of the published checkpoints, written out here;
the computation is straight-line: whole texts, no cache, one path at a time.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 24, 80  # 4 · 24 is not the hidden size
EPS, THETA = 1e-5, 10000.0

Weights = dict[str, Tensor]


def random(*shape: int, seed: int, scale: float = 0.35) -> Tensor:
    """In float64, but of float32's values: that is what files store."""
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).double()


def norm_weight(size: int, seed: int) -> Tensor:
    return (1 + random(size, seed=seed, scale=0.15)).float().double()


def layer_weights(size: int, width: int, seed: int = 1, qkv_bias: bool = False, qk_norm: bool = False) -> Weights:
    """One Llama layer whose attention reads `width` values a row, with what Qwen 2 or Qwen 3 add to it."""
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, width),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, width),
        "self_attn.o_proj": (size, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, size),
        "mlp.up_proj": (INNER, size),
        "mlp.down_proj": (size, INNER),
    }
    weights = {
        f"{name}.weight": random(*shape, seed=seed + i, scale=0.2) for i, (name, shape) in enumerate(shapes.items())
    }
    weights["post_attention_layernorm.weight"] = norm_weight(size, seed=seed + 20)
    if qkv_bias:
        for i, name in enumerate("qkv"):
            rows = len(weights[f"self_attn.{name}_proj.weight"])
            weights[f"self_attn.{name}_proj.bias"] = random(rows, seed=seed + 21 + i)
    if qk_norm:
        for i, name in enumerate("qk"):
            weights[f"self_attn.{name}_norm.weight"] = norm_weight(HEAD_DIM, seed=seed + 25 + i)
    return weights


def layer_config(size: int, vocab_size: int, **changes: object) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        **changes,
    }


def write(folder: Path, config: dict[str, object], tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    """A head's folder; a pickled file where the name says so. Floating-point tensors are stored in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: (t.float() if t.is_floating_point() else t).clone().contiguous() for name, t in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(stored, folder / file)
    else:
        torch.save(stored, folder / file)
    return folder


# What the heads compute


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rope(x: Tensor) -> Tensor:
    """x [n, heads, head_dim], row t at position t; angles in float32, as heads were trained with."""
    angles = torch.arange(len(x)).float()[:, None] * (1 / THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    cos, sin = angles.cos()[:, None].double(), angles.sin()[:, None].double()
    a, b = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def run_layer(w: dict[str, Tensor], x: Tensor, residual: Tensor) -> Tensor:
    n = len(x)

    def heads(name: str) -> Tensor:
        y = (x @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0)).view(n, -1, HEAD_DIM)
        norm = w.get(f"self_attn.{name}_norm.weight")
        return y if norm is None else rms(y, norm)

    q, k, v = rope(heads("q")), rope(heads("k")), heads("v")
    k, v = k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
    h = residual + mixed @ w["self_attn.o_proj.weight"].T
    y = rms(h, w["post_attention_layernorm.weight"])
    gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
    return h + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T


@dataclass
class Reference:
    """A head as three functions: (tokens, features) → states, state → logits of the target's vocabulary, feedback."""

    fuse: Callable[[dict[int, Tensor]], Tensor]
    states: Callable[[list[int], Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    feedback: Callable[[Tensor], Tensor] = field(default=lambda state: state)

    def after(self, text: list[int], hidden: dict[int, Tensor], drafted: list[int]) -> Tensor:
        """Draft logits [V] after `text` and `drafted`; `hidden`: the target's states at all of `text` but its last."""
        features = self.fuse(hidden)
        states = self.states(text[1:], features)
        for i in range(len(drafted)):
            features = torch.cat((features, self.feedback(states[-1])[None]))
            states = self.states([*text[1:], *drafted[: i + 1]], features)
        return self.logits(states[-1])


@dataclass
class Head:
    """A head in one format: what its folder holds, and what it must compute."""

    config: dict[str, object]
    tensors: dict[str, Tensor]
    reference: Reference
    file: str = "model.safetensors"
    layers: tuple[int, ...] = (-1,)  # outputs that it reads

    def write(self, folder: Path) -> Path:
        return write(folder, self.config, self.tensors, self.file)


def eagle(embed: Tensor, output: Tensor, bias: bool = False, qwen2: bool = False, own_embedding: bool = True) -> Head:
    """yuhuili/EAGLE-*: config.json of a Llama (or Qwen 2) with one layer, pytorch_model.bin."""
    size = embed.shape[1]
    layer, fc = layer_weights(size, size, qkv_bias=qwen2), random(size, 2 * size, seed=31, scale=0.1)
    b = random(size, seed=32) if bias else torch.zeros(size, dtype=torch.float64)
    own = random(*embed.shape, seed=33) if own_embedding else embed

    def states(tokens: list[int], features: Tensor) -> Tensor:
        x = torch.cat((own[tokens], features), -1) @ fc.T + b
        return run_layer(layer, x, x)

    reference = Reference(lambda hidden: hidden[-1], states, lambda state: output @ state)
    tensors = {
        **({"embed_tokens.weight": own} if own_embedding else {}),
        "fc.weight": fc,
        **({"fc.bias": b} if bias else {}),
        **{f"layers.0.{name}": tensor for name, tensor in layer.items()},
    }
    config = layer_config(size, len(embed), bias=bias, model_type="qwen2" if qwen2 else "llama")
    return Head(config, tensors, reference, "pytorch_model.bin")


def eagle3(
    embed: Tensor,
    layers: tuple[int, ...],
    *,
    size: int | None = None,
    own_embedding: bool = False,
    draft_vocab: int | None = None,
    norm_before_residual: bool = False,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_output: bool = False,
    qk_norm: bool = False,
    prefix: str = "midlayer.",
) -> Head:
    """The weights of an EAGLE-3 head under its authors' names; `config` is left to the format."""
    vocab_size, theirs = embed.shape
    size = size or theirs
    own = random(vocab_size, size, seed=43) if own_embedding else embed
    rows = draft_vocab or vocab_size
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(5))[:rows].sort().values
    layer = layer_weights(size, 2 * size, qk_norm=qk_norm)
    fc, lm_head = random(size, len(layers) * theirs, seed=41, scale=0.1), random(rows, size, seed=42)
    norms = {
        name: norm_weight(size, seed=50 + i)
        for i, name in enumerate((f"{prefix}hidden_norm", f"{prefix}input_layernorm", "norm"))
    }
    chunk_norms = [norm_weight(theirs, seed=60 + i) for i in range(len(layers))]
    input_norm = norm_weight(len(layers) * theirs, seed=70)

    def fuse(hidden: dict[int, Tensor]) -> Tensor:
        parts = [hidden[layer] for layer in layers]
        if fc_norm:
            parts = [rms(part, norm) for part, norm in zip(parts, chunk_norms, strict=True)]
        x = torch.cat(parts, -1)
        return (rms(x, input_norm) if norm_before_fc else x) @ fc.T

    def states(tokens: list[int], features: Tensor) -> Tensor:
        a, b = rms(own[tokens], norms[f"{prefix}input_layernorm"]), rms(features, norms[f"{prefix}hidden_norm"])
        return run_layer(layer, torch.cat((a, b), -1), b if norm_before_residual else features)

    def logits(state: Tensor) -> Tensor:
        full = torch.full((vocab_size,), -math.inf, dtype=torch.float64)
        full[ids] = lm_head @ rms(state, norms["norm"])
        return full

    tensors = {
        "fc.weight": fc,
        **{f"{prefix}{name}": tensor for name, tensor in layer.items()},
        **{f"{name}.weight": tensor for name, tensor in norms.items()},
        "lm_head.weight": lm_head,
        **({"embed_tokens.weight": own} if own_embedding else {}),
        **({f"fc_norm.{i}.weight": norm for i, norm in enumerate(chunk_norms)} if fc_norm else {}),
        **({"input_norm.weight": input_norm} if norm_before_fc else {}),
    }
    if draft_vocab is not None:
        tensors["d2t"] = ids - torch.arange(rows)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    feedback = (lambda state: rms(state, norms["norm"])) if norm_output else (lambda state: state)
    return Head({}, tensors, Reference(fuse, states, logits, feedback), layers=layers)


def eagle3_native(embed: Tensor, num_layers: int, draft_vocab: int | None = 100, **changes: object) -> Head:
    """yuhuili/EAGLE3-*: the layers it reads are not written down: inputs of 2, L/2 and L − 3."""
    head = eagle3(embed, (1, num_layers // 2 - 1, num_layers - 4), draft_vocab=draft_vocab)
    config = layer_config(embed.shape[1], len(embed), architectures=["LlamaForCausalLMEagle3"])
    head.config = {**config, "draft_vocab_size": draft_vocab or len(embed), **changes}
    head.file = "pytorch_model.bin"
    return head


def eagle3_specforge(embed: Tensor) -> Head:
    """SpecForge's export: safetensors, and the layers whose outputs it reads in `eagle_config`."""
    layers = (0, 2, 3)
    head = eagle3(embed, layers, own_embedding=True, draft_vocab=64)
    nested = {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}
    config = layer_config(embed.shape[1], len(embed), architectures=["LlamaForCausalLMEagle3"])
    head.config = {**config, "draft_vocab_size": 64, "eagle_config": nested, "norm_output": True}
    return head


def eagle3_speculators(
    embed: Tensor,
    size: int = 48,
    draft_vocab: int = 90,
    qwen3: bool = False,
    layers: tuple[int, ...] = (0, 2, 4),
    **flags: bool,
) -> Head:
    """RedHatAI/*-speculator.eagle3: layers by their inputs, `layers.0.`, the layer's config inside."""
    head = eagle3(
        embed,
        layers,
        size=size,
        own_embedding=True,
        draft_vocab=draft_vocab,
        prefix="layers.0.",
        qk_norm=qwen3,
        **flags,
    )
    head.config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer_config(size, len(embed), model_type="qwen3" if qwen3 else "llama"),
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": embed.shape[1],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "tie_word_embeddings": False,
        **flags,
    }
    return head


@dataclass
class Medusa:
    """Medusa heads in one format; `logits(h)` lists each head's logits [V] for a hidden state [d]."""

    config: dict[str, object]
    tensors: dict[str, Tensor]
    logits: Callable[[Tensor], list[Tensor]]
    file: str

    def write(self, folder: Path) -> Path:
        return write(folder, self.config, self.tensors, self.file)


def medusa(
    output: Tensor, layout: str, heads: int = 4, blocks: int = 1, own_output: bool = True, reduced: int | None = None
) -> Medusa:
    """layout: "original" (`{i}.{l}.linear`) or "vllm" (`blocks.{i}.layers.{l}`). Without `own_output` it is type B."""
    vocab_size, size = output.shape
    linears = [
        [(random(size, size, seed=100 + 10 * i + j), random(size, seed=200 + 10 * i + j)) for j in range(blocks)]
        for i in range(heads)
    ]
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(6))[: reduced or vocab_size]
    outs = [random(len(ids), size, seed=300 + i) if own_output else output for i in range(heads)]

    def logits(h: Tensor) -> list[Tensor]:
        result = []
        for own, out in zip(linears, outs, strict=True):
            x = h
            for weight, bias in own:
                y = weight @ x + bias
                x = x + y * y.sigmoid()
            row = out @ x
            if reduced:
                row = torch.full((vocab_size,), -math.inf, dtype=torch.float64).index_copy_(0, ids, row)
            result.append(row)
        return result

    names = {"original": ("{i}.{l}.linear", "{i}.{n}"), "vllm": ("blocks.{i}.layers.{l}", "lm_heads.{i}")}[layout]
    tensors = {}
    for i, own in enumerate(linears):
        for j, (weight, bias) in enumerate(own):
            name = names[0].format(i=i, l=j)
            tensors |= {f"{name}.weight": weight, f"{name}.bias": bias}
        if own_output:
            tensors[f"{names[1].format(i=i, n=blocks)}.weight"] = outs[i]
    if reduced:
        tensors["token_map"] = ids
    if layout == "vllm":
        config: dict[str, object] = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": size,
            "vocab_size": vocab_size,
            "num_heads": heads,
            "num_hidden_layers": blocks,
            "truncated_vocab_size": reduced or vocab_size,
            "medusa_fc_bias": True,
        }
        return Medusa(config, tensors, logits, "model.safetensors")
    # as published: medusa_model.py writes 5 whatever there is, "fix the uploaded config"
    config = {"medusa_num_heads": 5, "medusa_num_layers": blocks, "base_model_name_or_path": "tiny", "version": "2"}
    return Medusa(config, tensors, logits, "medusa_lm_head.pt" if own_output else "medusa_lm_head.safetensors")
