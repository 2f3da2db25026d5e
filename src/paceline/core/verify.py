"""Rules that decide which drafted tokens stand. Plain decoding is any of them with an empty proposal.

p and q are the target's and the draft's distribution at a node. A rule walks from the root, asks for the
target's row only where it stands, and returns the accepted path and one more token of the target's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from paceline.core.drafting import CoupledDrafts, DraftSampler, SampledDrafts, TopDrafts
from paceline.core.path import PathSampler, TargetWeights
from paceline.core.proposal import Proposal, Row, Verdict
from paceline.core.rng import Draws, Randomness
from paceline.core.rows import normalised, point_mass, residual, total, zeroed
from paceline.core.tree import ROOT
from paceline.errors import PacelineError
from paceline.values import shown

# Unnormalised target weights [V] (or, for `coupled`, their Support) after a node; −1: after the last committed token.
TargetRows = Callable[[int], Row]


class Rule(Protocol):
    """A verification rule. `lossless`: what comes out has exactly the target's law, whatever was drafted."""

    name: ClassVar[str]
    lossless: ClassVar[bool]
    takes_trees: ClassVar[bool]

    def verify(self, proposal: Proposal, target_weights: TargetRows, randomness: Randomness) -> Verdict:
        """Accept a path and draw the token after it. PacelineError for a proposal the rule cannot take."""

    def target_rows(self, target: TargetWeights) -> TargetRows:
        """The form in which this rule reads the target's distribution."""

    def draft_sampler(self, path: PathSampler, draws: Draws) -> DraftSampler:
        """How a drafter must pick tokens for this rule; `draws` is the drafter's own source of chance."""


@dataclass(frozen=True, slots=True)
class Coupled:
    """The target draws its token with noise that depends on the position; a draft that equals it stands.

    So the output never depends on the proposal: pruned, re-ranked, from any drafter or none.
    Drafts raced on the same noise are accepted with probability at least (1 − TV)/(1 + TV).
    """

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True

    def verify(self, proposal: Proposal, target_weights: TargetRows, randomness: Randomness) -> Verdict:
        node, noise = ROOT, randomness.noise
        path: list[int] = []
        while True:
            token = noise.race(target_weights(node))
            child = proposal.child_with(node, token)
            if child is None:
                return Verdict(tuple(path), token)
            path.append(child)
            node, noise = child, noise.ahead(1)

    def target_rows(self, target: TargetWeights) -> TargetRows:
        return target.support  # only what can win the race

    def draft_sampler(self, path: PathSampler, draws: Draws) -> DraftSampler:
        return TopDrafts(path) if path.params.is_greedy else CoupledDrafts(path)


@dataclass(frozen=True, slots=True)
class Standard:
    """Accept with min(1, p/q), else draw from norm(max(0, p − q)) (2211.17192, Algorithm 1; 2302.01318).

    Siblings are tried in draw order, p becoming the residual after each rejection. Where they were sampled
    without replacement, q loses each rejected token (recursive rejection sampling, 2402.12374); where they
    are point masses, q is 1 at the token tried.
    """

    name: ClassVar[str] = "standard"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True

    def verify(self, proposal: Proposal, target_weights: TargetRows, randomness: Randomness) -> Verdict:
        _refuse_pruned(self.name, proposal)
        node, draws = ROOT, randomness.draws
        path: list[int] = []
        while True:
            p = normalised(target_weights(node))
            q = proposal.draft_row(node)
            for child in proposal.children(node):
                token = proposal.tokens[child]
                q_child = point_mass(token, like=p) if q is None else normalised(_drawn(q, token))
                if draws.accept(min(1, p[token] / q_child[token])):
                    break
                p = residual(p, q_child)
                q = None if q is None else zeroed(q, token)
            else:
                return Verdict(tuple(path), draws.choose(p))
            path.append(child)
            node = child

    def target_rows(self, target: TargetWeights) -> TargetRows:
        return target

    def draft_sampler(self, path: PathSampler, draws: Draws) -> DraftSampler:
        return TopDrafts(path) if path.params.is_greedy else SampledDrafts(path, draws)


