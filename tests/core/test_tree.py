"""Tree shapes, against definitions written out naively."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import tree
from paceline.core.proposal import DenseDraftProbs, Proposal, ProposalBuilder, SparseDraftProbs, Verdict

parent_lists = st.lists(st.integers(0, 10**6), max_size=24).map(
    lambda numbers: tuple(number % (i + 1) - 1 for i, number in enumerate(numbers))
)


def ancestors(parents, node):
    return [] if node == -1 else [*ancestors(parents, parents[node]), node]


@given(parent_lists)
def test_paths_depths_and_mask_agree(parents):
    tree.check_parents(parents)
    paths = [ancestors(parents, node) for node in range(len(parents))]
    assert [list(tree.path_to(parents, node)) for node in range(len(parents))] == paths
    assert [list(path) for path in tree.ancestor_lists(parents)] == paths
    assert list(tree.depths(parents)) == [len(path) for path in paths]
    mask = tree.ancestor_mask(parents)
    assert mask.shape == (len(parents), len(parents)) and mask.dtype == torch.bool
    assert [row.nonzero().flatten().tolist() for row in mask] == paths


@given(parent_lists)
def test_children_partition_the_nodes_in_order(parents):
    children = tree.children_of(parents)
    assert sorted(node for nodes in children.values() for node in nodes) == list(range(len(parents)))
    for parent, nodes in children.items():
        assert list(nodes) == [node for node in range(len(parents)) if parents[node] == parent]
    assert tree.leaves(parents) == tuple(n for n in range(len(parents)) if n not in children)
    chain = all(len(nodes) == 1 for nodes in children.values()) and len(tree.leaves(parents)) <= 1
    assert tree.is_chain(parents) == chain


@given(parent_lists, st.data())
def test_pruned_trees_keep_the_paths_of_their_nodes(parents, data):
    tokens = tuple(range(100, 100 + len(parents)))  # all different, so that a token names a node
    proposal = Proposal(tokens, parents)
    wanted = data.draw(st.sets(st.sampled_from(range(len(parents))))) if parents else set()
    keep = {above for node in wanted for above in ancestors(parents, node)}
    assert tree.closed_under_parents(parents, keep)
    pruned = proposal.prune(keep)
    assert set(pruned.tokens) == {tokens[node] for node in keep}
    for node, token in enumerate(pruned.tokens):
        assert pruned.path_tokens(node) == proposal.path_tokens(tokens.index(token))
    assert not pruned.pruned  # nothing was sampled


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1), (-1, 5)])
def test_impossible_parents_are_refused(parents):
    with pytest.raises(ValueError, match="parent"):
        Proposal((7,) * len(parents), parents)


def test_root_has_an_empty_path():
    assert tree.path_to((-1, 0), -1) == ()


# Proposals


def test_chain_and_empty():
    chain = Proposal.chain([5, 5, 7])
    assert chain.parents == (-1, 0, 1) and chain.is_chain and chain.depth == 3 and len(chain) == 3
    assert chain.draft_row(0) is None
    empty = Proposal.empty()
    assert empty.is_chain and empty.depth == 0 and empty.children(-1) == () and len(empty) == 0


def test_scratch_nodes_are_forwarded_but_not_verified():
    """Lookahead: a chain, then window rows that hang under it and may repeat tokens."""
    proposal = Proposal((1, 2, 2, 2, 9), (-1, 0, 0, 0, 2), num_scratch=3)
    assert proposal.num_verified == 2 and proposal.is_chain and proposal.depth == 2
    assert proposal.children(0) == (1,) and proposal.children(2) == ()
    assert proposal.child_with(0, 2) == 1
    assert proposal.path_tokens(4) == (1, 2, 9)
    assert proposal.prune([0, 2]).num_scratch == 1


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"tokens": (1, 2), "parents": (-1,)}, "2 tokens but 1 parents"),
        ({"tokens": (1, -2), "parents": (-1, 0)}, "negative"),
        ({"tokens": (3, 3), "parents": (-1, -1)}, "same token"),
        ({"tokens": (3,), "parents": (-1,), "num_scratch": 2}, "scratch"),
        ({"tokens": (3,), "parents": (-1,), "num_scratch": -1}, "scratch"),
        ({"tokens": (3,), "parents": (-1,), "hidden": torch.zeros(3, 4)}, "hidden"),
        ({"tokens": (3, 4), "parents": (-1, -1), "hidden": torch.zeros(2, 4)}, "hidden states of a tree"),
        (
            {"tokens": (3,), "parents": (-1,), "draft_probs": DenseDraftProbs((1,), torch.ones(1, 4))},
            "draft_probs",
        ),
    ],
)
def test_broken_invariants_are_refused(fields, fault):
    with pytest.raises(ValueError, match=fault):
        Proposal(**fields)


def test_one_draft_row_for_each_parent():
    with pytest.raises(ValueError, match="one row for each parent"):
        DenseDraftProbs((-1, 0), torch.ones(1, 4))
    with pytest.raises(ValueError, match="one row for each parent"):
        DenseDraftProbs((0, 0), torch.ones(2, 4))


def test_sparse_rows_equal_dense_ones():
    sparse = SparseDraftProbs((-1, 1), torch.tensor([[3, 0], [1, 2]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]]), 5)
    assert sparse.row(-1).tolist() == [0.25, 0, 0, 0.75, 0]
    assert sparse.row(1).tolist() == [0, 0.5, 0.5, 0, 0]
    proposal = Proposal((3, 0, 1, 2), (-1, -1, 1, 1), sparse)
    pruned = proposal.prune([1, 2, 3])
    assert pruned.pruned and pruned.draft_row(0).tolist() == [0, 0.5, 0.5, 0, 0]
    with pytest.raises(ValueError, match="ids"):
        SparseDraftProbs((0,), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 3), 5)


def test_pruning_sampled_nodes_is_remembered_and_rows_move_along():
    rows = torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5]])
    proposal = Proposal((0, 1, 2), (-1, -1, 1), DenseDraftProbs((-1, 1), rows))
    pruned = proposal.prune({1, 2})
    assert (pruned.tokens, pruned.parents, pruned.pruned) == ((1, 2), (-1, 0), True)
    assert pruned.draft_row(0).tolist() == [0, 0.5, 0.5]
    assert proposal.prune(range(3)) is proposal
    assert pruned.prune([0]).pruned
    with pytest.raises(ValueError, match="loses its parent"):
        proposal.prune([2])


def test_hidden_states_are_of_the_first_rows():
    """Root and nodes in order: pruning a chain keeps its beginning, so theirs."""
    proposal = Proposal.chain([5, 6, 7], hidden=torch.arange(3.0)[:, None])
    assert proposal.prune([0]).hidden.flatten().tolist() == [0, 1]
    assert proposal.prune([0, 1]).hidden.flatten().tolist() == [0, 1, 2]
    assert Proposal((), (), hidden=torch.zeros(1, 4)).hidden.shape == (1, 4)


def test_builder_keeps_draw_order_and_rows():
    builder = ProposalBuilder()
    row = torch.tensor([0.1, 0.2, 0.7])
    first = builder.add(-1, [2, 0], row)
    assert list(builder.add(first[1], [1])) == [2]
    assert list(builder.add(first[0], [])) == []
    proposal = builder.build()
    assert proposal == Proposal((2, 0, 1), (-1, -1, 1), proposal.draft_probs)
    assert proposal.draft_row(-1) is row and proposal.draft_row(1) is None
    with pytest.raises(ValueError, match="already has children"):
        builder.add(1, [2])


def test_builder_without_rows_makes_point_masses():
    builder = ProposalBuilder()
    builder.add(-1, [4])
    assert builder.build().draft_probs is None
    assert ProposalBuilder().build() == Proposal.empty()


def test_verdict_tokens_in_order():
    assert Verdict((0, 2), 9).tokens(Proposal((5, 6, 7), (-1, -1, 0))) == (5, 7, 9)
    assert Verdict((), 9).tokens(Proposal.empty()) == (9,)
