"""Heads in our own format: what EAGLE's and Medusa's say, and what they leave unsaid: above all the target.

config.json has the published keys of the kind of head, each flag written out, and under `paceline` the rest.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.models.config import ModelConfig
from paceline.models.home import write_json
from paceline.models.origin import FORMAT, KEY, Origin

PROVENANCE = "provenance.json"


def layer_description(target: ModelConfig) -> dict[str, Any]:
    """A Llama layer of the target's shape, in Hugging Face's keys."""
    return {
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_context,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def write_head(
    folder: Path,
    config: Mapping[str, Any],
    own: Mapping[str, Any],
    origin: Origin,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    provenance: Mapping[str, Any],
) -> None:
    """Write a head's folder; floating-point tensors are stored in `dtype`."""
    from safetensors.torch import save_file

    stored = {
        name: (tensor.detach().to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu()).contiguous()
        for name, tensor in tensors.items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(stored, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    write_json(folder / PROVENANCE, json.loads(json.dumps(provenance, default=str)))
    write_json(folder / "config.json", {**config, KEY: {"format": FORMAT, "target": origin.to_dict(), **own}})