@dataclass(frozen=True, slots=True)
class Block:
    """Block verification of a chain (2403.10444, Algorithm 2): accepts at least as many tokens as `standard`.

    With x_1…x_γ the draft: w_0 = 1, w_i = min(1, w_{i−1}·p(x_i)/q(x_i)); the first i tokens are kept with
    h_i = S_i/(S_i + 1 − w_i), S_i = Σ max(0, w_i·p_{i+1} − q_{i+1}), h_γ = w_γ; the longest that passes wins.
    """

    name: ClassVar[str] = "block"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = False

    def verify(self, proposal: Proposal, target_weights: TargetRows, randomness: Randomness) -> Verdict:
        _refuse_pruned(self.name, proposal)
        if not proposal.is_chain:
            raise PacelineError(
                "verification rule 'block' takes chains, and this draft is a tree",
                hint="draft a chain, or use the rule 'coupled' or 'standard'",
            )
        draws = randomness.draws
        w: list[Row] = [1]  # w[i] after i tokens
        p: list[Row] = []  # p[i], q[i] at the node after i tokens
        q: list[Row] = []
        for i in range(proposal.num_verified):
            token = proposal.tokens[i]
            p.append(normalised(target_weights(i - 1)))
            drawn_from = proposal.draft_row(i - 1)
            if drawn_from is None:
                q.append(point_mass(token, like=p[i]))
            else:
                q.append(normalised(_drawn(drawn_from, token)))
            w.append(min(1, w[i] * p[i][token] / q[i][token]))
            if w[-1] == 0:  # nothing beyond can be kept, and a constraint must not see a token it forbids
                break
        longest = len(p)
        if draws.accept(w[longest]):
            return Verdict(tuple(range(longest)), draws.choose(target_weights(longest - 1)))
        for i in range(longest - 1, 0, -1):
            owed = total((w[i] * p[i] - q[i]).clip(0))
            if draws.accept(owed / (owed + 1 - w[i]) if w[i] < 1 else 1):
                return Verdict(tuple(range(i)), draws.choose(residual(w[i] * p[i], q[i])))
        return Verdict((), draws.choose(residual(p[0], q[0])))

    def target_rows(self, target: TargetWeights) -> TargetRows:
        return target

    def draft_sampler(self, path: PathSampler, draws: Draws) -> DraftSampler:
        return TopDrafts(path) if path.params.is_greedy else SampledDrafts(path, draws)


@dataclass(frozen=True, slots=True)
class Typical:
    """Lossy: keep a draft the target finds typical, p(x) > min(ε, δ·exp(−H(p))) (Medusa, 2401.10774, §3.2).

    Of several such siblings the likeliest is kept. The output does NOT have the target's distribution.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field_name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not 0 < value <= 1:
                raise PacelineError(f"typical: {field_name} is {value}; it must be above 0 and at most 1")

    def verify(self, proposal: Proposal, target_weights: TargetRows, randomness: Randomness) -> Verdict:
        node = ROOT
        path: list[int] = []
        while True:
            p = normalised(target_weights(node))
            children = proposal.children(node)
            best = max(children, key=lambda child: float(p[proposal.tokens[child]]), default=None)
            if best is None or p[proposal.tokens[best]] <= self._threshold(p):
                return Verdict(tuple(path), randomness.draws.choose(p))
            path.append(best)
            node = best

    def target_rows(self, target: TargetWeights) -> TargetRows:
        return target

    def draft_sampler(self, path: PathSampler, draws: Draws) -> DraftSampler:
        return TopDrafts(path)

    def _threshold(self, p: Row) -> float:
        support = p[p > 0]
        return min(self.epsilon, self.delta * math.exp(float(total(support * support.log()))))


def _drawn(q: Row, token: int) -> Row:
    if not q[token] > 0:
        raise ValueError(f"token {token} cannot be sampled from draft_probs that give it probability 0")
    return q


def _refuse_pruned(name: str, proposal: Proposal) -> None:
    if proposal.pruned:
        raise PacelineError(
            f"verification rule '{name}' cannot take a sampled draft that was pruned or re-ranked: biased",
            hint="use the rule 'coupled', keep the sampled tree whole, or draft by rank instead of by chance",
        )


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Coupled, Standard, Block, Typical)}


def make_rule(name: str = "coupled") -> Rule:
    """The rule of that name with its default parameters. Raises PacelineError for an unknown one."""
    if name not in RULES:
        raise PacelineError(f"unknown verification rule {shown(name)}", hint=f"one of: {', '.join(RULES)}")
    return RULES[name]()
