"""Prompt lookup: draft what followed the same n tokens last time.

Idea: answers copy from their prompt and from themselves. The longest suffix of the text (n from `longest` down to
`shortest`) that occurred before is looked up, its most recent occurrence wins, and the tokens after it are the draft.
Cost a step: a few dictionary look-ups. Pays on code edits, summaries, extraction. Lossless: the draft is a point mass.
Source: Saxena, prompt-lookup-decoding (2023); transformers' `prompt_lookup_num_tokens`; vLLM's `ngram`.
"""

from collections.abc import Sequence
from typing import Any

from paceline.core.proposal import Proposal
from paceline.drafters.base import Drafter, Needs, SequenceView
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.stateless import Stateless
from paceline.errors import PacelineError
from paceline.models.load import LoadedModel

DEFAULT_SHORTEST, DEFAULT_LONGEST = 2, 5


class _Index:
    """Where each n-gram of a text last ended, for n from `shortest` to `longest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.indexed = 0  # n-grams that end before this position are in
        self.ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in every n-gram that ends before the text's last token: the suffix itself must not match itself."""
        for end in range(self.indexed + 1, len(tokens)):
            for n in self.sizes:
                if n <= end:
                    self.ends[tuple(tokens[end - n : end])] = end
        self.indexed = max(self.indexed, len(tokens) - 1)

    def continuation(self, tokens: Sequence[int], count: int) -> Proposal:
        """Its score is the number of tokens matched."""
        for n in self.sizes:
            end = self.ends.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if end is not None:
                return Proposal.chain(tokens[end : end + count], score=n)
        return Proposal.empty()


class NgramDrafter(Stateless):
    """Looks up each request's own text."""

    name = "ngram"
    needs = Needs()

    def __init__(self, shortest: int = DEFAULT_SHORTEST, longest: int = DEFAULT_LONGEST) -> None:
        self.shortest, self.longest = shortest, longest
        self._indexes: dict[int, _Index] = {}

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [self._lookup(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _lookup(self, sequence: SequenceView, budget: int) -> Proposal:
        index = self._indexes.get(sequence.request_id)
        if index is None:
            index = self._indexes[sequence.request_id] = _Index(self.shortest, self.longest)
        tokens = sequence.token_ids
        index.extend(tokens)
        return index.continuation(tokens, budget)

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        self.release(sequence)

    def release(self, sequence: SequenceView) -> None:
        self._indexes.pop(sequence.request_id, None)


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    longest = config.prompt_lookup_max or max(DEFAULT_LONGEST, config.prompt_lookup_min or 0)
    shortest = config.prompt_lookup_min or min(DEFAULT_SHORTEST, longest)
    if shortest > longest:
        raise PacelineError(f"prompt_lookup_min is {shortest} but prompt_lookup_max is {longest}")
    return NgramDrafter(shortest, longest)
