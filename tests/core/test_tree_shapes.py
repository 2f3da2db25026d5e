"""Shapes of trees: Sequoia's dynamic program agrees, growth keeps its rules."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from exact_law import Decoding, random_table, target_law, total_variation
from torch import Tensor

from paceline.core.drafting import CoupledDrafts, DraftSampler, Draw, SampledDrafts, TopDrafts
from paceline.core.growth import Growth
from paceline.core.params import SamplingParams
from paceline.core.path import PathSampler
from paceline.core.proposal import Proposal
from paceline.core.rng import CounterNoise, GeneratorDraws, without_replacement
from paceline.core.tree_shapes import EAGLE_TREE, MEDUSA_TREE, DynamicTree, StaticTree, TreeShape, optimal_tree
from paceline.core.verify import Standard
from paceline.errors import PacelineError

VOCAB = 12


def sequoia(p: Sequence[float], nodes: int, depth: int) -> float:
    """Best expected tokens of a tree of `nodes` nodes besides the root (2402.12374, §4.1)."""

    @cache
    def best(m: int, levels: int, children: int) -> float:
        if m == 1 and children == 0:
            return 1.0
        if m < 1 + children or children == 0 or levels == 0:
            return -math.inf
        last = p[children - 1]
        return max(best(m - y, levels, children - 1) + last * any_width(y, levels - 1) for y in range(1, m))

    @cache
    def any_width(m: int, levels: int) -> float:
        return max(best(m, levels, children) for children in range(len(p) + 1))

    return max(any_width(m, depth) for m in range(1, nodes + 2))


def worth(tree: StaticTree, p: Sequence[float]) -> float:
    return 1 + sum(math.prod(p[rank] for rank in path) for path in tree.paths)


def test_the_optimal_tree_is_sequoias() -> None:
    generator = random.Random(0)
    cases = [[0.6, 0.2, 0.08, 0.04, 0.02, 0.01]]
    cases += [sorted((generator.random() / 3 for _ in range(generator.randint(1, 4))), reverse=True) for _ in range(8)]
    for p in cases:
        for nodes in (1, 2, 5, 9, 16):
            for depth in (1, 2, 4, 16):
                tree = optimal_tree([p] * depth, nodes)
                assert tree.depth <= depth and len(tree.paths) <= nodes
                assert tree == StaticTree.of(tree.paths)
                assert worth(tree, p) == pytest.approx(sequoia(tuple(p), nodes, depth))


def test_published_gains() -> None:
    """methods.md's table: expected tokens at p = (.6, .2, …); its node counts have the root."""
    p = [0.6, 0.2, 0.08, 0.04, 0.02, 0.01]
    for nodes, tokens in ((2, 1.60), (4, 2.18), (8, 2.75), (16, 3.26), (32, 3.78), (64, 4.30)):
        assert worth(optimal_tree([p] * nodes, nodes - 1), p) == pytest.approx(tokens, abs=0.006)


def test_acceptance_by_head_and_rank() -> None:
    """Medusa's heads get worse with depth; a rank that measured better than the one before it does not go first."""
    assert optimal_tree([[0.5, 0.2], [0.3]], 9).paths == ((0,), (1,), (0, 0), (1, 0))
    assert optimal_tree([[0.2, 0.5]], 1).paths == ((0,),)
    assert optimal_tree([], 3).paths == ()
    with pytest.raises(PacelineError, match=r"an acceptance is 1\.5"):
        optimal_tree([[1.5]], 3)


def test_static_trees_are_ordered_and_checked() -> None:
    assert StaticTree.of([[1, 0], [1], [0]]).paths == ((0,), (1,), (1, 0))
    assert StaticTree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    for tree in (MEDUSA_TREE, EAGLE_TREE):
        for count in range(len(tree.paths)):
            assert StaticTree.of(tree.first(count).paths).paths == tree.paths[:count]
    assert EAGLE_TREE.paths == tuple(sorted(EAGLE_TREE.paths, key=lambda path: (-round(worth_of(path), 9), path)))
    with pytest.raises(PacelineError, match=r"the draft tree has \[0, 1\] but not \[0, 0\]"):
        StaticTree.of([[0], [0, 1]])
    with pytest.raises(PacelineError, match=r"the draft tree has \[2, 0\] but not \[2\]"):
        StaticTree.of([[0], [1], [2, 0]])


def worth_of(path: Sequence[int]) -> float:
    return math.prod((0.6, 0.2, 0.08, 0.04)[rank] for rank in path)


def sampler(kind: str, seed: int = 0) -> DraftSampler:
    params = SamplingParams(temperature=0.0 if kind == "top" else 1.0)
    path = PathSampler.start(params, [1], VOCAB, CounterNoise(seed))
    match kind:
        case "top":
            return TopDrafts(path)
        case "coupled":
            return CoupledDrafts(path)
    return SampledDrafts(path, GeneratorDraws(seed, stream="draft"))


def logits_after(path: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**40)
    return 2 * torch.randn(VOCAB, generator=generator)


