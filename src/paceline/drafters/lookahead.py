"""The target guesses its own future: n-grams from a Jacobi iteration that runs along in every pass.

Idea: beside the text, a window of W columns by N − 1 rows of tokens is fed; row r of column i stands where token r + i
after the last one will. Each pass the target's arg-max at the last row prolongs every column, whose N tokens are then
an n-gram of its own making; the first row drops out. N-grams go into a pool under their first token, with those of the
text itself; those that begin with the last token are the guesses to verify. The window is scratch: forwarded, never
verified. Row 0 is a chain under the last token, node (r, i) hangs under (r − 1, i).
Cost a step: up to W(N − 1) − 1 + G(N − 1) rows more in the target's pass, no weights. Pays where rows are cheap and the
output repeats itself. Lossless under every lossless rule but `block`, which takes chains: guesses are point masses.
Source: Fu et al., 2402.02057; its window, but a full guess keeps its bonus token, and columns move on with the text.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.proposal import Proposal
from paceline.core.tree import ROOT
from paceline.drafters.base import Drafter, Features, Needs, SequenceView
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.stateless import Stateless
from paceline.models.load import LoadedModel


@dataclass(frozen=True, slots=True)
class Shape:
    """W columns, N tokens in an n-gram, G guesses a step at most."""

    window: int
    ngram: int
    guesses: int

    def num_nodes(self, columns: int) -> int:
        """Scratch nodes of so many columns: the last committed token stands at the first one's head."""
        return columns * (self.ngram - 1) - 1 if columns else 0

    def columns_within(self, nodes: int) -> int:
        return min(self.window, (nodes + 1) // (self.ngram - 1))


class _Pool:
    """For each first token the n-grams seen last, at most `most` of them: what came after it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._after: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, tokens: Sequence[int]) -> None:
        first, *rest = tokens
        known = self._after.setdefault(first, OrderedDict())
        known[tuple(rest)] = None
        known.move_to_end(tuple(rest))
        if len(known) > self.most:
            known.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Newest first."""
        return list(reversed(self._after.get(token, OrderedDict())))


@dataclass(slots=True)
class _State:
    """One request's window and pool.

    columns[i]: its N − 1 tokens from row 0 down; in column 0 the last token of the text stands for the first.
    """

    pool: _Pool
    columns: list[list[int]] = field(default_factory=list)
    indexed: int = 0  # n-grams of the text that end before this are in the pool
    fresh: int = 0  # columns are filled up from the text, from here on
    in_flight: int = 0  # columns that the pass to be observed next runs

    def learn(self, text: Sequence[int], size: int) -> None:
        """Take in the text's own n-grams."""
        for end in range(max(self.indexed + 1, size), len(text) + 1):
            self.pool.add(text[end - size : end])
        self.indexed = max(self.indexed, len(text))

    def fill(self, text: Sequence[int], shape: Shape) -> None:
        """New columns on the right, so that together they read like a stretch of the text."""
        while len(self.columns) < shape.window:
            self.columns.append([text[(self.fresh + row) % len(text)] for row in range(shape.ngram - 1)])
            self.fresh += 1

    def prolong(self, root: int, predicted: Sequence[int]) -> None:
        """Take the arg-max after each column that ran; the others have had no turn and go."""
        del self.columns[len(predicted) :]
        for i, (column, token) in enumerate(zip(self.columns, predicted, strict=True)):
            if i == 0:
                column[0] = root
            self.pool.add([*column, token])
            self.columns[i] = [*column[1:], token]


class LookaheadDrafter(Stateless):
    """Proposes guesses from the pool, and the window behind them."""

    name = "lookahead"
    needs = Needs(scratch_argmax=True, trees=True)

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._states: dict[int, _State] = {}

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        state = self._states.get(sequence.request_id)
        if state is None or not tokens:
            return
        ran, state.in_flight = state.in_flight, 0
        moved = len(tokens)
        if ran and features.scratch_argmax is not None:
            state.prolong(tokens[0], features.scratch_argmax[-ran:].tolist())
            moved -= 1  # each column has moved one on already
        del state.columns[:moved]

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: SequenceView, budget: int) -> Proposal:
        text, shape = sequence.token_ids, self.shape
        state = self._states.setdefault(sequence.request_id, _State(_Pool(shape.guesses)))
        state.learn(text, shape.ngram)
        state.fill(text, shape)
        guesses = state.pool.after(text[-1])
        # Short of room, guesses get half of it: without a window they would only be the text's own.
        wanted = len(guesses) * (shape.ngram - 1)
        state.in_flight = shape.columns_within(budget - min(wanted, budget // 2))
        tokens, parents = _guess_nodes(guesses, budget - shape.num_nodes(state.in_flight))
        num_verified = len(tokens)
        nodes = [ROOT] * state.in_flight  # column by column the node of the row above
        for row in range(shape.ngram - 1):
            for i in range(len(nodes)):
                if (row, i) == (0, 0):
                    continue  # the last token of the text itself
                parents.append(nodes[i] if row else nodes[i - 1])
                nodes[i] = len(tokens)
                tokens.append(state.columns[i][row])
        return Proposal(tuple(tokens), tuple(parents), num_scratch=len(tokens) - num_verified)

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        self.release(sequence)

    def release(self, sequence: SequenceView) -> None:
        self._states.pop(sequence.request_id, None)


def _guess_nodes(guesses: Sequence[Sequence[int]], room: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of a trie of the guesses: those that begin alike share nodes, the first guess comes first."""
    nodes: dict[tuple[int, int], int] = {}
    for guess in guesses:
        parent = ROOT
        for token in guess:
            if (parent, token) not in nodes and len(nodes) == room:
                break
            parent = nodes.setdefault((parent, token), len(nodes))
    return [token for _, token in nodes], [parent for parent, _ in nodes]


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    return LookaheadDrafter(Shape(*config.lookahead_shape))
