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


def top_ids(row: Tensor, k: int) -> Tensor:
    """Indices [min(k, V)] of the k largest entries, largest first, ties to the lowest index.

    `topk` alone leaves the order of ties open; a full stable sort of 152k entries costs milliseconds.
    """
    if k >= len(row):
        return row.sort(descending=True, stable=True).indices
    threshold = row.topk(k).values[-1]
    ids = (row >= threshold).nonzero().flatten()
    order = row[ids].sort(descending=True, stable=True).indices[:k]
    return ids[order]


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """A draft row cut or padded with −inf to the target's vocabulary: paddings differ between models."""
    if len(logits) >= vocab_size:
        return logits[:vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - len(logits)), value=float("-inf"))
