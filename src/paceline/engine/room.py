"""How much fits into memory: KV blocks, and so tokens of a request."""

from pathlib import Path

import torch

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig
from paceline.models.load import LoadedModel
from paceline.ops.attention import BLOCK
from paceline.values import shown


def affordable_blocks(model: LoadedModel, memory: int | None) -> int:
    """KV blocks that `memory` bytes hold; None: a quarter of what is free. Raises PacelineError where it is none."""
    c = model.config
    of_block = 2 * BLOCK * c.num_layers * c.num_kv_heads * c.head_dim * model.decoder.dtype.itemsize
    available = _free_memory(model.decoder.device) // 4 if memory is None else memory
    if available < of_block:
        raise PacelineError(
            f"the KV cache may take {available} bytes, but a block of {BLOCK} positions takes {of_block}",
            hint="raise kv_cache_memory_bytes",
        )
    return available // of_block


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:  # what the file cache holds can be had, too: SC_AVPHYS_PAGES leaves it out
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):  # not Linux
        return 8 << 30


def model_len(config: ModelConfig, asked: int | None, blocks: int) -> int:
    """Tokens that a request may have: no more than the KV blocks of one alone can hold."""
    fits = blocks * BLOCK + 1  # the newest token has no row
    if asked is None:
        return min(config.max_context, fits)
    if not 1 < asked <= config.max_context:
        raise PacelineError(
            f"max_model_len is {shown(asked)}, and the model has {config.max_context} positions",
            hint=f"choose 2 to {config.max_context}",
        )
    if asked > fits:
        raise PacelineError(
            f"max_model_len is {shown(asked)}, but the KV cache has room for {fits} tokens",
            hint="lower max_model_len, or raise kv_cache_memory_bytes",
        )
    return asked
