"""Which laws are checked: every rule with the drafts it takes, plain and filtered; and faults that must be seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from law import LENGTH, Case
from law_models import Table, TableCache, TableDrafter, Tokens, likeliest, near, random_row, tiny_target
from torch import Tensor

from paceline.core.drafting import DraftSampler, Draw
from paceline.core.params import SamplingParams
from paceline.core.path import TargetWeights
from paceline.core.proposal import Proposal, Verdict
from paceline.core.rng import CounterNoise, GeneratorDraws, Randomness, stream_key, token_hash
from paceline.core.support import Support
from paceline.core.tree import ROOT
from paceline.core.verify import Block, Coupled, Rule, Standard, TargetRows
from paceline.models.cache import SequenceCache

VOCAB, FIVE, WIDE = 4, 5, 152_000

TARGET = Table(random_row("target", VOCAB), VOCAB)
DRAFT = Table(near(TARGET.logits, "rival", VOCAB), VOCAB)


def drafter(*widths: int, table: Table = DRAFT, **options: Any) -> Callable[[], TableDrafter]:
    return lambda: TableDrafter(table, widths, **options)


def by_what_was_drawn(proposal: Proposal) -> Proposal:
    """Drops a first sibling where the second has the lower id: a choice that looks at the draws."""
    dropped: set[int] = set()
    for node, parent in enumerate(proposal.parents):
        first, *others = proposal.children(parent)
        beaten = bool(others) and node == first and proposal.tokens[others[0]] < proposal.tokens[node]
        if beaten or parent in dropped:
            dropped.add(node)
    return proposal.prune(set(range(len(proposal))) - dropped)


on_table = partial(Case, target=lambda: TARGET)
coupled = partial(on_table, rule=Coupled(), consecutive=True)
standard = partial(on_table, rule=Standard())
block = partial(on_table, rule=Block())

# `max_tokens` leaves the first step just room for the whole draft: what follows the third token costs time for nothing
CHAIN, TREE = SamplingParams(max_tokens=LENGTH), SamplingParams(max_tokens=LENGTH + 1)

PLAIN_CASES = (
    coupled("coupled, chain", drafter=drafter(1, 1), params=CHAIN),
    coupled("coupled, sampled siblings", drafter=drafter(2, 1), params=TREE),
    coupled("coupled, pruned at will", drafter=drafter(2, 1, edit=by_what_was_drawn), params=TREE),
    standard("standard, chain", drafter=drafter(1, 1), params=CHAIN),
    standard("standard, sampled siblings", drafter=drafter(2, 1), params=TREE),
    standard("standard, fixed chain", drafter=drafter(1, 1, pick=likeliest), params=CHAIN),
    standard("standard, fixed siblings", drafter=drafter(2, 1, pick=likeliest), params=TREE),
    block("block, chain", drafter=drafter(1, 1), params=CHAIN),
)
FILTERED_CASES = tuple(
    replace(case, name=f"{case.name}, filtered", params=replace(case.params, temperature=0.8, top_p=0.85))
    for case in PLAIN_CASES
)

# longer drafts, and room for them at each of the first three tokens
LONG = SamplingParams(max_tokens=12)
LONG_CASES = (
    coupled("coupled, pruned at will, 2×2", drafter=drafter(2, 2, edit=by_what_was_drawn), params=LONG),
    standard("standard, chain of 3", drafter=drafter(1, 1, 1), params=LONG),
    standard("standard, sampled siblings, 2×2", drafter=drafter(2, 2), params=LONG),
    block("block, chain of 3", drafter=drafter(1, 1, 1), params=LONG),
)

TINY_CASE = Case(
    "standard, sampled siblings, a real decoder",
    Standard(),
    drafter(3, 1, table=Table(random_row("five", FIVE), FIVE)),
    cache(partial(tiny_target, FIVE)),
    SamplingParams(temperature=1.5, max_tokens=LENGTH + 2),
)


# One likely token set in a vocabulary of 152k, of which the others have 10⁻²¹: float32 noise is seen only here


def likely(context: Tokens) -> Tensor:
    return random_row("likely", VOCAB)(context)


def likely_few(context: Tokens) -> Tensor:
    row = torch.full((WIDE,), -60.0)
    row[:VOCAB] = likely(context)
    return row


WIDE_CASE = Case(
    "coupled, 152k tokens",
    Coupled(),
    drafter(1, table=Table(near(likely, "unlikely", VOCAB), VOCAB, memory=1)),
    cache(lambda: Table(likely_few, WIDE, memory=1)),
    CHAIN,
    consecutive=True,
    law_of=cache(lambda: Table(likely, VOCAB, memory=1)),
)


# Controls: one fault each


def argmax_with_soft_row(logits: Tensor, sampler: DraftSampler, width: int) -> Draw:
    return Draw((int(logits.argmax()),), sampler.draw(logits).probs)


def flatter_than_announced(logits: Tensor, sampler: DraftSampler, width: int) -> Draw:
    return Draw(sampler.draw(0.3 * logits, width).tokens, sampler.draw(logits).probs)


def best_two_undeclared(proposal: Proposal) -> Proposal:
    """Of the three drawn the two that the draft thinks likeliest, as if no more had been drawn."""
    row: Any = proposal.draft_row(ROOT)
    best = sorted(proposal.children(ROOT), key=lambda node: -float(row[proposal.tokens[node]]))[:2]
    return replace(proposal.prune(best), pruned=False)


class OneUniform:
    """One number for every acceptance of a step, uniform between what earlier answers leave: a re-seeded generator."""

    def __init__(self, draws: Any) -> None:
        self.draws = draws
        self.low, self.high = 0.0, 1.0

    def accept(self, probability: Any) -> bool:
        bar = min(max(float(probability), self.low), self.high)
        accepted = bool(self.draws.accept((bar - self.low) / (self.high - self.low)))
        self.low, self.high = (self.low, bar) if accepted else (bar, self.high)
        return accepted

    def choose(self, weights: Any) -> int:
        return int(self.draws.choose(weights))


@dataclass(frozen=True, slots=True)
class SharedUniform:
    """A rule whose acceptances of a step all look at one number."""

    rule: Rule

    def verify(self, proposal: Proposal, target_weights: TargetRows, randomness: Randomness) -> Verdict:
        shared = Randomness(randomness.noise, OneUniform(randomness.draws))
        return self.rule.verify(proposal, target_weights, shared)

    def target_rows(self, target: TargetWeights) -> TargetRows:
        return self.rule.target_rows(target)

    def draft_sampler(self, path: Any, draws: Any) -> DraftSampler:
        return self.rule.draft_sampler(path, draws)


class StuckNoise(CounterNoise):
    """The first token's noise at every position."""

    def ahead(self, steps: int) -> "StuckNoise":
        return self


