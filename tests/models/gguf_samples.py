"""Tiny GGUF files, written with gguf-py from random transformers models as llama.cpp's converter does."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / heads
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}


def tiny_model(model_type: str, **changes: Any) -> Any:
    """A random transformers model; norms are not 1, biases not 0, so that a mix-up shows."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.4)
    return model


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's `LlamaModel.permute` (conversion/llama.py): a head's two halves, interleaved."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """GGUF name → values, as the converter writes them: q/k of llama permuted, Gemma's norms plus one."""
    config, out = model.config, {}
    arch = ARCHITECTURES[config.model_type]
    names = NAMES | (GEMMA_NAMES if arch == "gemma3" else {})
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        if arch == "llama" and "q_proj" in name:
            value = permuted(value, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            value = permuted(value, config.num_key_value_heads)
        top = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }
        if name in top:
            out[top[name]] = value.numpy()
        else:
            match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
            assert match, name
            out[f"blk.{match[1]}.{names[match[2]]}.{match[3]}"] = value.numpy()
    return out


@dataclass
class Sample:
    """A GGUF file to be: change `values` or `tensors`, then write. A value of None drops its key."""

    arch: str
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)  # arrays, or Raw blocks

    def write(self, path: Path, **writer_options: Any) -> Path:
        writer = gguf.GGUFWriter(path, self.arch, **writer_options)
        for key, value in self.values.items():
            if value is None:
                continue
            add_value(writer, key, value)
        for name, value in self.tensors.items():
            if isinstance(value, Raw):
                writer.add_tensor(name, value.blocks, raw_dtype=value.type)
            else:
                writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@dataclass
class Raw:
    """Quantised blocks [rows, bytes of a row]."""

    blocks: np.ndarray
    type: gguf.GGMLQuantizationType


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def model_sample(model: Any, **values: Any) -> Sample:
    """The file of a transformers model; `values` (dots as `__`) add metadata keys or change them."""
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10000.0,
    }
    metadata: dict[str, Any] = {f"{arch}.{key}": value for key, value in keys.items()}
    metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    for key, value in values.items():
        metadata[f"{arch}.{key.replace('__', '.')}"] = value
    return Sample(arch, metadata, gguf_tensors(model))
