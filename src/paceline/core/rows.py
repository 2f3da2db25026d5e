"""Operations on rows over the vocabulary that the rules are written in.

All but the last two use only arithmetic, indexing, `cumsum` and `clip`, so that they run on torch float64
rows and on numpy rows of fractions alike: the enumeration tests prove the shipped rules, not a copy of them.
None changes its input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Row = Any


def total(row: Row) -> Any:
    """Sum of a row, in index order: `sum` would depend on the number of threads."""
    return row.cumsum(0)[-1]


def normalised(weights: Row) -> Row:
    """The row scaled to total 1."""
    return weights / total(weights)


def zeroed(row: Row, token: int) -> Row:
    """A copy with one entry set to zero."""
    row = row * 1
    row[token] = 0
    return row


def point_mass(token: int, like: Row) -> Row:
    """The row that is 1 at `token` and 0 elsewhere."""
    row = like * 0
    row[token] = 1
    return row


def residual(p: Row, q: Row) -> Row:
    """norm(max(0, p − q)): what the target still owes after q was rejected (2211.17192, §2.3).

    The mass is zero only if p = q up to rounding; p itself is then the answer.
    """
    owed = (p - q).clip(0)
    mass = total(owed)
    return owed / mass if mass > 0 else p


WIDE = 4096  # from here on a look at every entry costs more than one at each chunk's largest
CHUNK = 128


@dataclass(frozen=True, slots=True)
class ScannedRow:
    """A row [V] and what one look at all of it tells: its largest entry (NaN if it holds one), and where to look again.

    `nonzero`, `argmax` and `topk` over a large vocabulary cost ten times a reduction that fits vector units: so the row
    is cut into chunks of 128, the last one shorter, and only chunks whose maximum passes are looked at.
    """

    values: Tensor
    peak: Tensor  # []
    maxima: Tensor | None  # [⌈V / 128⌉] of the chunks; None for a row that is not wide

    @classmethod
    def of(cls, row: "Tensor | ScannedRow") -> "ScannedRow":
        """A row, in float32 if it was narrower, looked at here unless it was before."""
        if isinstance(row, ScannedRow):
            return row
        row = row if row.dtype == torch.float64 else row.float()
        if len(row) < WIDE:
            return cls(row, row.amax(), None)
        maxima = chunk_maxima(row[None])[0]
        return cls(row, maxima.amax(), maxima)

    def wide(self) -> "ScannedRow":
        """In float32 if it was narrower: the same numbers, and all that looks at many of them is faster."""
        wide = self.values.dtype in (torch.float32, torch.float64)
        return self if wide else ScannedRow(self.values.float(), self.peak.float(), self.maxima)

    def at_least(self, bound: Tensor | float) -> Tensor:
        """Ascending ids [m] of the entries that are `bound` or more."""
        if self.maxima is not None:
            chunks = (self.maxima >= bound).nonzero()  # [c, 1]
            if 4 * len(chunks) <= len(self.maxima):
                ids = (chunks * CHUNK + torch.arange(CHUNK, device=chunks.device)).flatten()
                ids = ids[ids < len(self.values)]
                return ids[self.values[ids] >= bound]
        return (self.values >= bound).nonzero().flatten()

    def first_largest(self) -> Tensor:
        """Id [1] of the largest entry, the lowest of equals."""
        if self.maxima is None:
            return self.values.argmax().view(1)
        start = CHUNK * int(self.maxima.argmax())  # of equals the first, here and below
        return start + self.values[start : start + CHUNK].argmax().view(1)

    def top(self, k: int) -> Tensor:
        """Ids [min(k, V)] of the k largest entries, largest first, ties to the lowest.

        `topk` alone leaves the order of ties open; a full stable sort of 152k entries costs milliseconds. The k-th
        largest of some entries (here: chunk maxima) is at most the k-th largest of all.
        """
        if k >= len(self.values):
            return self.values.sort(descending=True, stable=True).indices
        few = self.maxima if self.maxima is not None and 4 * k <= len(self.maxima) else self.values
        ids = self.at_least(few.topk(k).values[-1])
        order = self.values[ids].sort(descending=True, stable=True).indices[:k]
        return ids[order]


@dataclass(frozen=True, slots=True)
class ScannedRows:
    """Rows [R, V] that were looked at together."""

    values: Tensor
    maxima: Tensor  # [R, ⌈V / 128⌉], as `chunk_maxima` has them

    def __getitem__(self, index: int) -> ScannedRow:
        row, maxima = self.values[index], self.maxima[index]
        return ScannedRow(row, maxima.amax(), maxima if len(row) >= WIDE else None)

    def split(self, counts: Sequence[int]) -> list["ScannedRows"]:
        """So many rows each."""
        values, maxima = torch.split(self.values, list(counts)), torch.split(self.maxima, list(counts))
        return [ScannedRows(*own) for own in zip(values, maxima, strict=True)]


def ids_at_least(row: Tensor, bound: Tensor | float) -> Tensor:
    """`ScannedRow.at_least` of a row that is looked at once."""
    return ScannedRow.of(row).at_least(bound)


def first_largest(row: Tensor) -> Tensor:
    """`ScannedRow.first_largest` of a row that is looked at once."""
    return ScannedRow.of(row).first_largest()


def top_ids(row: Tensor, k: int) -> Tensor:
    """`ScannedRow.top` of a row that is looked at once."""
    return ScannedRow.of(row).top(k)


def chunk_maxima(rows: Tensor) -> Tensor:
    """The largest entry of each chunk, NaN if it holds one: rows [R, V] → [R, ⌈V / 128⌉]."""
    short = -rows.shape[1] % CHUNK
    padded = torch.nn.functional.pad(rows, (0, short), value=float("-inf")) if short else rows
    return padded.view(len(rows), -1, CHUNK).amax(2)


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """A draft row cut or padded with −inf to the target's vocabulary: paddings differ between models."""
    if len(logits) >= vocab_size:
        return logits[:vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - len(logits)), value=float("-inf"))