class Float32Noise(CounterNoise):
    """Gumbel noise as in textbooks, in float32: -log(-log u) is infinite where u rounds to 1."""

    def race(self, weights: Tensor | Support) -> int:
        weights, ids = Support.of(weights).weights, Support.of(weights).ids
        ids = torch.arange(len(weights)) if ids is None else ids
        key = stream_key(self.seed, self.choice, self.position)
        uniform = (token_hash(key, ids).double() + 0.5).mul_(2.0**-32).float()
        return int(ids[(weights.float().log() - (-uniform.log()).log()).argmax()])


def one_stream(seed: int, choice: int = 0, stream: str = "verify") -> GeneratorDraws:
    """Drafts and verification draw the same numbers."""
    return GeneratorDraws(seed, choice)


def keep_first_rows(cache: TableCache, path: Sequence[int]) -> None:
    """As if the accepted nodes always lay in front."""
    cache.context += tuple(cache.rows[: len(path)])


def keep_first_slots(cache: SequenceCache, path: Sequence[int]) -> None:
    """The same of a real cache."""
    cache.length += len(path)


residual_is_p = {"paceline.core.verify.residual": lambda p, q: p}
one_stream_for_all = {"paceline.decode.GeneratorDraws": one_stream}
stuck_noise = {"paceline.decode.CounterNoise": StuckNoise}
wrong_rows = {"law_models.TableCache.commit": keep_first_rows}

CONTROLS = (
    standard("arg-max with a soft row, standard", drafter=drafter(1, 1, pick=argmax_with_soft_row), params=CHAIN),
    block("arg-max with a soft row, block", drafter=drafter(1, 1, pick=argmax_with_soft_row), params=CHAIN),
    standard("another temperature, standard", drafter=drafter(1, 1, pick=flatter_than_announced), params=CHAIN),
    block("another temperature, block", drafter=drafter(1, 1, pick=flatter_than_announced), params=CHAIN),
    standard("best two of three siblings, undeclared", drafter=drafter(3, edit=best_two_undeclared), params=TREE),
    on_table("one uniform number a step", rule=SharedUniform(Standard()), drafter=drafter(1, 1, 1), params=LONG),
    standard("correction drawn from p, standard", drafter=drafter(1, 1), params=CHAIN, plant=residual_is_p),
    block("correction drawn from p, block", drafter=drafter(1, 1), params=CHAIN, plant=residual_is_p),
    standard("one stream for all draws", drafter=drafter(1, 1), params=CHAIN, plant=one_stream_for_all),
    coupled("the same noise at every position", drafter=drafter(1, 1), params=CHAIN, plant=stuck_noise),
    coupled("the wrong rows are committed", drafter=drafter(3, 1), params=TREE, plant=wrong_rows),
)
TINY_CONTROL = replace(
    TINY_CASE,
    name="the wrong rows are committed, a real decoder",
    plant={"paceline.models.cache.SequenceCache.commit": keep_first_slots},
)
# hashes that round to 1 in float32 come at the first token of seeds 289, 302 and 306, among others
WIDE_CONTROL = replace(WIDE_CASE, name="float32 noise", plant={"paceline.decode.CounterNoise": Float32Noise})
