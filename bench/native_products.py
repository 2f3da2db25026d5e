"""Time and bandwidth of the native product, by weight layout, shape and number of rows.

    python bench/native_products.py --types Q4_K Q6_K --levels amx --threads 2

Each time is the median over calls on matrices in turn, so many that they do not fit into the cache. Beside it stands a
plain read of as many bytes (torch's sum over them) on the same threads.
"""

import script  # noqa: F401 - Ctrl-C is one line from here on

# isort: split
import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from provenance import provenance, warn_if_busy

from paceline.errors import PacelineError
from paceline.ops.native import library
from paceline.ops.packed import BF16, TYPES, PackedLinear, pack

SHAPES = ((17920, 1536), (1536, 8960))  # gate and up, and down, of Qwen2.5-1.5B
ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32)


def matrices(type_id: int, out: int, inner: int, count: int, level: str) -> list[PackedLinear]:
    """Random codes; scales that are small numbers, so that nothing overflows."""
    if type_id == BF16:
        return [PackedLinear(pack(torch.randn(out, inner).bfloat16(), BF16, inner), None, level) for _ in range(count)]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    shape = (out, inner // block * size)
    return [
        PackedLinear(pack(torch.randint(0, 32, shape, dtype=torch.uint8), type_id, inner), None, level)
        for _ in range(count)
    ]


def median_ms(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    for call in calls[:2]:
        call()
    times = []
    for _ in range(repeats):
        for call in calls:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=list(TYPES.values()), default=list(TYPES.values()))
    parser.add_argument("--levels", nargs="+", choices=library.LEVELS, help="default: the best of this machine")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--megabytes", type=int, default=600, help="of matrices taken in turn (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if (reason := library.why_not()) is not None:
        raise PacelineError(f"native operators {reason}")

    warn_if_busy()
    torch.set_num_threads(args.threads)
    print(json.dumps(provenance()))
    numbers = {name: number for number, name in TYPES.items()}
    for name in args.types:
        for out, inner in SHAPES:
            for level in args.levels or [library.level()]:
                size = matrices(numbers[name], out, inner, 1, level)[0].packed.numel()
                held = matrices(numbers[name], out, inner, max(2, args.megabytes * 1_000_000 // size), level)
                words = [linear.packed[: size // 8 * 8].view(torch.int64) for linear in held]
                read = median_ms([w.sum for w in words], args.repeats)
                print(f"{name:5} {level:8} {out} x {inner}, plain read {read:.2f} ms, {size / read / 1e6:.1f} GB/s")
                first = None
                for rows in args.rows:
                    x = torch.randn(rows, inner).bfloat16()
                    took = median_ms([partial(linear, x) for linear in held], args.repeats)
                    first = first or took
                    ratio = f"{took / first:.2f} × {args.rows[0]} row{'s' * (args.rows[0] > 1)}"
                    print(f"  {rows:3} rows: {took:.3f} ms, {size / took / 1e6:.1f} GB/s, {ratio}", flush=True)


if __name__ == "__main__":
    main()
