"""Drafters for tests: they know the answer, or know nothing."""

import random
from collections.abc import Callable, Sequence

from paceline.core.proposal import Proposal, ProposalBuilder
from paceline.drafters.base import Features, Needs, SequenceView
from paceline.drafters.none import NoDrafter

Script = Callable[[list[int], int], Proposal]  # (true continuation, budget) -> proposal


class ScriptedDrafter(NoDrafter):
    """Drafts from the true text by a script; records what it was told."""

    name = "scripted"
    needs = Needs()

    def __init__(self, text: Sequence[int], script: Script) -> None:
        self.text = list(text)
        self.script = script
        self.observed: dict[int, list[int]] = {}
        self.told: list[int] = []  # all that was observed of the request that ended last

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        self.observed.setdefault(sequence.request_id, []).extend(tokens)

    def release(self, sequence: SequenceView) -> None:
        self.told = self.observed.pop(sequence.request_id, [])

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        for sequence in sequences:
            assert list(sequence.token_ids[:-1]) == self.observed.get(sequence.request_id, []), (
                "a token went unobserved"
            )
        return [
            self.script(self.text[len(sequence.token_ids) :], budget)
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]


def oracle(right: Callable[[], int], vocab_size: int) -> Script:
    """A chain whose first `right()` tokens are the answer and whose others are not."""

    def script(truth: list[int], budget: int) -> Proposal:
        count = right()
        tokens = [token if i < count else (token + 1) % vocab_size for i, token in enumerate(truth[:budget])]
        return Proposal.chain(tokens)

    return script


def garbage(vocab_size: int, seed: int = 0) -> Script:
    """Random trees: the answer may be in them by chance."""
    source = random.Random(seed)

    def script(truth: list[int], budget: int) -> Proposal:
        builder, parents = ProposalBuilder(), [-1]
        while len(builder) < budget:
            parent = parents.pop(source.randrange(len(parents)))
            width = source.randint(1, min(3, budget - len(builder)))
            parents.extend(builder.add(parent, source.sample(range(vocab_size), width)))
        return builder.build()

    return script


def bush(vocab_size: int, seed: int = 0, right: float = 0.8) -> Script:
    """Trees that hold the answer at most levels, among strangers, at a changing place."""
    source = random.Random(seed)

    def script(truth: list[int], budget: int) -> Proposal:
        builder, parent = ProposalBuilder(), -1
        for token in truth:
            if len(builder) == budget:
                break
            strangers = source.sample([t for t in range(vocab_size) if t != token], 2)
            siblings = [token, *strangers] if source.random() < right else strangers
            source.shuffle(siblings)
            nodes = builder.add(parent, siblings[: budget - len(builder)])
            parent = nodes[siblings.index(token)] if token in siblings[: len(nodes)] else nodes[0]
        return builder.build()

    return script
