"""The rules on paths: `coupled` gives the tokens of plain decoding, one for one, whatever is proposed."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from exact_law import enumerate_law
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy_decoding import (
    Brackets,
    NoRepeats,
    garbage_draft,
    generate,
    model_draft,
    no_draft,
    pruned_draft,
    toy_model,
)

from paceline.core.params import SamplingParams
from paceline.core.path import PathSampler
from paceline.core.proposal import Proposal
from paceline.core.rng import CounterNoise, Randomness
from paceline.core.verify import RULES, Block, Coupled, Standard, Typical, make_rule
from paceline.errors import PacelineError

V = 13
TARGET, DRAFT = toy_model(1, V), toy_model(2, V)
CLOSE = lambda context: TARGET(context) + 0.5 * DRAFT(context)  # noqa: E731
DRAFTERS = {
    "the target itself": model_draft(TARGET, 1, 1, 1),
    "close chain": model_draft(CLOSE, 1, 1, 1, 1),
    "close tree": model_draft(CLOSE, 3, 2, 1),
    "wrong tree": model_draft(DRAFT, 2, 2),
    "pruned tree": pruned_draft(model_draft(CLOSE, 3, 3)),
    "garbage": garbage_draft(0, V),
    "point masses": lambda context, sampler: Proposal((context[-1], 3, 4), (-1, 0, 0)),
}

all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.5, 1, 2]),
    top_k=st.sampled_from([0, 1, 4, V]),
    top_p=st.sampled_from([1, 0.8, 0.3]),
    min_p=st.sampled_from([0, 0.1]),
    min_tokens=st.sampled_from([0, 4]),
    logit_bias=st.sampled_from([{}, {3: 2.0, 5: -100}]),
    presence_penalty=st.sampled_from([0, 1.0]),
    frequency_penalty=st.sampled_from([0, 0.6, -0.6]),
    repetition_penalty=st.sampled_from([1, 1.4]),
    bad_words=st.sampled_from([[], [[7]], [[2, 4], [4, 4]]]),
)


def start(params, seed=0, constraint=None, choice=0):
    return PathSampler.start(params, (1, 2), V, CounterNoise(seed, choice), (0,), constraint)


@settings(max_examples=60, deadline=None)
@given(params=all_params, seed=st.integers(0, 2**64 - 1), drafter=st.sampled_from(sorted(DRAFTERS)))
def test_tokens_are_those_of_plain_decoding(params, seed, drafter):
    plain = generate(Coupled(), start(params, seed), TARGET, no_draft, 12)
    assert all(len(proposal) == 0 for proposal in plain.proposals)
    assert generate(Coupled(), start(params, seed), TARGET, DRAFTERS[drafter], 12).tokens == plain.tokens


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), drafter=st.sampled_from(sorted(DRAFTERS)), greedy=st.booleans())
def test_constraints_hold_on_chains_and_trees(seed, drafter, greedy):
    """The toy constraints assert that only tokens they allow advance them."""
    params = SamplingParams(temperature=0 if greedy else 1)
    for constraint in (NoRepeats(V), Brackets(V)):
        plain = generate(Coupled(), start(params, seed, constraint), TARGET, no_draft, 12).tokens
        run = generate(Coupled(), start(params, seed, constraint), TARGET, DRAFTERS[drafter], 12)
        assert run.tokens == plain
        state = constraint.start()
        for token in run.tokens:
            state = constraint.advance(state, token)


@pytest.mark.parametrize("rule", [Standard(), Block()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("drafter", ["close chain", "close tree", "garbage", "point masses"])
def test_constraints_hold_under_the_other_rules(rule, drafter):
    drafters = {**DRAFTERS, "garbage": garbage_draft(0, V - 2)}  # ids the target lacks would not reach it

    def chain_for_block(context, sampler):
        proposal = drafters[drafter](context, sampler)
        if rule.name == "block" and not proposal.is_chain:
            return Proposal.chain([*context[-1:], 3, 0])  # forbidden at once by `no repeats`, then more
        return proposal

    for seed in range(10):
        for constraint in (NoRepeats(V), Brackets(V)):
            path = start(SamplingParams(), seed, constraint)
            generate(rule, path, TARGET, chain_for_block, 12, source_seed=seed)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "typical"])
@pytest.mark.parametrize("values", [{"temperature": 0}, {"top_k": 1}, {"temperature": 0, "repetition_penalty": 1.3}])
def test_greedy_is_argmax_under_every_lossless_rule(rule, values):
    params = SamplingParams(**values)
    plain = generate(Coupled(), start(params), TARGET, no_draft, 20)
    expected, context = [], (1, 2)
    if params.repetition_penalty == 1:
        while len(expected) < 20:
            expected.append(int(TARGET(context + tuple(expected)).argmax()))
        assert list(plain.tokens) == expected
    for name in ("the target itself", "close chain", "close tree", "pruned tree", "wrong tree"):
        if rule == "block" and "tree" in name:
            continue
        run = generate(make_rule(rule), start(params), TARGET, DRAFTERS[name], 20, source_seed=len(name))
        assert run.tokens == plain.tokens


def test_typical_is_argmax_when_greedy():
    params = SamplingParams(temperature=0)
    plain = generate(Coupled(), start(params), TARGET, no_draft, 20).tokens
    assert generate(Typical(), start(params), TARGET, DRAFTERS["close tree"], 20).tokens == plain


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "typical"])
@pytest.mark.parametrize("values", [{"temperature": 0}, {}, {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 1}])
def test_the_target_as_its_own_drafter_is_always_accepted(rule, values):
    run = generate(make_rule(rule), start(SamplingParams(**values)), TARGET, DRAFTERS["the target itself"], 40)
    assert run.accepted == run.drafted


def test_penalties_count_the_tokens_drafted_before():
    """Token 0 leads by 1.0 and each use costs 0.6: it wins twice, inside one block of drafts too."""

    def leads(context):
        return torch.tensor([1.0, 0.0, -9.0])

    params = SamplingParams(temperature=0, frequency_penalty=0.6)
    for rule in (Coupled(), Standard(), Block()):
        path = PathSampler.start(params, (2,), 3, CounterNoise(0))
        run = generate(rule, path, leads, lambda context, sampler: Proposal.chain([0, 0, 0, 0]), 4)
        assert run.tokens == (0, 0, 1, 0)


def test_bad_words_across_the_committed_and_the_drafted():
    def always(context):
        return torch.tensor([0.0, 1.0, 2.0])

    params = SamplingParams(temperature=0, bad_words=[[2, 2]])
    for draft in ((2, 2, 2), (1, 2, 2), (2, 1, 2, 2)):
        path = PathSampler.start(params, (0,), 3, CounterNoise(0))
        run = generate(Coupled(), path, always, lambda context, sampler, d=draft: Proposal.chain(d), 8)
        assert run.tokens == (2, 1) * 4


def test_a_bad_row_off_the_path_harms_nobody():
    path = PathSampler.start(SamplingParams(), (0,), 3, CounterNoise(0))
    plain = generate(Coupled(), path, lambda context: torch.zeros(3), no_draft, 1).tokens[0]
    wrong = (plain + 1) % 3

    def broken(context):
        return torch.full((3,), torch.nan) if context[1:2] == (wrong,) else torch.zeros(3)

    run = generate(Coupled(), path, broken, lambda context, sampler: Proposal.chain([wrong]), 1)
    assert run.tokens == (plain,)


def test_choices_and_seeds_differ_and_repeat():
    def tokens(seed, choice=0):
        return generate(Coupled(), start(SamplingParams(), seed, choice=choice), TARGET, no_draft, 10).tokens

    assert len({tokens(seed) for seed in range(20)}) == 20
    assert len({tokens(7, choice) for choice in range(8)}) == 8
    assert len({tokens(7) for _ in range(5)}) == 1


# The whole grid: every assignment of noise, exactly


@dataclass(frozen=True, slots=True)
class GridNoise(CounterNoise):
    """Noise read from a table [positions][tokens]; everything else is the shipped code."""

    table: tuple[tuple[float, ...], ...] = ()

    def exponentials(self, token_ids: Tensor) -> Tensor:
        return torch.tensor(self.table[self.position], dtype=torch.float64)[token_ids]


def grid_weights(context: tuple[int, ...], salt: int) -> Tensor:
    weights = [1 + (5 * len(context) + 7 * sum(context) + 3 * token + salt) % 11 for token in range(3)]
    return torch.tensor(weights, dtype=torch.float64)


def sampled_on(noise, context, widths):
    """A tree raced on the target's noise with other weights."""
    tokens, parents, level = [], [], [(-1, context)]
    for depth, width in enumerate(widths):
        below = []
        for node, path in level:
            for token in noise.ahead(depth).race_top(grid_weights(path, salt=4), width):
                below.append((len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(node)
        level = below
    return Proposal(tuple(tokens), tuple(parents))


def test_every_noise_assignment_gives_the_plain_tokens():
    """Two positions, three tokens, three noise levels: all 729 assignments, ties included."""
    rule, accepted = Coupled(), 0
    for flat in product((0.5, 1.0, 3.0), repeat=6):
        noise = GridNoise(0, table=(flat[:3], flat[3:], (1.0, 1.0, 1.0)))
        plain: tuple[int, ...] = ()
        while len(plain) < 2:
            at = noise.ahead(len(plain))
            weights = grid_weights(plain, salt=0)
            times = [e / w for e, w in zip(at.table[at.position], weights.tolist(), strict=True)]
            token = rule.verify(Proposal.empty(), lambda node, w=weights: w, Randomness(at, None)).next_token
            assert token == times.index(min(times))
            plain += (token,)
        tree = sampled_on(noise, (), (2, 2))
        proposals = [
            sampled_on(noise, (), (1, 1)),
            tree,
            tree.prune([node for node in range(len(tree)) if node in (1, 4, 5)]),
            Proposal((2, 1, 0), (-1, 0, 0)),
        ]
        for proposal in proposals:
            seen = {}

            def rows(node, proposal=proposal, seen=seen):
                seen[node] = grid_weights(proposal.path_tokens(node), salt=0)
                return seen[node]

            verdict = rule.verify(proposal, rows, Randomness(noise, None))
            assert verdict.tokens(proposal)[:2] == plain[: len(verdict.path) + 1]
            assert set(seen) == {-1, *verdict.path}  # rows are asked for on the walk only
            accepted += len(verdict.path)
    assert accepted > 1000


# Acceptance


def closed_form_acceptance(p: Tensor, q: Tensor) -> float:
    """P(both races have the same winner) = Σ_x 1 / Σ_y max(p_y/p_x, q_y/q_x)."""
    live = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    return sum(float(1 / torch.maximum(p / p[x], q / q[x]).sum()) for x in live)


@pytest.mark.parametrize("case", ["random", "close", "one-hot draft", "disjoint", "equal"])
def test_acceptance_is_at_least_the_promised(case):
    """4,000 seeds, 5 standard deviations: a false alarm once in 10⁶."""
    p = torch.softmax(toy_model(1, 6, 1.5)((0,)).double(), 0)
    q = {
        "random": torch.softmax(toy_model(9, 6, 1.5)((0,)).double(), 0),
        "close": torch.softmax(p.log() + 0.3 * toy_model(9, 6)((0,)).double(), 0),
        "one-hot draft": torch.eye(6, dtype=torch.float64)[int(p.argmax())],
        "disjoint": torch.zeros(6, dtype=torch.float64),
        "equal": p,
    }[case]
    if case == "disjoint":
        p = torch.tensor([0.5, 0.5, 0, 0, 0, 0], dtype=torch.float64)
        q = torch.tensor([0, 0, 0.2, 0.3, 0.5, 0], dtype=torch.float64)
    n = 4000
    same = sum(CounterNoise(seed).race(p) == CounterNoise(seed).race(q) for seed in range(n))
    tv = float((p - q).abs().sum() / 2)
    exact = closed_form_acceptance(p, q)
    assert exact >= (1 - tv) / (1 + tv) - 1e-12
    assert abs(same / n - exact) <= 5 * (exact * (1 - exact) / n) ** 0.5 + 1e-9


# Refusals and lossless marks


def test_the_registry_knows_what_is_lossless():
    assert {name: rule.lossless for name, rule in RULES.items()} == {
        "coupled": True, "standard": True, "block": True, "typical": False,
    }  # fmt: skip
    assert make_rule().name == "coupled"
    with pytest.raises(PacelineError, match="unknown verification rule 'greedy'") as error:
        make_rule("greedy")
    assert "coupled, standard, block, typical" in str(error.value.hint)


@pytest.mark.parametrize("rule", [Standard(), Block()], ids=lambda rule: rule.name)
def test_sampled_trees_that_were_pruned_are_refused(rule):
    path = start(SamplingParams())
    with pytest.raises(PacelineError, match="pruned or re-ranked") as error:
        generate(rule, path, TARGET, pruned_draft(model_draft(CLOSE, 3, 3)), 20)
    assert "coupled" in str(error.value.hint)


def test_a_token_outside_its_own_draft_row_is_a_drafters_fault():
    row = torch.tensor([0.5, 0.5, 0.0])
    proposal = Proposal.chain([2], row[None])
    with pytest.raises(ValueError, match="token 2"):
        Standard().verify(proposal, lambda node: row, Randomness(None, None))


@pytest.mark.parametrize("values", [{"epsilon": 0}, {"delta": 1.5}, {"epsilon": float("nan")}])
def test_typical_checks_its_parameters(values):
    with pytest.raises(PacelineError, match="typical"):
        Typical(**values)


def test_typical_threshold_by_hand():
    """p = (.05, .95): exp(−H) = .82, so the bar is min(.09, .3·.82) = .09; 20 equal ones: .3/20."""
    two = torch.tensor([0.05, 0.95], dtype=torch.float64)
    flat = torch.full((20,), 0.05, dtype=torch.float64)

    def stands(p, token):
        def step(draws):
            return Typical().verify(Proposal.chain([token]), lambda node: p, Randomness(None, draws)).path

        return set(enumerate_law(step)) == {(0,)}

    assert not stands(two, 0) and stands(two, 1) and stands(flat, 7)


class AlwaysReject:
    """As if every acceptance had been a hair below certain."""

    def accept(self, probability):
        return False

    def choose(self, weights):
        assert torch.isfinite(weights).all() and float(weights.sum()) > 0
        return int(weights.argmax())


@pytest.mark.parametrize("rule", [Standard(), Block()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("temperature", [1.0, 1e-6])
def test_a_rejection_where_p_equals_q_draws_from_p(rule, temperature):
    """Residual mass 0, which rounding alone can reach: the answer is p, not NaN."""
    row = start(SamplingParams(temperature=temperature)).weights(TARGET((1, 2)))
    q = row / row.cumsum(0)[-1]
    token = int(row.argmax())
    for proposal in (Proposal.chain([token], q[None]), Proposal.chain([token, token], torch.stack([q, q]))):
        verdict = rule.verify(proposal, lambda node: row, Randomness(None, AlwaysReject()))
        assert verdict.path == () and row[verdict.next_token] > 0


def test_a_rejected_certain_point_mass_still_draws_a_token():
    one_hot = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    verdict = Standard().verify(Proposal.chain([1]), lambda node: one_hot, Randomness(None, AlwaysReject()))
    assert verdict.next_token == 1


# Nothing is changed in place


@pytest.mark.parametrize("rule", RULES)
def test_inputs_keep_every_bit(rule):
    """Draft rows and target rows alike, over many draws, rejections included."""
    p = torch.tensor([0.1, 0.6, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)
    rows = torch.stack([q, q])
    proposal = Proposal.chain([0, 2], rows)
    point = Proposal.chain([0, 1])
    before = (p.clone(), rows.clone())
    for draft in (proposal, point):

        def step(draws, draft=draft):
            return make_rule(rule).verify(draft, lambda node: p, Randomness(CounterNoise(1), draws)).tokens(draft)

        enumerate_law(step)
    assert torch.equal(p, before[0]) and torch.equal(rows, before[1])
