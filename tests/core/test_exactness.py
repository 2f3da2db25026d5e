"""The rules' laws, exact: every outcome of the shipped code, in fractions, 3 tokens, vocabulary of 3.

Equal means a total variation of exactly 0, so nothing here can fail by chance. Each way of being subtly wrong
that other engines shipped is entered through the same call and must be caught.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from exact_law import (
    LENGTH,
    Decoding,
    SharedUniformDraws,
    enumerate_law,
    fixed_tree,
    fractions,
    random_table,
    sampled_tree,
    target_law,
    top_tree,
    total_variation,
)

from paceline.core import verify
from paceline.core.proposal import DenseDraftProbs, Proposal, ProposalBuilder
from paceline.core.rng import without_replacement
from paceline.core.tree import ROOT
from paceline.core.verify import Block, Standard, Typical
from paceline.errors import PacelineError

TABLES = {
    "random": (random_table(1), random_table(2)),
    "zeros": (random_table(3, zeros=True), random_table(4, zeros=True)),
    "equal": (random_table(5), random_table(5)),
    "disjoint": (lambda context: fractions([1, 2, 0]), lambda context: fractions([0, 0, 1])),
    "one-hot target": (lambda context: fractions([0, 1, 0]), random_table(6)),
    "one-hot draft": (random_table(7), lambda context: fractions([0, 1, 0])),
    "one-hot, the same": (lambda context: fractions([0, 0, 1]), lambda context: fractions([0, 0, 1])),
    "draft vocabulary of two": (random_table(8), lambda context: fractions([2, len(context) + 1, 0])),
}


def mixed_tree(context, table, draws):
    """Root: two sampled children; under the first two point masses, under the second two sampled again."""
    builder = ProposalBuilder()
    row = table(context)
    tokens = without_replacement(row, 2, draws)
    nodes = builder.add(ROOT, tokens, row)
    builder.add(nodes[0], (2, 0))
    if len(nodes) > 1:
        row = table((*context, tokens[1]))
        builder.add(nodes[1], without_replacement(row, 2, draws), row)
    return builder.build()


def sampled_then_fixed(context, table, draws):
    """A chain: a point mass, a sampled token, a point mass."""
    row = table((*context, 1))
    token = draws.choose(row)
    return Proposal((1, token, 0), (-1, 0, 1), DenseDraftProbs((0,), (row,)))


def stop_after_unlikely(context, table, draws):
    """Stops after including a token it thinks unlikely: legal, for the token is verified all the same."""
    builder, node, path = ProposalBuilder(), ROOT, context
    while len(builder) < 3:
        row = table(path)
        token = draws.choose(row)
        (node,) = builder.add(node, (token,), row)
        path = (*path, token)
        if row[token] < Fraction(1, 3):
            break
    return builder.build()


def stop_before_flat(context, table, draws):
    """Stops before drawing where its distribution is flat: legal, for it looks at nothing drawn there."""
    builder, node, path = ProposalBuilder(), ROOT, context
    while len(builder) < 3 and max(table(path)) >= Fraction(1, 2):
        row = table(path)
        token = draws.choose(row)
        (node,) = builder.add(node, (token,), row)
        path = (*path, token)
    return builder.build()


def no_draft(context, table, draws):
    return Proposal.empty()


CHAINS = {
    "no draft": no_draft,
    "sampled chain 1": sampled_tree(1),
    "sampled chain 2": sampled_tree(1, 1),
    "sampled chain 3": sampled_tree(1, 1, 1),
    "point-mass chain": fixed_tree((2, 2), (-1, 0)),
    "arg-max chain": top_tree(1, 1, 1),
    "sampled then fixed": sampled_then_fixed,
    "stop after an unlikely token": stop_after_unlikely,
    "stop before a flat row": stop_before_flat,
}
TREES = {
    "point-mass tree": fixed_tree((0, 2, 1, 0, 1), (-1, -1, 0, 1, 1)),
    "all three as point masses": fixed_tree((2, 0, 1), (-1, -1, -1)),
    "top-2 tree": top_tree(2, 2),
    "siblings 2": sampled_tree(2),
    "siblings 3": sampled_tree(3),
    "sampled tree 2x2": sampled_tree(2, 2),
    "mixed tree": mixed_tree,
}
LARGE = ("sampled tree 2x2", "mixed tree", "sampled chain 3")


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("drafter", {**CHAINS, **TREES})
def test_standard_has_the_targets_law(drafter, tables):
    target, draft = TABLES[tables]
    decoding = Decoding(Standard(), {**CHAINS, **TREES}[drafter], target, draft)
    law = decoding.first_step_law() if drafter in LARGE else decoding.law()
    assert total_variation(law, target_law(target)) == 0


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("drafter", CHAINS)
def test_block_has_the_targets_law(drafter, tables):
    target, draft = TABLES[tables]
    assert total_variation(Decoding(Block(), CHAINS[drafter], target, draft).law(), target_law(target)) == 0


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("drafter", CHAINS)
def test_block_accepts_at_least_as_much_as_standard(drafter, tables):
    target, draft = TABLES[tables]
    block, standard = (Decoding(rule, CHAINS[drafter], target, draft) for rule in (Block(), Standard()))
    assert block.mean_step_length() >= standard.mean_step_length()


@pytest.mark.parametrize("length", [2, 3])
def test_block_accepts_more_than_standard_somewhere(length):
    drafter = sampled_tree(*[1] * length)
    block, standard = (Decoding(rule, drafter, *TABLES["random"]) for rule in (Block(), Standard()))
    assert block.mean_step_length() > standard.mean_step_length()


def test_acceptance_of_one_sampled_token_is_one_minus_tv():
    target, draft = TABLES["random"]
    accepted = Decoding(Standard(), sampled_tree(1), target, draft).mean_step_length() - 1
    assert accepted == 1 - sum(abs(target(()) - draft(()))) / 2


@pytest.mark.parametrize("rule", [Standard(), Block()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("drafter", ["sampled chain 2", "arg-max chain", "siblings 3", "mixed tree", "top-2 tree"])
@pytest.mark.parametrize("tables", TABLES)
def test_float64_rows_have_the_same_law(rule, drafter, tables):
    """The same code on torch rows: off by rounding alone."""
    if rule.name == "block" and drafter in TREES:
        return
    target, draft = TABLES[tables]

    def rows(table):
        return lambda context: torch.tensor([float(x) for x in table(context)], dtype=torch.float64) * 0.7

    in_floats = Decoding(rule, {**CHAINS, **TREES}[drafter], rows(target), rows(draft))
    law = {}
    for tokens, share in in_floats.step_law(()).items():  # the target goes on alone, in fractions
        for rest, probability in target_law(lambda c, done=tokens: target(done + c), LENGTH).items():
            longer = (tokens + rest)[:LENGTH]
            law[longer] = law.get(longer, 0) + share * probability
    assert total_variation(law, target_law(target)) < 1e-14


# Controls: ways of being subtly wrong. Each must be caught.


def argmax_with_soft_row(context, table, draws):
    builder, node, path = ProposalBuilder(), ROOT, context
    for _ in range(2):
        row = table(path)
        token = int(row.argmax())
        (node,) = builder.add(node, (token,), row)
        path = (*path, token)
    return builder.build()


def dropped_when_unlikely(context, table, draws):
    """Draws a token, then drops it because it looks unlikely, and hides that."""
    builder, node, path = ProposalBuilder(), ROOT, context
    while len(builder) < 2:
        row = table(path)
        token = draws.choose(row)
        if row[token] < Fraction(1, 3):
            break
        (node,) = builder.add(node, (token,), row)
        path = (*path, token)
    return builder.build()


def pruned_siblings(drawn, kept, honest):
    def draft(context, table, draws):
        row = table(context)
        proposal = sampled_tree(drawn)(context, table, draws)
        best = sorted(range(len(proposal)), key=lambda node: -row[proposal.tokens[node]])[:kept]
        return replace(proposal.prune(best), pruned=honest)

    return draft


def other_temperature(context, table, draws):
    """Samples from q² but reports q."""
    row = table(context)
    return Proposal.chain([draws.choose(row * row)], (row,))


def reordered_siblings(context, table, draws):
    """Draws three, then tries them likeliest first."""
    row = table(context)
    tokens = sorted(without_replacement(row, 3, draws), key=lambda token: -row[token])
    return Proposal(tuple(tokens), (-1,) * len(tokens), DenseDraftProbs((-1,), (row,)))


BIASED = {
    "arg-max draft with a soft row": argmax_with_soft_row,
    "unlikely token dropped": dropped_when_unlikely,
    "best 2 of 3 sampled": pruned_siblings(3, 2, honest=False),
    "best 1 of 2 sampled": pruned_siblings(2, 1, honest=False),
    "sampled at another temperature": other_temperature,
    "sampled siblings re-ranked": reordered_siblings,
}


@pytest.mark.parametrize("drafter", BIASED)
def test_biased_drafts_are_caught(drafter):
    target, draft = TABLES["random"]
    law = Decoding(Standard(), BIASED[drafter], target, draft).law()
    assert sum(law.values()) == 1
    assert total_variation(law, target_law(target)) > Fraction(1, 200)


@pytest.mark.parametrize("drafter", ["arg-max draft with a soft row", "unlikely token dropped"])
def test_biased_drafts_are_caught_under_block(drafter):
    target, draft = TABLES["random"]
    law = Decoding(Block(), BIASED[drafter], target, draft).law()
    assert total_variation(law, target_law(target)) > Fraction(1, 200)


def test_one_uniform_for_all_positions_is_caught():
    target, draft = TABLES["random"]
    drafter = sampled_tree(1, 1)

    def fresh_choices(context, table, draws):  # only the verifier's numbers are shared
        return drafter(context, table, draws)

    law = Decoding(Standard(), fresh_choices, target, draft, draws=SharedUniformDraws).law()
    assert sum(law.values()) == 1
    assert total_variation(law, target_law(target)) > Fraction(1, 1000)


def test_bonus_from_raw_logits_is_caught():
    """The bonus drawn from p² (another temperature) while the drafts were checked against p."""
    target, draft = TABLES["random"]

    def squared(context):
        return target(context) * target(context)

    law = Decoding(Standard(), sampled_tree(1, 1), target, draft, bonus=squared).law()
    assert total_variation(law, target_law(target)) > Fraction(1, 100)


def test_correction_drawn_from_p_is_caught(monkeypatch):
    target, draft = TABLES["random"]
    monkeypatch.setattr(verify, "residual", lambda p, q: p)
    for rule in (Standard(), Block()):
        law = Decoding(rule, sampled_tree(1, 1), target, draft).law()
        assert total_variation(law, target_law(target)) > Fraction(1, 100)


def test_typical_is_lossy_and_says_so():
    assert not Typical().lossless
    target = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)

    def step(draws):
        proposal = Proposal.chain([1])
        return Typical().verify(proposal, lambda node: target, verify.Randomness(None, draws)).tokens(proposal)[:1]

    assert enumerate_law(step)[(1,)] == 1  # the draft always stands, though p = 0.3


@pytest.mark.parametrize("rule", [Standard(), Block()], ids=lambda rule: rule.name)
def test_pruned_samples_are_refused(rule):
    decoding = Decoding(rule, pruned_siblings(2, 1, honest=True), *TABLES["random"])
    with pytest.raises(PacelineError, match="pruned"):
        decoding.law()


def test_block_refuses_a_tree():
    with pytest.raises(PacelineError, match="takes chains"):
        Decoding(Block(), top_tree(2), *TABLES["random"]).law()
