"""For `cpu_decode.py memory`, in a process of its own: MODEL DTYPE THREADS.

Decodes a little and prints, in bytes, the most resident memory, what it was once imports were done and the tokenizer
loaded, and how much of the rest is keys and values.
"""

import json
import sys
from pathlib import Path

import torch

from paceline.core.params import SamplingParams
from paceline.decode import decode
from paceline.drafters.none import NoDrafter
from paceline.models.load import load_model


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    name, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    before: list[int] = []
    model = load_model(name, dtype=dtype, accept=lambda tokenizer: before.append(peak()))
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode("A little text to go on from. " * 30, True)[:128]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for _ in decode(model.decoder, prompt, params, NoDrafter(), 0):
        pass
    c = model.config
    positions = -(-(len(prompt) + 16) // 64) * 64
    kv = 2 * c.num_layers * c.num_kv_heads * c.head_dim * positions * 2
    print(json.dumps({"before": before[-1], "peak": peak(), "kv": kv}))


if __name__ == "__main__":
    main()
