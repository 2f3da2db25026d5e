"""Operations on rows over the vocabulary that the rules are written in.

All but the last two use only arithmetic, indexing, `cumsum` and `clip`, so that they run on torch float64
rows and on numpy rows of fractions alike: the enumeration tests prove the shipped rules, not a copy of them.
None changes its input.
"""

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


WIDE = 4096  # from here on a scan of all entries costs more than folding the row first
_FOLDS = 128


@dataclass(frozen=True, slots=True)
class ScannedRow:
    """A row [V] and what one look at all of it tells: its largest entry (NaN if it holds one), and where to look again.

    `nonzero`, `argmax` and `topk` over a large vocabulary cost ten times a reduction that fits vector units: so the row
    is folded into columns, entry i standing in column i modulo their number, and only columns whose maximum passes are
    looked at.
    """

    values: Tensor
    peak: Tensor  # []
    maxima: Tensor | None  # [V // 128] of the columns; None for a row that is not wide

    @classmethod
    def of(cls, row: Tensor) -> "ScannedRow":
        if len(row) < WIDE:
            return cls(row, row.amax(), None)
        table = _folded(row)
        maxima = table.amax(0)
        rest = row[table.numel() :]
        return cls(row, (torch.cat((maxima, rest)) if len(rest) else maxima).amax(), maxima)

    def at_least(self, bound: Tensor | float) -> Tensor:
        """Ascending ids [m] of the entries that are `bound` or more."""
        if self.maxima is None:
            return (self.values >= bound).nonzero().flatten()
        columns = (self.maxima >= bound).nonzero().flatten()  # [c]
        if 4 * len(columns) > len(self.maxima):
            return (self.values >= bound).nonzero().flatten()
        table = _folded(self.values)
        hits = (table[:, columns] >= bound).nonzero()  # [m, 2], row by row: ascending in id
        ids = hits[:, 0] * len(self.maxima) + columns[hits[:, 1]]
        rest = self.values[table.numel() :]
        return torch.cat((ids, (rest >= bound).nonzero().flatten() + table.numel())) if len(rest) else ids

    def first_largest(self) -> Tensor:
        """Id [1] of the largest entry, the lowest of equals."""
        return self.values.argmax().view(1) if self.maxima is None else self.at_least(self.peak)[:1]

    def top(self, k: int) -> Tensor:
        """Ids [min(k, V)] of the k largest entries, largest first, ties to the lowest.

        `topk` alone leaves the order of ties open; a full stable sort of 152k entries costs milliseconds. The k-th
        largest of some entries (here: column maxima) is at most the k-th largest of all.
        """
        if k >= len(self.values):
            return self.values.sort(descending=True, stable=True).indices
        few = self.maxima if self.maxima is not None and 4 * k <= len(self.maxima) else self.values
        ids = self.at_least(few.topk(k).values[-1])
        order = self.values[ids].sort(descending=True, stable=True).indices[:k]
        return ids[order]


def ids_at_least(row: Tensor, bound: Tensor | float) -> Tensor:
    """`ScannedRow.at_least` of a row that is looked at once."""
    return ScannedRow.of(row).at_least(bound)


def first_largest(row: Tensor) -> Tensor:
    """`ScannedRow.first_largest` of a row that is looked at once."""
    return ScannedRow.of(row).first_largest()


def top_ids(row: Tensor, k: int) -> Tensor:
    """`ScannedRow.top` of a row that is looked at once."""
    return ScannedRow.of(row).top(k)


def _folded(row: Tensor) -> Tensor:
    """All but the last few entries, as [128, V // 128]."""
    columns = len(row) // _FOLDS
    return row[: _FOLDS * columns].view(_FOLDS, columns)


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """A draft row cut or padded with −inf to the target's vocabulary: paddings differ between models."""
    if len(logits) >= vocab_size:
        return logits[:vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - len(logits)), value=float("-inf"))
