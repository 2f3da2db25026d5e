"""What batch-invariant arithmetic costs: one pass of the decoder against the same pass with naive operators.

Both in torch's operators, not in native ones. Naive: linear layers in one call of whatever size, attention through
torch's `scaled_dot_product_attention` in the model's precision. Both run in turn, the ratio of medians is printed for a
few row counts, contexts and a prefill.

    python bench/exactness_cost.py --model smollm2-135m
"""

import script  # noqa: F401 - Ctrl-C is one line from here on

# isort: split
import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import provenance, warn_if_busy

from paceline.models.cache import SequenceCache
from paceline.models.decoder import Decoder, Segment
from paceline.models.load import load_model
from paceline.models.progress import terminal_progress
from paceline.ops.native.library import VARIABLE
from paceline.ops.operators import AttentionLayer, AttentionRows
from paceline.ops.twins import TorchOperators, TorchStep


class NaiveStep(TorchStep):
    """All keys of a sequence in one call, in the model's precision."""

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, sequence: Any
    ) -> torch.Tensor:
        rows, at, source = sequence.rows, sequence.write_to, sequence.source
        source.keys[layer.index][at[0], :, at[1]] = k[rows]
        source.values[layer.index][at[0], :, at[1]] = v[rows]
        keys, values = (
            store[layer.index][sequence.blocks].transpose(0, 1).flatten(1, 2)[None]
            for store in (source.keys, source.values)
        )
        hidden = sequence.unseen(layer.window).flatten(1)  # [n, keys]
        out = F.scaled_dot_product_attention(
            q[rows].to(keys.dtype).transpose(0, 1)[None],
            keys,
            values,
            attn_mask=~hidden[None, None],
            scale=1.0,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


class NaiveOperators(TorchOperators):
    def step(self, rows: Sequence[AttentionRows], num_heads: int) -> NaiveStep:
        return NaiveStep(self, rows, num_heads)


def naive_twin(decoder: Decoder) -> Decoder:
    """The same weights, every linear in one call, torch's own attention."""
    twin = copy.copy(decoder)
    twin.operators = NaiveOperators(decoder.dtype)
    twin.layers = [copy.copy(layer) for layer in decoder.layers]
    for layer in twin.layers:
        for name in ("qkv", "output", "gate_up", "down"):
            linear = copy.copy(getattr(layer, name))
            linear.rows, linear.padded = sys.maxsize, False
            object.__setattr__(layer, name, linear)
    twin.head = copy.copy(decoder.head)
    twin.head.rows, twin.head.padded = sys.maxsize, False
    return twin


def one_pass(decoder: Decoder, cache: SequenceCache, rows: int, logits: int) -> None:
    out = decoder.forward([Segment(cache, range(100, 100 + rows))])
    decoder.logits(out.hidden[-logits:])


def in_turn(first: Callable[[], None], second: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Medians of both in milliseconds, A B A B …"""
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(repeats + 2):
        for run, taken in zip((first, second), times, strict=True):
            start = time.perf_counter()
            run()
            if round_number >= 2:  # two rounds of warm-up
                taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--log", type=Path, help="append the result here as one JSON line")
    args = parser.parse_args()

    os.environ[VARIABLE] = "torch"  # before the model chooses its operators
    warn_if_busy()
    facts = provenance()
    model = load_model(args.model, dtype=args.dtype, progress=terminal_progress())
    exact, naive = model.decoder, naive_twin(model.decoder)
    print(
        f"{model.name} {args.dtype}, exact: {model.exact}, "
        f"padding needed: {sum(x.padded for x in exact.linears())} linears"
    )
    print(f"{'pass':>24} {'exact ms':>9} {'naive ms':>9} {'ratio':>6}")
    results = []
    shapes = [(context, rows, rows) for context in (128, 1024) for rows in (1, 6, 16, 32)] + [(0, 512, 1)]
    for context, rows, logits in shapes:
        pool = exact.new_pool(context + rows)
        cache = pool.new_sequence()
        for start in range(0, context, 128):
            exact.forward([Segment(cache, range(start, start + 128))])
            cache.commit(range(128))

        def run_exact(cache: SequenceCache = cache, rows: int = rows, logits: int = logits) -> None:
            one_pass(exact, cache, rows, logits)

        def run_naive(cache: SequenceCache = cache, rows: int = rows, logits: int = logits) -> None:
            one_pass(naive, cache, rows, logits)

        a, b = in_turn(run_exact, run_naive, args.repeats if rows < 512 else 5)
        name = f"{rows} rows after {context}" if context else f"prefill of {rows}"
        print(f"{name:>24} {a:9.1f} {b:9.1f} {a / b:6.2f}", flush=True)
        results.append({"context": context, "rows": rows, "exact_ms": a, "naive_ms": b, "ratio": a / b})
    result = {"provenance": facts, "exact": model.exact, "passes": results}
    print(json.dumps(result))
    if args.log:
        with args.log.open("a") as file:
            print(json.dumps(result), file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
