"""Which laws are checked: every rule with the drafts it takes, plain and filtered; and faults that must be seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from law import LENGTH, Case
from law_models import Table, TableCache, TableDrafter, TinyTarget, Tokens, likeliest, near, random_row
from torch import Tensor

from paceline.core.drafting import DraftSampler, Draw
from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal, Verdict
from paceline.core.rng import CounterNoise, GeneratorDraws, Randomness, stream_key, token_hash
from paceline.core.tree import ROOT
from paceline.core.verify import Block, Coupled, Rule, Standard, TargetRows

VOCAB, FIVE, WIDE = 4, 5, 152_000

TARGET = Table(random_row("target", VOCAB), VOCAB)
DRAFT = Table(near(TARGET.logits, "draft", VOCAB), VOCAB)


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
CHAIN, TREE, WIDER = (SamplingParams(max_tokens=LENGTH + more) for more in (0, 2, 4))

PLAIN_CASES = (
    coupled("coupled, chain", drafter=drafter(1, 1), params=CHAIN),
    coupled("coupled, sampled siblings", drafter=drafter(2, 1), params=TREE),
    coupled("coupled, pruned at will", drafter=drafter(2, 1, edit=by_what_was_drawn), params=TREE),
    standard("standard, chain", drafter=drafter(1, 1), params=CHAIN),
    standard("standard, sampled siblings", drafter=drafter(2, 1), params=TREE),
    standard("standard, fixed chain", drafter=drafter(1, 1, pick=likeliest), samples=False, params=CHAIN),
    standard("standard, fixed siblings", drafter=drafter(2, 1, pick=likeliest), samples=False, params=TREE),
    block("block, chain", drafter=drafter(1, 1), params=CHAIN),
)
FILTERED_CASES = tuple(
    replace(case, name=f"{case.name}, filtered", params=replace(case.params, temperature=0.8, top_p=0.85))
    for case in PLAIN_CASES
)

tiny_target = cache(partial(TinyTarget, FIVE))
TINY_CASES = tuple(
    Case(
        f"{rule.name}, sampled siblings, a real decoder",
        rule,
        drafter(2, 1, table=Table(random_row("five", FIVE), FIVE)),
        tiny_target,
        SamplingParams(temperature=1.5, max_tokens=LENGTH + 2),
        prompt=(0, 2, 1),
        consecutive=rule.name == "coupled",
    )
    for rule in (Standard(), Coupled())
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
    drafter(1, table=Table(likely, VOCAB, memory=1)),
    cache(lambda: Table(likely_few, WIDE, memory=1)),
    consecutive=True,
    law_of=cache(lambda: Table(likely, VOCAB, memory=1)),
)


# Controls: one fault each


def argmax_with_soft_row(logits: Tensor, sampler: DraftSampler, width: int) -> Draw:
    return Draw((int(logits.argmax()),), sampler.draw(logits).probs)


def sharper_than_announced(logits: Tensor, sampler: DraftSampler, width: int) -> Draw:
    return Draw(sampler.draw(2 * logits, width).tokens, sampler.draw(logits).probs)


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

    def draft_sampler(self, path: Any, draws: Any) -> DraftSampler:
        return self.rule.draft_sampler(path, draws)


class StuckNoise(CounterNoise):
    """The first token's noise at every position."""

    def ahead(self, steps: int) -> "StuckNoise":
        return self


class Float32Noise(CounterNoise):
    """Gumbel noise as in textbooks, in float32: -log(-log u) is infinite where u rounds to 1."""

    def race(self, weights: Tensor) -> int:
        key = stream_key(self.seed, self.choice, self.position)
        uniform = (token_hash(key, torch.arange(len(weights))).double() + 0.5).mul_(2.0**-32).float()
        return int((weights.float().log() - (-uniform.log()).log()).argmax())


def one_stream(seed: int, choice: int = 0, stream: str = "verify") -> GeneratorDraws:
    """Drafts and verification draw the same numbers."""
    return GeneratorDraws(seed, choice)


def keep_first_rows(cache: TableCache, path: Sequence[int]) -> None:
    """As if the accepted nodes always lay in front."""
    cache.context += tuple(cache.rows[: len(path)])


residual_is_p = {"paceline.core.verify.residual": lambda p, q: p}

CONTROLS = (
    standard("arg-max draft with a soft row, standard", drafter=drafter(1, 1, pick=argmax_with_soft_row)),
    block("arg-max draft with a soft row, block", drafter=drafter(1, 1, 1, pick=argmax_with_soft_row)),
    standard("sampled at another temperature, standard", drafter=drafter(1, 1, pick=sharper_than_announced)),
    block("sampled at another temperature, block", drafter=drafter(1, 1, 1, pick=sharper_than_announced)),
    standard("best two of three siblings, undeclared", drafter=drafter(3, edit=best_two_undeclared)),
    on_table("one uniform a step, standard", rule=SharedUniform(Standard()), drafter=drafter(1, 1)),
    on_table("one uniform a step, block", rule=SharedUniform(Block()), drafter=drafter(1, 1, 1)),
    standard("correction drawn from p, standard", drafter=drafter(1, 1), plant=residual_is_p),
    block("correction drawn from p, block", drafter=drafter(1, 1, 1), plant=residual_is_p),
    standard("one stream for draft and verification", drafter=drafter(1, 1), plant={"paceline.decode.GeneratorDraws": one_stream}),
    coupled("the same noise at every position", drafter=drafter(1, 1), plant={"paceline.decode.CounterNoise": StuckNoise}),
    coupled("the wrong rows are committed", drafter=drafter(2, 1), plant={"law_models.TableCache.commit": keep_first_rows}),
)
WIDE_CONTROL = replace(WIDE_CASE, name="float32 noise", plant={"paceline.decode.CounterNoise": Float32Noise})
