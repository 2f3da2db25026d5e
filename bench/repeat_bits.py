"""Does the same pass ever give other bits? Fresh processes, one after another, each comparing its own first passes.

    python bench/repeat_bits.py [--minutes 10] [--dtype bf16|fp32|fp64] [--vocab 20000]

A child runs the same tokens three times, one row at a time and five at a time in turn, and compares hidden states and
logits bit for bit: what a library does differently on its first calls, or once in a thousand, shows here. The weights
are random, and the parent computes nothing with torch, so that every child makes torch's first calls anew.
"""

import script  # noqa: F401 - Ctrl-C is one line from here on

# isort: split
import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from step_overhead import random_config

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, Segment
from paceline.models.layout import canonical_parts, prepare

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
PROMPT, ROWS = 60, 10  # across a border of the cache's blocks


def random_weights(config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Made by numpy: torch's threads must not exist before the children do."""
    generator = np.random.default_rng(0)
    weights = {}
    for name, part in canonical_parts(config).items():
        scale = {"model.embed_tokens.weight": 0.7, "model.norm.weight": 1.0}.get(name, 0.35)
        values = (scale * generator.standard_normal(tuple(part.shape))).astype(np.float32)
        if dtype == torch.bfloat16:
            weights[name] = torch.from_numpy((values.view(np.uint32) >> 16).astype(np.uint16)).view(torch.bfloat16)
        else:
            weights[name] = torch.from_numpy(values.astype(np.float64 if dtype == torch.float64 else np.float32))
    return weights


@dataclass(frozen=True)
class Run:
    """hidden[layer]: [PROMPT + ROWS, d]; logits: [ROWS, V]."""

    hidden: tuple[torch.Tensor, ...]
    logits: torch.Tensor


def run(decoder: Decoder, tokens: list[int], rows_a_pass: int) -> Run:
    cache = decoder.new_pool(2 * len(tokens)).new_sequence()
    layers = range(decoder.config.num_layers)
    hidden: list[list[torch.Tensor]] = [[] for _ in layers]
    logits = []
    passes = [tokens[:PROMPT], *(tokens[i : i + rows_a_pass] for i in range(PROMPT, len(tokens), rows_a_pass))]
    for number, chunk in enumerate(passes):
        out = decoder.forward([Segment(cache, chunk)], taps=tuple(layers))
        cache.commit(range(len(chunk)))
        for layer in layers:
            hidden[layer].append(out.taps[layer])
        if number:
            logits.append(decoder.logits(out.hidden))
    return Run(tuple(torch.cat(parts) for parts in hidden), torch.cat(logits))


def compare(first: Run, other: Run) -> list[str]:
    """Which rows of what differ, and by how much."""
    found = []
    named = {f"layer {i}": pair for i, pair in enumerate(zip(first.hidden, other.hidden, strict=True))}
    for name, (a, b) in (named | {"logits": (first.logits, other.logits)}).items():
        rows = (a != b).any(-1).nonzero().flatten().tolist()
        if rows:
            found.append(f"{name}: rows {rows}, by at most {(a.double() - b.double()).abs().max():.3g}")
    return found


def child(number: int, config: ModelConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> int:
    decoder = Decoder(config, dict(prepare(config, weights.items(), dtype)), dtype)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, PROMPT + ROWS).tolist()
    sizes = (1, 5, 1) if number % 2 else (5, 1, 5)
    runs = [run(decoder, tokens, size) for size in sizes]
    found = [line for other in runs[1:] for line in compare(runs[0], other)]
    for line in found:
        print(f"process {number}, {sizes[0]} rows a pass first: {line}", flush=True)
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--vocab", type=int, default=20_000)
    args = parser.parse_args()
    config, dtype = random_config(args.vocab), DTYPES[args.dtype]
    weights = random_weights(config, dtype)
    end, number, different = time.monotonic() + 60 * args.minutes, 0, 0
    while time.monotonic() < end:
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                code = child(number, config, weights, dtype)
            finally:
                os._exit(code)
        different += os.waitpid(pid, 0)[1] != 0
        number += 1
        if number % 100 == 0:
            print(f"{number} processes, {different} with a difference", flush=True)
    print(f"{number} processes, {args.dtype}, {torch.get_num_threads()} threads: {different} with a difference")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
