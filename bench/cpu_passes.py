"""Parts of `cpu_decode.py`: what a pass costs by its rows, and what it is made of."""

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.models.cache import SequenceCache
from paceline.models.decoder import Decoder, Segment
from paceline.ops.packed import AnyLinear, PackedLinear

AGAIN = 3  # calls of a turn


def in_turn(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, A A A B B B A A A …, two rounds of warm-up left out.

    The first call of a turn is not counted: behind matrix units, a pass that uses none takes up to a quarter longer.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 2):
        for name, call in calls.items():
            for again in range(AGAIN):
                start = time.perf_counter()
                call()
                if number > 1 and again:
                    times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(taken) for name, taken in times.items()}


def filled(decoder: Decoder, context: int, room: int) -> SequenceCache:
    cache = decoder.new_pool(context + room).new_sequence()
    ids = torch.randint(100, decoder.config.vocab_size, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    for first in range(0, context, 256):
        chunk = ids[first : first + 256]
        decoder.forward([Segment(cache, chunk)])
        cache.commit(range(len(chunk)))
    return cache


def one_pass(decoder: Decoder, cache: SequenceCache, rows: int) -> None:
    """Of `rows` rows behind the cache, and every row's logits; nothing is committed."""
    out = decoder.forward([Segment(cache, range(100, 100 + rows))])
    decoder.logits(out.hidden)


def pass_times(decoder: Decoder, context: int, counts: Sequence[int], repeats: int) -> dict[str, float]:
    """Milliseconds by number of rows."""
    cache = filled(decoder, context, max(counts))
    return in_turn({str(rows): lambda rows=rows: one_pass(decoder, cache, rows) for rows in counts}, repeats)  # type: ignore[misc]


def weight_of(linear: AnyLinear) -> torch.Tensor:
    return linear.packed if isinstance(linear, PackedLinear) else linear.weight


class Counted:
    """A linear layer whose calls' seconds are added up in `spent`."""

    def __init__(self, inner: AnyLinear, spent: list[float]) -> None:
        self._inner, self._spent = inner, spent

    def __call__(self, *args: Any) -> torch.Tensor:
        start = time.perf_counter()
        y = self._inner(*args)
        self._spent[0] += time.perf_counter() - start
        return y


def counted(decoder: Decoder, spent: list[float]) -> Decoder:
    """The same decoder with `Counted` layers."""
    twin: Any = copy.copy(decoder)
    twin.layers = [copy.copy(layer) for layer in decoder.layers]
    for layer in twin.layers:
        for name in ("qkv", "output", "gate_up", "down"):
            object.__setattr__(layer, name, Counted(getattr(layer, name), spent))
    twin.fused = [None] * len(twin.layers)
    twin.head = Counted(decoder.head, spent)
    return twin  # type: ignore[no-any-return]


def parts_of_a_pass(decoder: Decoder, context: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a 1-row pass: all of it, its linear layers, and a plain read (a sum) of those layers' bytes."""
    cache, linears, linear_ms = filled(decoder, context, 1), list(decoder.linears()), []
    held = [weight_of(linear).reshape(-1).view(torch.uint8) for linear in linears]
    words = [each[: each.numel() // 8 * 8].view(torch.int64) for each in held]

    spent = [0.0]
    twin = counted(decoder, spent)

    def counted_pass() -> None:
        spent[0] = 0.0
        one_pass(twin, cache, 1)
        linear_ms.append(1e3 * spent[0])

    def read() -> None:
        for each in words:
            each.sum()

    times = in_turn({"pass": lambda: one_pass(decoder, cache, 1), "counted": counted_pass, "read": read}, repeats)
    return {
        "pass": times["pass"],
        "linears": statistics.median(linear_ms[2 * AGAIN :]),
        "read": times["read"],
        "megabytes": sum(each.numel() for each in held) / 1e6,
    }
