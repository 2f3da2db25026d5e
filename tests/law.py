"""The joint law of the first tokens that `decode` emits: exact, by enumeration, and counted, by running it.

`tally` calls `paceline.decode.decode` once a draw, for cases and controls (cases with one planted fault) alike.
`law_cases.py` lists those of the rules; `test_decode_law.py` runs them in the test lane, `bench/verify_law.py` with
more draws. `drafters/test_contract_law.py` has a case for every registered method.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from law_models import Target, Tokens
from scipy.stats import chi2, poisson
from torch import Tensor

from paceline.core import path, rng
from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.core.rng import CounterNoise
from paceline.core.rows import ScannedRow
from paceline.core.support import Support
from paceline.core.tree import ROOT
from paceline.decode import Step, decode
from paceline.drafters.base import Drafter, SequenceView

Law = dict[Tokens, float]

LENGTH = 3  # tokens whose joint law is compared
SHARE = 0.2  # of the draws must contain a rejection, and an accepted draft: else the rule was hardly at work
CAUGHT = 1e-9  # a control's counts must be at most this likely


@dataclass(frozen=True)
class Case:
    """All that a draw's law depends on. Nothing else is passed to `decode`.

    `consecutive`: draws take the seeds 0, 1, 2, …; else each draws a fresh one. `plant`: names and what replaces them
    while it runs, for controls.
    """

    name: str
    rule: Any
    drafter: Callable[[], Drafter]
    target: Callable[[], Target]
    params: SamplingParams
    prompt: Tokens = (2,)
    num_draft_tokens: int = 6
    consecutive: bool = False
    plant: Mapping[str, Any] = field(default_factory=dict)
    law_of: Callable[[], Target] | None = None  # a smaller target with the same law

    @property
    def law(self) -> Law:
        return exact_law((self.law_of or self.target)(), self.prompt, self.params)

    def seeds(self, first: int, count: int) -> Sequence[int]:
        """Seeds of the draws from `first` on: the same at every run, so that a verdict is final."""
        if self.consecutive:
            return range(first, first + count)
        source = random.Random(f"{self.name}, from {first}")
        return [source.getrandbits(53) for _ in range(count)]


# The exact law: softmax, nucleus and chain rule written out here, nothing of ours but the logits


def probabilities(logits: Sequence[float], temperature: float, top_p: float) -> list[float]:
    """Softmax at a temperature, kept to the fewest likeliest tokens that hold `top_p` of it."""
    peak = max(logits)
    weights = [math.exp((logit - peak) / temperature) for logit in logits]
    mass, kept = top_p * math.fsum(weights), [0.0] * len(weights)
    for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
        if top_p < 1 and math.fsum(kept) >= mass:
            break
        kept[token] = weights[token]
    total = math.fsum(kept)
    return [weight / total for weight in kept]


def exact_law(target: Target, prompt: Tokens, params: SamplingParams) -> Law:
    """Probability of each sequence of LENGTH tokens that is possible."""
    law: Law = {(): 1.0}
    for _ in range(LENGTH):
        longer: Law = {}
        for tokens, probability in law.items():
            row = probabilities(target.logits(prompt + tokens).tolist(), params.temperature, params.top_p)
            longer |= {(*tokens, token): probability * p for token, p in enumerate(row) if p > 0}
        law = longer
    return law


# Counting


@dataclass
class Tally:
    """What many draws of one case came to. Only what happened to the first LENGTH tokens counts."""

    counts: Counter[Tokens] = field(default_factory=Counter)
    with_rejection: int = 0
    with_acceptance: int = 0

    @property
    def draws(self) -> int:
        return self.counts.total()

    def add(self, other: "Tally") -> None:
        self.counts.update(other.counts)
        self.with_rejection += other.with_rejection
        self.with_acceptance += other.with_acceptance


class Noted:
    """A drafter, and what it proposed last."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.last = inner, Proposal.empty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        (self.last,) = proposals = self.inner.propose(sequences, budgets)
        return proposals


def tally(case: Case, seeds: Sequence[int]) -> Tally:
    """One call of `decode` a seed, up to its first LENGTH tokens."""
    result, target, drafter = Tally(), case.target().decoder, Noted(case.drafter())
    with ExitStack() as planted, torch.inference_mode():
        for name, fault in case.plant.items():
            planted.enter_context(mock.patch(name, fault))
        planted.enter_context(mock.patch("paceline.decode.draw_seed", iter(seeds).__next__))
        for _ in seeds:
            tokens: Tokens = ()
            rejected = accepted = False
            steps = decode(target, case.prompt, case.params, drafter, case.num_draft_tokens, rule=case.rule)
            while len(tokens) < LENGTH:
                step = next(steps)
                kept = min(step.num_accepted_tokens, LENGTH - len(tokens))
                accepted |= kept > 0
                drafted = step.num_draft_tokens > 0 and len(tokens) + kept < LENGTH
                rejected |= drafted and _ended_in_rejection(step, drafter.last)
                tokens += step.token_ids
            steps.close()
            result.counts[tokens[:LENGTH]] += 1
            result.with_rejection += rejected
            result.with_acceptance += accepted
    return result


