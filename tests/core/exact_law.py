"""Exact laws by enumeration: shipped code is run once for every outcome of its chance."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from paceline.core.proposal import Proposal, ProposalBuilder
from paceline.core.rng import CounterNoise, Randomness, without_replacement
from paceline.core.tree import ROOT
from paceline.core.verify import Rule

Tokens = tuple[int, ...]
Law = dict[Tokens, Any]
Table = Callable[[Tokens], Any]
# drafter(context, Q, draws) -> proposal, with `Q(context)` the draft's row
Drafter = Callable[[Tokens, Table, Any], Proposal]

VOCAB = 3
LENGTH = 3


class ScriptedDraws:
    """Answers from a script, then with the first possible outcome, noting the roads not taken."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.probability: Any = Fraction(1)
        self.untried: list[list[int]] = []
        self._taken: list[int] = []

    def accept(self, probability: Any) -> bool:
        probability = min(1, probability)
        return self._decide([(True, probability), (False, 1 - probability)])

    def choose(self, weights: Any) -> int:
        total = sum(weights)
        return self._decide([(token, weight / total) for token, weight in enumerate(weights)])

    def _decide(self, outcomes: list[tuple[Any, Any]]) -> Any:
        outcomes = [(value, probability) for value, probability in outcomes if probability > 0]
        step = len(self._taken)
        if step < len(self.script):
            index = self.script[step]
        else:
            index = 0
            self.untried.extend([*self._taken, other] for other in range(1, len(outcomes)))
        self._taken.append(index)
        value, probability = outcomes[index]
        # a fraction times a float is a float: rows of torch give a law in floats
        self.probability *= float(probability) if isinstance(probability, Tensor) else probability
        return value


class SharedUniformDraws(ScriptedDraws):
    """Control: one uniform number for every acceptance of a step (a generator re-seeded inside the loop)."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(script)
        self._low, self._high = Fraction(0), Fraction(1)  # the number is uniform between them

    def accept(self, probability: Any) -> bool:
        cut = min(max(probability, self._low), self._high)
        accepted = super().accept((cut - self._low) / (self._high - self._low))
        self._low, self._high = (self._low, cut) if accepted else (cut, self._high)
        return accepted


def enumerate_law(run: Callable[[Any], Tokens], draws: type[ScriptedDraws] = ScriptedDraws) -> Law:
    """Law of `run(draws)` over all outcomes of its draws."""
    law: Law = {}
    scripts: list[list[int]] = [[]]
    while scripts:
        source = draws(scripts.pop())
        value = run(source)
        law[value] = law.get(value, 0) + source.probability
        scripts.extend(source.untried)
    return law


def random_table(seed: int, zeros: bool = False) -> Table:
    """A context-dependent distribution of fractions, as numpy objects [3]; with `zeros`, some are 0."""

    def row(context: Tokens) -> Any:
        rng = np.random.default_rng([seed, len(context), *context])
        weights = rng.integers(0 if zeros else 1, 10, VOCAB)
        if zeros:
            weights[rng.integers(VOCAB)] = 0
            weights[rng.integers(VOCAB)] = rng.integers(1, 10)
        return fractions(weights.tolist())

    return row


def fractions(weights: list[int]) -> Any:
    total = sum(weights)
    return np.array([Fraction(weight, total) for weight in weights], dtype=object)


def target_law(target: Table, length: int = LENGTH) -> Law:
    """Joint law of `length` tokens straight from the table."""
    law: Law = {}
    for tokens in product(range(VOCAB), repeat=length):
        probability = Fraction(1)
        for i, token in enumerate(tokens):
            probability = probability * target(tokens[:i])[token]
        if probability:
            law[tokens] = probability
    return law


@dataclass
class Decoding:
    """A rule, a drafter and their tables: everything a generation's law depends on."""

    rule: Rule
    drafter: Drafter
    target: Table
    draft: Table
    draws: type[ScriptedDraws] = ScriptedDraws  # of verification
    bonus: Table | None = None  # control: the row used at a leaf, if not the target's own

    def step_law(self, context: Tokens) -> Law:
        """Law of the tokens that one step yields after `context`."""

        def step(draws: ScriptedDraws) -> Tokens:
            proposal = self.drafter(context, self.draft, draws)

            def rows(node: int) -> Any:
                table = self.bonus if self.bonus and not proposal.children(node) else self.target
                return table(context + proposal.path_tokens(node))

            verdict = self.rule.verify(proposal, rows, Randomness(CounterNoise(0), draws))
            return verdict.tokens(proposal)

        return enumerate_law(step, self.draws)

    def law(self, length: int = LENGTH) -> Law:
        """Joint law of the first `length` tokens, step after step."""
        finished: Law = {}
        running: Law = {(): Fraction(1)}
        while running:
            context, probability = running.popitem()
            for tokens, share in self.step_law(context).items():
                longer = (context + tokens)[:length]
                law = finished if len(longer) == length else running
                law[longer] = law.get(longer, 0) + probability * share
        return finished

    def first_step_law(self, length: int = LENGTH) -> Law:
        """Joint law if the target goes on alone after one step: cheaper for large trees."""
        law: Law = {}
        for tokens, share in self.step_law(()).items():
            for rest, probability in target_law(lambda c, done=tokens: self.target(done + c), length).items():
                longer = (tokens + rest)[:length]
                law[longer] = law.get(longer, 0) + share * probability
        return law

    def mean_step_length(self) -> Any:
        return sum(len(tokens) * share for tokens, share in self.step_law(()).items())


def total_variation(a: Mapping[Tokens, Any], b: Mapping[Tokens, Any]) -> Any:
    return sum(abs(a.get(key, 0) - b.get(key, 0)) for key in {*a, *b}) / 2


def sampled_tree(*widths: int) -> Drafter:
    """Nodes of level i get widths[i] children sampled without replacement; (1, 1) is a sampled chain."""

    def draft(context: Tokens, table: Table, draws: Any) -> Proposal:
        builder = ProposalBuilder()
        level: list[tuple[int, Tokens]] = [(ROOT, context)]
        for width in widths:
            below = []
            for node, path in level:
                row = table(path)
                tokens = without_replacement(row, width, draws)
                nodes = builder.add(node, tokens, row)
                below += [(child, (*path, token)) for child, token in zip(nodes, tokens, strict=True)]
            level = below
        return builder.build()

    return draft


def fixed_tree(tokens: Tokens, parents: Tokens) -> Drafter:
    """The same point masses at every step."""
    return lambda context, table, draws: Proposal(tokens, parents)


def top_tree(*widths: int) -> Drafter:
    """Nodes of level i get the draft's widths[i] likeliest tokens: point masses that follow the context."""

    def draft(context: Tokens, table: Table, draws: Any) -> Proposal:
        builder = ProposalBuilder()
        level: list[tuple[int, Tokens]] = [(ROOT, context)]
        for width in widths:
            below = []
            for node, path in level:
                row = table(path)
                tokens = sorted(range(VOCAB), key=lambda token: -row[token])[:width]
                nodes = builder.add(node, tokens)
                below += [(child, (*path, token)) for child, token in zip(nodes, tokens, strict=True)]
            level = below
        return builder.build()

    return draft
