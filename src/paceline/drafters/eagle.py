"""EAGLE: a one-layer head drafts on the target's own hidden states, and on its own states where there are none yet.

Idea: what a target's hidden state says of the next token is easier to continue than the text alone. The head reads a
token with the feature before it; of committed tokens that is the target's, of drafted ones its own last state. So
before each draft the rows of accepted tokens are fed again with the target's true features.
Cost a step: one layer and an output layer a level of the tree. Pays nearly everywhere that a head was trained for.
Lossless under every lossless rule. A dynamic tree drops what it has drawn, so where that may not be (sampled drafts
under `standard`) the published static tree grows instead.
Sources: Li et al. 2401.15077 (EAGLE-1), 2406.16858 (EAGLE-2's trees), 2503.01840 (EAGLE-3).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.growth import Growth
from paceline.core.proposal import Proposal
from paceline.core.tree import ROOT
from paceline.core.tree_shapes import EAGLE_TREE, StaticTree, TreeShape
from paceline.drafters.base import Drafter, Features, Needs, SequenceView
from paceline.drafters.config import MAX_DRAFT_TOKENS, SpeculativeConfig
from paceline.errors import PacelineError
from paceline.models.cache import KVPool, SequenceCache
from paceline.models.eagle_checkpoint import load_eagle, load_eagle3
from paceline.models.head_layer import HeadRows, Path
from paceline.models.heads import FeatureHead
from paceline.models.load import LoadedModel
from paceline.models.origin import check_origin
from paceline.models.shipped import shipped_head

CATCH_UP_ROWS = 128  # rows of one sequence in a catch-up pass, at most
TREE_ROWS = 1024  # more than a tree of the most levels and the widest frontier that are of use
CHUNK = 64


@dataclass(slots=True)
class FeatureRows:
    """The target's features of all observed tokens, in chunks that are never changed and so are shared by copies.

    All are kept, since a prefix may be taken up again anywhere: the row after it needs the feature before it.
    """

    chunks: list[torch.Tensor] = field(default_factory=list)  # [64, d] each; the last may have fewer rows
    length: int = 0

    def append(self, rows: torch.Tensor) -> None:
        """Add rows [n, d]."""
        if self.length % CHUNK:
            rows = torch.cat((self.chunks.pop(), rows))
        # a copy of each: a view would keep all the rows alive that it was cut from
        self.chunks.extend(chunk.clone() for chunk in torch.split(rows, CHUNK) if len(chunk))
        self.length = CHUNK * (len(self.chunks) - 1) + len(self.chunks[-1]) if self.chunks else 0

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [stop − start, d]; at least one."""
        first = start // CHUNK
        held = torch.cat(self.chunks[first : (stop - 1) // CHUNK + 1])
        return held[start - first * CHUNK : stop - first * CHUNK]

    def copy(self, length: int) -> "FeatureRows":
        """The first `length` rows."""
        chunks = self.chunks[: -(-length // CHUNK)]
        if length % CHUNK:
            chunks[-1] = chunks[-1][: length % CHUNK]
        return FeatureRows(chunks, length)


@dataclass(slots=True)
class _State:
    """The head's side of a request. Cache row t was fed token t + 1 of the text and the true feature of token t."""

    cache: SequenceCache
    features: FeatureRows = field(default_factory=FeatureRows)


@dataclass(slots=True)
class _Draft:
    """A tree in the making, and where its nodes' rows lie behind the committed ones."""

    cache: SequenceCache
    growth: Growth
    state: torch.Tensor  # [frontier, d] the head's states at the frontier's nodes
    paths: dict[int, Path] = field(default_factory=lambda: {ROOT: ()})
    num_rows: int = 0

    def grow(self, logits: torch.Tensor, features: torch.Tensor) -> HeadRows | None:
        """Hang the next level from the frontier's `logits`; the new frontier's rows, None when there is none.

        A node's row reads the state of its parent, which is one of the frontier that was, as its feature.
        """
        before = {node: i for i, node in enumerate(self.growth.frontier)}
        self.growth.grow(list(logits))
        nodes, frontier = self.growth.nodes, self.growth.frontier
        if not frontier:
            return None
        for node in frontier:
            self.paths[node] = (*self.paths[nodes.parents[node]], self.num_rows)
            self.num_rows += 1
        return HeadRows(
            self.cache,
            [nodes.tokens[node] for node in frontier],
            features[[before[nodes.parents[node]] for node in frontier]],
            [self.paths[node] for node in frontier],
        )


class EagleDrafter:
    """Drafts with `head`. `max_positions`: rows of all requests together that its cache may hold."""

    def __init__(self, name: str, head: FeatureHead, tree: TreeShape, max_positions: int | None = None) -> None:
        self.name = name
        self.needs = Needs(hidden_layers=head.hidden_layers, trees=tree.branches)
        self.head = head
        self.tree = tree
        self.pool: KVPool = head.layer.new_pool(max_positions or head.layer.config.max_context)
        self._states: dict[int, _State] = {}

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        if tokens:
            self._state(sequence).features.append(self.head.fuse(features.hidden))

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        live = [i for i, sequence in enumerate(sequences) if budgets[i] > 0 and self._knows(sequence)]
        states = [self._states[sequences[i].request_id] for i in live]
        last = self._catch_up([(state, sequences[i].token_ids) for i, state in zip(live, states, strict=True)])
        drafts = {
            i: _Draft(state.cache, self.tree.growth(sequences[i].draft_sampler, budgets[i]), row)
            for i, state, row in zip(live, states, last, strict=True)
        }
        for draft in drafts.values():  # before a token is drawn: to drop a draft for what it drew would be biased
            draft.cache.reserve(draft.growth.most_rows)
        growing = [draft for draft in drafts.values() if draft.growth.frontier]
        while growing:
            growing = self._grow(growing)
        return [drafts[i].growth.proposal() if i in drafts else Proposal.empty() for i in range(len(sequences))]

    def _grow(self, drafts: list[_Draft]) -> list[_Draft]:
        """One level of all trees, in one pass; those that go on."""
        states = torch.cat([draft.state for draft in drafts])
        counts = [len(draft.state) for draft in drafts]
        logits = torch.split(self.head.logits(states), counts)
        features = torch.split(self.head.feedback(states), counts)
        rows = [draft.grow(*level) for draft, *level in zip(drafts, logits, features, strict=True)]
        going = [(draft, own) for draft, own in zip(drafts, rows, strict=True) if own is not None]
        for (draft, _), state in zip(going, self._forward(own for _, own in going), strict=True):
            draft.state = state
        return [draft for draft, _ in going]

    def _knows(self, sequence: SequenceView) -> bool:
        """Whether every token but the last was observed: without the features of a part there is no drafting."""
        state = self._states.get(sequence.request_id)
        return state is not None and 0 < state.features.length == len(sequence.token_ids) - 1

    def _catch_up(self, behind: Sequence[tuple[_State, Sequence[int]]]) -> list[torch.Tensor]:
        """Feed every cache what it lacks of its text; the head's state [1, d] after each text's last token."""
        for state, tokens in behind:
            # the newest row may be there already (a draft that was never verified), but its state is not kept
            state.cache.truncate(min(state.cache.length, state.features.length - 1))
            while state.features.length - state.cache.length > CATCH_UP_ROWS:
                self._feed([(state, tokens)])
        return [rows[-1:] for rows in self._feed(behind)]

    def _feed(self, behind: Sequence[tuple[_State, Sequence[int]]]) -> list[torch.Tensor]:
        rows = []
        for state, tokens in behind:
            start = state.cache.length
            stop = min(start + CATCH_UP_ROWS, state.features.length)
            rows.append(HeadRows(state.cache, tokens[start + 1 : stop + 1], state.features.rows(start, stop)))
        states = self._forward(rows)
        for own in rows:
            own.cache.commit(range(len(own.tokens)))
        return states

    def _forward(self, rows: Iterable[HeadRows]) -> list[torch.Tensor]:
        rows = list(rows)
        if not rows:
            return []
        return list(torch.split(self.head.forward(rows), [len(own.tokens) for own in rows]))

    def _state(self, sequence: SequenceView) -> _State:
        state = self._states.get(sequence.request_id)
        if state is None:
            state = self._states[sequence.request_id] = _State(self.pool.new_sequence())
        return state

    def snapshot(self, sequence: SequenceView) -> Any:
        state = self._states.get(sequence.request_id)
        return None if state is None else self._copy(state, state.features.length)

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        self.release(sequence)
        if snapshot is not None:
            self._states[sequence.request_id] = self._copy(snapshot, min(length, snapshot.features.length))

    def discard(self, snapshot: Any) -> None:
        if snapshot is not None:
            snapshot.cache.release()

    def mend(self, snapshots: Sequence[Any]) -> None:
        """All else is made anew by the next draft; the blocks are those that somebody knows of."""
        self.pool.recount([state.cache.blocks for state in (*self._states.values(), *snapshots)])

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        self.restore(child, self._states.get(sequence.request_id), len(sequence.token_ids))

    def release(self, sequence: SequenceView) -> None:
        state = self._states.pop(sequence.request_id, None)
        if state is not None:
            state.cache.release()

    @staticmethod
    def _copy(state: _State, length: int) -> _State:
        """The state after `length` tokens. Its last row goes: that was fed a token which may be another now."""
        cache = state.cache.fork()
        cache.truncate(max(0, min(cache.length, length - 1)))
        return _State(cache, state.features.copy(length))


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    model = _model(config, target)
    head = load_eagle(model, target.decoder, config.draft_dtype)
    return EagleDrafter("eagle", head, _tree(config), _cache_tokens(config, target))


def create_eagle3(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    model = _model(config, target)
    head = load_eagle3(model, target.decoder, config.aux_hidden_layers, config.draft_dtype)
    return EagleDrafter("eagle3", head, _tree(config), _cache_tokens(config, target))


def _cache_tokens(config: SpeculativeConfig, target: LoadedModel) -> int:
    """By default enough for one text of the target's length and a draft after it."""
    return config.draft_cache_tokens or target.config.max_context + TREE_ROWS


def _tree(config: SpeculativeConfig) -> TreeShape:
    """A chain unless a tree was asked for, as vLLM has it."""
    if config.speculative_token_tree is None:
        return StaticTree.chain(MAX_DRAFT_TOKENS)  # each step's budget cuts it
    return config.tree(EAGLE_TREE)


def _model(config: SpeculativeConfig, target: LoadedModel) -> str:
    """The head that is named, or comes with the package. Raises PacelineError for none, and for another target's."""
    model = config.model or shipped_head(config.method, target)
    if model is None:
        raise PacelineError(f"method {config.method!r} needs its head", hint='"model": a folder or a Hub id')
    check_origin(model, target)
    return model