def _ended_in_rejection(step: Step, proposal: Proposal) -> bool:
    """More was drafted after the accepted path, and none of it stood."""
    node: int | None = ROOT
    for token in step.token_ids[: step.num_accepted_tokens]:
        node = proposal.child_with(node, token)
        assert node is not None, "a token counted as accepted was never drafted"
    return bool(proposal.children(node))


def p_value(counts: Counter[Tokens], law: Law) -> float:
    """How likely counts as far from the law, or farther, are under it; 0 if something impossible was drawn.

    Chi-square over the cells with 5 or more expected. The others count as one cell, or, where even together they are
    too few for that, as a Poisson number beside it: then the worse verdict of the two counts, doubled.
    """
    if any(tokens not in law for tokens in counts):
        return 0.0
    draws, verdicts = counts.total(), []
    pairs = [(counts[tokens], draws * probability) for tokens, probability in law.items()]
    cells = [pair for pair in pairs if pair[1] >= 5]
    rest = [pair for pair in pairs if pair[1] < 5]
    if rest:
        seen, expected = sum(pair[0] for pair in rest), math.fsum(pair[1] for pair in rest)
        if expected >= 5:
            cells.append((seen, expected))
        else:
            verdicts.append(float(poisson.sf(seen - 1, expected)))
    if len(cells) > 1:
        statistic = math.fsum((seen - expected) ** 2 / expected for seen, expected in cells)
        verdicts.append(float(chi2.sf(statistic, len(cells) - 1)))
    return min(1.0, len(verdicts) * min(verdicts)) if verdicts else 1.0


def faults(tally: Tally, law: Law, false_alarm: float, share: float = SHARE) -> list[str]:
    """What speaks against a case; nothing if all is well."""
    found = []
    impossible = sum(count for tokens, count in tally.counts.items() if tokens not in law)
    if impossible:
        found.append(f"{impossible} draws are impossible")
    p = p_value(tally.counts, law)
    if p < false_alarm:
        found.append(f"p = {p:.1e} under the exact law")
    for what, count in (("rejection", tally.with_rejection), ("accepted draft", tally.with_acceptance)):
        if count < share * tally.draws:
            found.append(f"only {count} of {tally.draws} draws contain a {what}")
    return found


# Short cuts for the test lane: pure functions of a row, or of a seed, worked out once instead of at every draw


def quick_tally(case: Case, seeds: Sequence[int], at_once: int = 5000) -> Tally:
    """`tally` at three times the speed, bit for bit the same draws. For cases on tables."""
    result = Tally()
    with mock.patch.object(path, "token_support", _remembering(case)):
        for first in range(0, len(seeds), at_once):
            some = seeds[first : first + at_once]
            noise = tally_noise(some, case.target().decoder.config.vocab_size) if case.consecutive else {}
            planted = {"paceline.decode.CounterNoise": partial(TableNoise, table=noise)} if noise else {}
            result.add(tally(replace(case, plant={**planted, **case.plant}), some))
    return result


def _remembering(case: Case) -> Callable[..., Support]:
    """`token_support` once a row: under the case's parameters it depends on nothing else."""
    assert not (case.params.has_penalties or case.params.min_tokens or case.params.bad_words)
    shipped = path.token_support
    known: dict[int, tuple[Tensor | ScannedRow, Support]] = {}

    def token_support(logits: Tensor | ScannedRow, *others: Any) -> Support:
        key = (logits.values if isinstance(logits, ScannedRow) else logits).data_ptr()
        if key not in known:  # the row is held too: its address cannot come to mean another
            known[key] = logits, shipped(logits, *others)
        return known[key][1]

    return token_support


def tally_noise(seeds: Sequence[int], vocab_size: int) -> dict[tuple[int, int], Tensor]:
    """CounterNoise.exponentials of every (seed, position) in one call: a key joins as the id it amounts to."""
    places = list(product(seeds, range(2 * LENGTH)))
    step = pow(rng._GOLDEN, -1, 1 << 64)
    shifts = [rng._signed((rng.stream_key(seed, 0, position) * step) % (1 << 64)) for seed, position in places]
    ids = torch.tensor(shifts)[:, None] + torch.arange(vocab_size)
    rows = rng.exponential(rng.token_hash(0, ids.flatten())).view(len(places), vocab_size)
    return dict(zip(places, rows.unbind(), strict=True))


@dataclass(frozen=True, slots=True)
class TableNoise(CounterNoise):
    """CounterNoise with its numbers looked up; everything else is the shipped code."""

    table: Mapping[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def exponentials(self, token_ids: Tensor) -> Tensor:
        row = self.table[self.seed, self.position]
        return row if len(token_ids) == len(row) else row[token_ids]
