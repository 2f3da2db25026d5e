"""The figures as tables, for people."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from paceline.bench.summary import ALL

Row = Mapping[str, Any]
HEADS = (
    *("arm", "tokens/s", "ratio", "95 %", "decode", "length", "rate", "draft/target/rest"),
    *("passes", "first ms", "token ms", "peak MB", "differ"),
)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Lines: a table for each concurrency and category, plain decoding first."""
    for (concurrency, category), members in groupby(rows, key=lambda row: (row["concurrency"], row["category"])):
        table = list(members)
        yield ""
        yield f"{category} · concurrency {concurrency} · {_count(table[0]['answers'], 'answer')}{_mixed(table[0])}"
        yield from _aligned([HEADS, *(_cells(row) for row in table)])
        if category == ALL:
            yield from _positions(table)


def _mixed(row: Row) -> str:
    return "" if row["units"] else ", none timed apart from those of other categories"


def _cells(row: Row) -> tuple[str, ...]:
    acceptance, share, whole, decode = (row[key] for key in ("acceptance", "time_share", "ratio", "decode_ratio"))
    return (
        row["arm"],
        _number(row["tokens_per_second"], ".1f"),
        _number(whole and whole["point"], ".3f"),
        "-" if whole is None or whole["low"] is None else f"{whole['low']:.3f}-{whole['high']:.3f}",
        _number(decode and decode["point"], ".3f"),
        _number(acceptance and acceptance["length"], ".2f"),
        _number(acceptance and acceptance["rate"], ".0%"),
        "-" if share is None else " / ".join(f"{share[part]:.0%}" for part in ("draft", "target", "overhead")),
        _number(row["target_passes"], "d"),
        _number(_median_ms(row["first_token_s"]), ".0f"),
        _number(_median_ms(row["token_s"]), ".1f"),
        _number(row["peak_memory_bytes"] and row["peak_memory_bytes"] / 1e6, ".0f"),
        f"{row['differing']} of {row['answers']}" if row["differing"] else "none",
    )


def _positions(table: Sequence[Row]) -> Iterator[str]:
    drafting = [row for row in table if row["acceptance"] and row["acceptance"]["by_position"]]
    if drafting:
        yield "accepted by position, of the drafts that reach it:"
        for row in drafting:
            rates = " ".join(f"{rate:.2f}" for rate in row["acceptance"]["by_position"][:16])
            yield f"  {row['arm']}: {rates}"


def _aligned(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        rest = "  ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield f"{row[0].ljust(widths[0])}  {rest}"


def _median_ms(spread: Mapping[str, float] | None) -> float | None:
    return None if spread is None else 1e3 * spread["median"]


def _number(value: Any, how: str) -> str:
    return "-" if value is None else format(value, how)


def _count(number: int, one: str) -> str:
    return f"{number} {one}{'' if number == 1 else 's'}"
