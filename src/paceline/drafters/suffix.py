"""Suffix decoding: draft what most often followed the same tokens, in this request and in earlier answers.

Idea: answers repeat their prompt, themselves, and other answers (agents, edits, templates). Every suffix of the text
that occurred before proposes the tokens that most often came next, in a number that grows with its length; the proposal
with the most tokens expected to be right is the draft. The request's own text is asked first, then the outputs of
finished requests; the former wins ties. Cost a step: tens of microseconds, no model. Pays wherever text recurs.
Lossless: drafts are point masses. Greedy and `coupled` outputs are the same whatever earlier requests left behind;
under `standard` their law is, but a warm pool may bring out other tokens for the same seed.
Source: Oliaro et al. 2411.04975; ArcticInference, vLLM's `suffix`. Two departures: the match of the text's end with
itself, which nothing has followed yet, is no evidence (there it halves the frequency of what was seen once), and a
draft may go on past the tree's depth.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.proposal import Proposal
from paceline.drafters.base import Drafter, Features, Needs, SequenceView
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.suffix_tree import ROUNDING, Continuation, DraftLength, SuffixTree, Text, as_text
from paceline.models.load import LoadedModel

DEFAULT_CACHED_REQUESTS = 10_000
DEFAULT_CORPUS_TOKENS = 200_000  # about 80 MB
FEW = 32  # tokens that are indexed when a draft is asked for, not before


@dataclass(slots=True)
class _State:
    """A request's own text as far as it is indexed."""

    tree: SuffixTree
    text: Text = field(default_factory=as_text)

    def catch_up(self, tokens: Sequence[int], most: int) -> None:
        """Take in up to `most` further tokens of the request's text."""
        known = len(self.text)
        tail = max(0, known - self.tree.depth)
        if list(tokens[tail:known]) != self.text[tail:].tolist():
            # The history was cut or edited: nothing may stay that is not in it.
            self.tree, self.text, known = SuffixTree(self.tree.depth), as_text(), 0
        self.text.extend(array("i", tokens[known : known + most]))
        for position in range(known, len(self.text)):
            self.tree.add(self.text, position)


class OutputPool:
    """Outputs of finished requests, at most `max_requests` and `max_tokens` of them; the oldest leave first."""

    def __init__(self, depth: int, max_requests: int, max_tokens: int) -> None:
        self.tree = SuffixTree(depth)
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.num_tokens = 0
        self._outputs: deque[_Output] = deque()

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Take in what follows the prompt. Of the prompt the last tokens are kept too, but only as context."""
        first = max(num_prompt_tokens, len(tokens) - self.max_tokens)
        start = max(0, first - self.tree.depth)
        output = _Output(as_text(tokens[start:]), first - start)
        if not output.num_tokens or not self.max_requests:
            return
        while len(self) >= self.max_requests or self.num_tokens + output.num_tokens > self.max_tokens:
            self._evict()
        self._outputs.append(output)
        self.num_tokens += output.num_tokens
        for position in output.positions:
            self.tree.add(output.text, position)

    def _evict(self) -> None:
        output = self._outputs.popleft()
        self.num_tokens -= output.num_tokens
        for position in output.positions:
            self.tree.remove(output.text, position)


@dataclass(frozen=True, slots=True)
class _Output:
    text: Text
    first: int  # where the output begins; before it stands the prompt's end

    @property
    def positions(self) -> range:
        return range(self.first, len(self.text))

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


class SuffixDrafter:
    """Drafts chains from counts. `min_score`: expected right tokens below which it leaves the step to others."""

    name = "suffix"
    needs = Needs()

    def __init__(
        self,
        depth: int = 24,
        draft_length: DraftLength | None = None,
        min_score: float = 0.0,
        max_cached_requests: int = DEFAULT_CACHED_REQUESTS,
        max_corpus_tokens: int = DEFAULT_CORPUS_TOKENS,
    ) -> None:
        self.depth = depth
        self.draft_length = draft_length or DraftLength()
        self.min_score = min_score
        self.pool = OutputPool(depth, max_cached_requests, max_corpus_tokens)
        self._states: dict[int, _State] = {}

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        # A prompt is indexed chunk by chunk beside the target's passes, not all at once before the first draft. Few
        # tokens wait for it: whoever isn't asked in every step then has the cheaper step.
        state = self._state(sequence)
        if len(tokens) > FEW:
            state.catch_up(sequence.token_ids, len(tokens))

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _draft(self, sequence: SequenceView, budget: int) -> Proposal:
        state = self._state(sequence)
        state.catch_up(sequence.token_ids, len(sequence.token_ids))
        context = state.text[-self.depth :]
        draft = state.tree.continuation(context, budget, self.draft_length)
        if not sequence.private_drafts:
            draft = self._better(draft, self.pool.tree.continuation(context, budget, self.draft_length))
        if not draft.tokens or draft.score < self.min_score:
            return Proposal.empty()
        return Proposal.chain(draft.tokens, score=draft.score)

    @staticmethod
    def _better(own: Continuation, pooled: Continuation) -> Continuation:
        return pooled if pooled.score > own.score + ROUNDING else own

    def _state(self, sequence: SequenceView) -> _State:
        state = self._states.get(sequence.request_id)
        if state is None:
            state = self._states[sequence.request_id] = _State(SuffixTree(self.depth))
        return state

    def snapshot(self, sequence: SequenceView) -> Any:
        return None  # a prefix is indexed again sooner than it could be kept

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        self._states[sequence.request_id] = _State(SuffixTree(self.depth))

    def discard(self, snapshot: Any) -> None:
        pass

    def mend(self, snapshots: Sequence[Any]) -> None:
        pass

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        self.restore(child, None, 0)  # indexing takes hardly longer than a copy

    def release(self, sequence: SequenceView) -> None:
        if self._states.pop(sequence.request_id, None) is not None and not sequence.private_drafts:
            self.pool.add(sequence.token_ids, sequence.num_prompt_tokens)


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    draft_length = DraftLength(
        _given(config.suffix_decoding_max_spec_factor, 1.0),
        _given(config.suffix_decoding_max_spec_offset, 0.0),
        _given(config.suffix_decoding_min_token_prob, 0.1),
    )
    return SuffixDrafter(
        config.suffix_depth,
        draft_length,
        _given(config.suffix_decoding_min_score, 0.0),
        int(_given(config.suffix_decoding_max_cached_requests, DEFAULT_CACHED_REQUESTS)),
        int(_given(config.suffix_decoding_corpus_tokens, DEFAULT_CORPUS_TOKENS)),
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
