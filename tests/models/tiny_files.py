"""Tiny models as files: a safetensors folder, whole or sharded, and a GGUF file."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 257,
}


def llama_weights(dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> dict[str, torch.Tensor]:
    """Random weights of `CONFIG` under Hugging Face's names."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (0.4 * torch.randn(*shape, generator=generator)).to(dtype)

    weights = {"model.embed_tokens.weight": random(258, 32)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, shape in {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}.items():
            weights[f"{prefix}self_attn.{name}_proj.weight"] = random(*shape)
        for name, shape in {"gate": (48, 32), "up": (48, 32), "down": (32, 48)}.items():
            weights[f"{prefix}mlp.{name}_proj.weight"] = random(*shape)
        weights[f"{prefix}input_layernorm.weight"] = 1 + random(32)
        weights[f"{prefix}post_attention_layernorm.weight"] = 1 + random(32)
    weights["model.norm.weight"] = 1 + random(32)
    if not tied:
        weights["lm_head.weight"] = random(258, 32)
    return weights


def write_folder(folder: Path, weights: dict[str, torch.Tensor], shards: int = 1, **config: object) -> Path:
    """A folder as `save_pretrained` writes it: config.json and weights in `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(weights)
    weight_map = {}
    for n in range(shards):
        shard = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[n * len(names) // shards : (n + 1) * len(names) // shards]
        save_file({name: weights[name] for name in mine}, folder / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(mine, shard))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins for bytes of byte-level BPE (GPT-2's table), by byte value."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return [chr(byte) if byte in kept else chr(256 + others.index(byte)) for byte in range(256)]


def write_gguf(path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The same model as an F32 GGUF file, with a tokenizer of single bytes and "th"."""
    import gguf

    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*byte_alphabet(), "th", "<|endoftext|>"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    for name, tensor in weights.items():
        data = tensor.to(torch.float32).numpy()
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            if stem in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = CONFIG["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
                halves = data.reshape(heads, 2, data.shape[0] // heads // 2, -1)
                data = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(data.shape)
            writer.add_tensor(f"blk.{layer}.{names[stem]}.weight", data)
        else:
            writer.add_tensor(f"{names[stem]}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
