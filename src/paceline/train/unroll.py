"""A feature head as it drafts, on a text that is known: training-time test (EAGLE-3, 2503.01840, §3.2).

Row t reads token t + 1 and the target's feature of token t, and predicts token t + 2. Step i goes on from there as a
draft does: it reads token t + 1 + i and the head's own state of step i − 1. Its attention sees the true rows up to t,
and of the drafted ones those on its own way: a sum along the diagonal, whatever the number of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.models.heads import FeatureHead
from paceline.train.batch import Batch

Keys = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, [n, kv_heads, head_dim] each."""


@dataclass(frozen=True, slots=True)
class Level:
    """States [m, d] of step `step` at the rows `tokens` [m]; each predicts the token `step` + 2 places on."""

    step: int
    tokens: torch.Tensor
    states: torch.Tensor

    def learns(self, batch: Batch) -> torch.Tensor:
        """Which rows [m] have an assistant's token to predict."""
        return batch.answers(self.step + 2)[self.tokens]

    @property
    def taught_by(self) -> torch.Tensor:
        """The tokens [m] after which the target says what the row should."""
        return self.tokens + self.step + 1


def unroll(head: FeatureHead, batch: Batch, steps: int) -> Iterator[Level]:
    """The head's states at each of `steps` steps, at the rows that have something to predict there or further on."""
    learns = torch.stack([batch.answers(step + 2) for step in range(steps)])  # [steps, T]
    first = (batch.following >= 1).nonzero().flatten()
    tokens, documents = first, batch.spans()
    features = head.fuse({i: rows[tokens].to(head.layer.dtype) for i, rows in batch.hidden.items()})
    x, residual = head.inputs(batch.ids[tokens + 1], features)
    q, *true = head.layer.project(x, batch.positions[tokens])
    states = head.layer.finish(attend(q, tokens, (true[0], true[1]), first, [], documents), residual)
    yield Level(0, tokens, states)
    drafted: list[Keys] = []
    for step in range(1, steps):
        going = learns[step:, tokens].any(0)
        if not going.any():
            return
        tokens, states = tokens[going], states[going]
        x, residual = head.inputs(batch.ids[tokens + 1 + step], head.feedback(states))
        q, k, v = head.layer.project(x, batch.positions[tokens] + step)
        drafted = [*((keys[going], values[going]) for keys, values in drafted), (k, v)]
        states = head.layer.finish(attend(q, tokens, (true[0], true[1]), first, drafted, documents), residual)
        yield Level(step, tokens, states)


def attend(
    q: torch.Tensor,
    tokens: torch.Tensor,
    true: Keys,
    true_tokens: torch.Tensor,
    drafted: list[Keys],
    documents: list[tuple[int, int]],
) -> torch.Tensor:
    """Attention of rows q [m, heads, head_dim] at `tokens`, document by document: [m, heads, head_dim].

    A row sees the true rows at tokens up to its own, and of each of `drafted` its own row.
    """
    out = []
    for start, stop in documents:
        own = _between(tokens, start, stop)
        keys = _between(true_tokens, start, stop)
        if own.stop == own.start:
            continue
        seen = true_tokens[keys] <= tokens[own, None]  # [m, n]
        out.append(_attend(q[own], true[0][keys], true[1][keys], seen, [(k[own], v[own]) for k, v in drafted]))
    return torch.cat(out)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, drafted: list[Keys]) -> torch.Tensor:
    m, heads, head_dim = q.shape
    n, kv_heads, _ = k.shape
    grouped = q.view(m, kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [kv, group, m, head_dim]
    scores = grouped.flatten(1, 2) @ k.permute(1, 2, 0)  # [kv, group · m, n]
    scores = scores.view(kv_heads, -1, m, n).masked_fill(~seen, -torch.inf)
    along = [(grouped * own.transpose(0, 1)[:, None]).sum(-1, keepdim=True).to(scores.dtype) for own, _ in drafted]
    every = torch.cat((scores, *along), -1)
    weights = every.softmax(-1, dtype=torch.promote_types(every.dtype, torch.float32))
    out = (weights[..., :n].flatten(1, 2).to(v.dtype) @ v.transpose(0, 1)).view(kv_heads, -1, m, head_dim)
    for i, (_, own) in enumerate(drafted):
        out = out + weights[..., n + i, None] * own.transpose(0, 1)[:, None]
    return out.permute(2, 0, 1, 3).reshape(m, heads, head_dim)


def _between(tokens: torch.Tensor, start: int, stop: int) -> slice:
    first, last = torch.searchsorted(tokens, torch.tensor([start, stop], device=tokens.device)).tolist()
    return slice(first, last)