def path_of(growth: Growth, node: int) -> tuple[int, ...]:
    nodes = growth.nodes
    return () if node < 0 else (*path_of(growth, nodes.parents[node]), nodes.tokens[node])


def grown(growth: Growth, seed: int) -> Proposal:
    while growth.frontier:
        growth.grow([logits_after(path_of(growth, node), seed) for node in growth.frontier])
    return growth.proposal()


@pytest.mark.parametrize("kind", ["top", "coupled", "sampled"])
@pytest.mark.parametrize("budget", [0, 1, 7, 20, 60])
def test_trees_are_valid_and_within_budget(kind: str, budget: int) -> None:
    for seed in range(5):
        for shape in (StaticTree.chain(4), EAGLE_TREE, DynamicTree(3, 4, EAGLE_TREE), DynamicTree(11, 2, EAGLE_TREE)):
            proposal = grown(shape.growth(sampler(kind, seed), budget), seed)  # Proposal checks parents and siblings
            assert len(proposal) <= budget and not proposal.pruned
            assert (len(proposal) > 0) == (budget > 0)
            if isinstance(shape, StaticTree):
                assert sorted(map(len, map(proposal.path_tokens, range(len(proposal))))) == sorted(
                    map(len, shape.first(budget).paths)
                )
            sampled_from = () if proposal.draft_probs is None else proposal.draft_probs.parents
            inner = set(proposal.parents)
            assert set(sampled_from) == (inner if kind == "sampled" else set())


def test_a_dynamic_tree_holds_the_likeliest_paths() -> None:
    """Against all paths of the vocabulary: with as wide a beam as that, the best of all are found (2406.16858)."""
    for seed in range(5):
        scores: dict[tuple[int, ...], float] = {}

        def score(path: tuple[int, ...], above: float, seed: int = seed, scores: dict = scores) -> None:
            for token, logp in enumerate(logits_after(path, seed).double().log_softmax(0).tolist()):
                scores[(*path, token)] = above + logp
                if len(path) < 2:
                    score((*path, token), above + logp)

        score((), 0.0)
        best = sorted(scores, key=lambda path: -scores[path])[:15]
        proposal = grown(DynamicTree(VOCAB, 3).growth(sampler("top"), 15), seed)
        assert {proposal.path_tokens(node) for node in range(15)} == set(best)


def test_coupled_trees_follow_the_race_and_not_the_draft() -> None:
    """The winner of the race ahead is what the target takes if it agrees; one node is that one, whatever its q."""
    for seed in range(200):
        (token,) = grown(DynamicTree(5, 3).growth(sampler("coupled", seed), 1), seed).tokens
        assert (token,) == sampler("coupled", seed).draw(logits_after((), seed)).tokens
        scores = sampler("coupled", seed).scored(logits_after((), seed), VOCAB).scores
        assert list(scores) == sorted(scores, reverse=True)
        assert sum(map(math.exp, scores)) == pytest.approx(1)


# The law of `standard` with trees grown by these shapes, exact


@dataclass
class ExactSampler:
    """Samples fractions from a table without replacement, as `SampledDrafts` does with floats."""

    draws: Any
    prunable = False

    def draw(self, row: Any, k: int = 1) -> Draw:
        return Draw(tuple(without_replacement(row, k, self.draws)), row)

    def advance(self, *tokens: int) -> "ExactSampler":
        return self


def drafting(shape: TreeShape, budget: int) -> Callable[..., Proposal]:
    def draft(context: tuple[int, ...], table: Any, draws: Any) -> Proposal:
        growth = shape.growth(ExactSampler(draws), budget)  # type: ignore[arg-type]
        while growth.frontier:
            growth.grow([table((*context, *path_of(growth, node))) for node in growth.frontier])
        return growth.proposal()

    return draft


UNEVEN = StaticTree.of([[0], [1], [0, 0], [1, 0], [1, 1]])


@pytest.mark.parametrize("budget", [1, 2, 4, 5])
@pytest.mark.parametrize("shape", [UNEVEN, DynamicTree(2, 2, unpruned=UNEVEN)], ids=["static", "dynamic"])
def test_sampled_trees_keep_the_targets_law(shape: TreeShape, budget: int) -> None:
    target, draft = random_table(1), random_table(2)
    law = Decoding(Standard(), drafting(shape, budget), target, draft).first_step_law()
    assert total_variation(law, target_law(target)) == 0


def test_sampled_trees_that_are_pruned_do_not() -> None:
    """The control: of the root's two children only the one that the draft thinks likelier is kept, undeclared."""
    target, draft = random_table(1), random_table(2)
    whole = drafting(StaticTree.of([[0], [1]]), 2)

    def pruned(context: tuple[int, ...], table: Any, draws: Any) -> Proposal:
        proposal = whole(context, table, draws)
        best = max(range(len(proposal)), key=lambda node: table(context)[proposal.tokens[node]])
        return replace(proposal.prune([best]), pruned=False)

    law = Decoding(Standard(), pruned, target, draft).first_step_law()
    assert total_variation(law, target_law(target)) > 0.01
