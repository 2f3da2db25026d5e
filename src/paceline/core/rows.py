"""Operations on rows over the vocabulary that the rules are written in.

All but the last two use only arithmetic, indexing, `cumsum` and `clip`, so that they run on torch float64
rows and on numpy rows of fractions alike: the enumeration tests prove the shipped rules, not a copy of them.
None changes its input.
"""

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


def ids_at_least(row: Tensor, bound: Tensor | float) -> Tensor:
    """Ascending ids [m] of the entries that are `bound` or more.

    `nonzero` (like `argmax` and `topk`) over a large vocabulary costs ten times a reduction that fits vector units:
    so the row is folded into columns, and only columns whose maximum passes are looked at.
    """
    if len(row) < WIDE:
        return (row >= bound).nonzero().flatten()
    return _ids_by_column(row, _folded(row).amax(0), bound)


def first_largest(row: Tensor) -> Tensor:
    """Id [1] of the largest entry, the lowest of equals."""
    if len(row) < WIDE:
        return row.argmax().view(1)
    maxima = _folded(row).amax(0)
    rest = row[_FOLDS * len(maxima) :]
    peak = torch.cat((maxima, rest)).amax()
    return _ids_by_column(row, maxima, peak)[:1]


def _ids_by_column(row: Tensor, maxima: Tensor, bound: Tensor | float) -> Tensor:
    """`maxima` [V // 128] of the folded row's columns."""
    table = _folded(row)
    columns = (maxima >= bound).nonzero().flatten()  # [c]
    if 4 * len(columns) > len(maxima):
        return (row >= bound).nonzero().flatten()
    hits = (table[:, columns] >= bound).nonzero()  # [m, 2], row by row: ascending in id
    ids = hits[:, 0] * len(maxima) + columns[hits[:, 1]]
    start = table.numel()
    return torch.cat((ids, (row[start:] >= bound).nonzero().flatten() + start))


def _folded(row: Tensor) -> Tensor:
    """All but the last few entries, as [128, V // 128]: entry i stands in column i modulo their number."""
    columns = len(row) // _FOLDS
    return row[: _FOLDS * columns].view(_FOLDS, columns)


def top_ids(row: Tensor, k: int) -> Tensor:
    """Indices [min(k, V)] of the k largest entries, largest first, ties to the lowest index.

    `topk` alone leaves the order of ties open; a full stable sort of 152k entries costs milliseconds. The k-th largest
    of some entries (here: column maxima) is at most the k-th largest of all.
    """
    if k >= len(row):
        return row.sort(descending=True, stable=True).indices
    few = _folded(row).amax(0) if len(row) >= WIDE and 4 * k <= len(row) // _FOLDS else row
    ids = ids_at_least(row, few.topk(k).values[-1])
    order = row[ids].sort(descending=True, stable=True).indices[:k]
    return ids[order]


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """A draft row cut or padded with −inf to the target's vocabulary: paddings differ between models."""
    if len(logits) >= vocab_size:
        return logits[:vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - len(logits)), value=float("-inf"))
