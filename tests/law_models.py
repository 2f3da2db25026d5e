"""Targets whose logits are known after every context, and a drafter with opinions of its own."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import tiny
import torch
from torch import Tensor

from paceline.core.drafting import DraftSampler, Draw
from paceline.core.proposal import Proposal, ProposalBuilder
from paceline.core.rows import chunk_maxima
from paceline.core.tree import ROOT
from paceline.drafters.base import SequenceView
from paceline.drafters.none import NoDrafter
from paceline.models.decoder import Decoder, Segment

Tokens = tuple[int, ...]
Row = Callable[[Tokens], Tensor]


class Target(Protocol):
    """A decoder for `decode`, and its logits on their own."""

    decoder: Any

    def logits(self, context: Tokens) -> Tensor:
        """Row [V] after prompt and output."""


class Table:
    """Random logits for every context, and a decoder that looks them up.

    Rows depend on the last `memory` tokens: by default on all of them, so that a row committed by mistake or a node
    with the wrong ancestors shows at once.
    """

    def __init__(self, row: Row, vocab_size: int, memory: int = 99) -> None:
        self.row, self.memory = row, memory
        self.rows: dict[Tokens, Tensor] = {}
        self.decoder = TableDecoder(self, vocab_size)

    def logits(self, context: Tokens) -> Tensor:
        context = context[-self.memory :]
        if context not in self.rows:
            self.rows[context] = self.row(context)
        return self.rows[context]


class TableDecoder:
    """Stands in for `Decoder`: hidden states are the contexts themselves."""

    def __init__(self, table: Table, vocab_size: int) -> None:
        self.table = table
        self.config = SimpleNamespace(vocab_size=vocab_size, num_layers=1, max_context=64, eos_token_ids=())

    def new_pool(self, positions: int) -> Any:
        return SimpleNamespace(new_sequence=TableCache)

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Any:
        (segment,) = segments
        cache: Any = segment.cache
        paths: list[Tokens] = []
        for row, token in enumerate(segment.token_ids):
            parent = row - 1 if segment.parents is None else segment.parents[row]
            paths.append((*(cache.context if parent < 0 else paths[parent]), token))
        cache.rows = segment.token_ids
        return SimpleNamespace(hidden=SimpleNamespace(device="cpu", paths=paths), taps={})

    def logits(self, hidden: Any) -> list[Tensor]:
        return [self.table.logits(path) for path in hidden.paths]

    def maxima(self, logits: list[Tensor]) -> list[Tensor]:
        return [chunk_maxima(row[None])[0] for row in logits]


class TableCache:
    """Keeps the tokens of the rows that were committed: what later rows see before them."""

    def __init__(self) -> None:
        self.context: Tokens = ()
        self.rows: Sequence[int] = ()

    def commit(self, path: Sequence[int]) -> None:
        self.context += tuple(self.rows[row] for row in path)

    def release(self) -> None:
        pass


TINY_SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}


class RealTarget:
    """A real decoder; its logits are taken one row at a time, in a cache of their own."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def logits(self, context: Tokens) -> Tensor:
        sequence = self.decoder.new_pool(64).new_sequence()
        for token in context:
            out = self.decoder.forward([Segment(sequence, [token])])
            sequence.commit([0])
        return self.decoder.logits(out.hidden)[0]


def tiny_target(vocab_size: int) -> RealTarget:
    """One layer, in float64."""
    shape = {"vocab_size": vocab_size, "num_hidden_layers": 1, **TINY_SHAPE}
    return RealTarget(tiny.tiny_decoder("llama", dtype=torch.float64, **shape))


def random_row(name: str, vocab_size: int) -> Row:
    def row(context: Tokens) -> Tensor:
        source = random.Random(f"{name} {context}")
        return torch.tensor([source.gauss(0, 1.2) for _ in range(vocab_size)])

    return row


def near(target: Row, name: str, vocab_size: int) -> Row:
    """The draft's opinion: partly the target's, partly its own."""
    own = random_row(name, vocab_size)
    return lambda context: 0.4 * target(context) + own(context)


Pick = Callable[[Tensor, DraftSampler, int], Draw]
Edit = Callable[[Proposal], Proposal]


def sampled(logits: Tensor, sampler: DraftSampler, width: int) -> Draw:
    """As the rule wants it: on the target's own noise, or without replacement and with the row."""
    return sampler.draw(logits, width)


def likeliest(logits: Tensor, sampler: DraftSampler, width: int) -> Draw:
    """Point masses, whatever the rule."""
    return Draw(tuple(logits.topk(width).indices.tolist()))


def whole(proposal: Proposal) -> Proposal:
    return proposal


class TableDrafter(NoDrafter):
    """A tree from a table: a node of level i gets `widths[i]` children, as far as the budget goes."""

    name = "table"

    def __init__(self, table: Table, widths: Tokens, pick: Pick = sampled, edit: Edit = whole) -> None:
        self.table, self.widths, self.pick, self.edit = table, widths, pick, edit

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [self.edit(self._tree(sequences[0], budgets[0]))]

    def _tree(self, sequence: SequenceView, budget: int) -> Proposal:
        builder = ProposalBuilder()
        committed, root = tuple(sequence.token_ids), sequence.draft_sampler
        level: list[tuple[int, Tokens]] = [(ROOT, ())]
        for width in self.widths:
            below: list[tuple[int, Tokens]] = []
            for node, path in level:
                room = min(width, budget - len(builder))
                if room == 0:
                    return builder.build()
                sampler = root.advance(*path) if path else root
                drawn = self.pick(self.table.logits(committed + path), sampler, room)
                nodes = builder.add(node, drawn.tokens, drawn.probs)
                below += [(child, (*path, token)) for child, token in zip(nodes, drawn.tokens, strict=True)]
            level = below
        return builder.build()
