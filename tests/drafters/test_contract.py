"""Not one token changes, whichever registered method drafts, on two families. The registry is the list of tests.

What a method keeps between steps: `test_contract_state.py`. Other rules and their laws: `test_contract_law.py`. The
real 135M model: `test_contract_smollm2.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import pytest
from drafters.contract import (
    CASES,
    DRAFTING,
    GREEDY,
    PRIVATE,
    SEEDED,
    TREE,
    UNDECLARED,
    Case,
    Target,
    cases,
    every_case,
    every_drafting_case,
    longer,
    prompt_of,
    rounds,
    tokens_of,
)
from drafters.watching import Rationed, Wrapped, nothing_left
from engine.running import plain, run

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.core.tree import ROOT
from paceline.drafters.base import Drafter
from paceline.drafters.registry import METHODS, Method
from paceline.engine.engine import RequestOptions
from paceline.errors import PacelineError


@every_case
def test_the_loop_changes_no_token(target: Target, drafter: Drafter, case: Case) -> None:
    watched = Wrapped(drafter)
    for params, length in ((GREEDY, 1), (SEEDED, 40)):
        rounds(target.decoder, prompt_of(length), params, watched, case.budget, prefill_rows=25)
    assert watched.num_rounds > 0
    assert drafter.needs.trees == (case.shape == "tree")
    drafts = watched.drafted.values()
    assert all(draft.is_chain for draft in drafts) == (case.shape == "chain")


@every_case
def test_the_engine_changes_no_token(target: Target, drafter: Drafter, case: Case) -> None:
    """Three together with unequal budgets and acceptance, beside one without speculation; the last goes on alone."""
    rationed = Rationed(drafter)
    engine = target.engine(rationed, case, max_num_batched_tokens=80)
    for more in range(12):
        asked: dict[int, tuple[int, SamplingParams]] = {}
        with nothing_left(drafter):
            for length, params in ((61 + more, SEEDED), (25, GREEDY), (70 + more, longer(SEEDED, 22))):
                asked[engine.add_request(prompt_of(length), params, PRIVATE)] = length, params
            engine.add_request(prompt_of(5), GREEDY, RequestOptions(speculative=False))
            result = run(engine)
        for request_id, (length, params) in asked.items():
            assert result.ids(request_id) == plain(target.decoder, prompt_of(length), params)
        assert not engine.speculation.faults and engine.pool.blocks_in_use == 0
        if rationed.num_uneven or case not in DRAFTING:
            break
    assert {1, 3} <= rationed.batches
    assert (rationed.num_uneven > 0) == (case in DRAFTING)


@every_drafting_case
def test_full_and_zero_acceptance(target: Target, drafter: Drafter, case: Case) -> None:
    """Of drafts that are two levels deep or more: to a leaf, and nothing."""
    outcomes: set[str] = set()
    watched = Wrapped(drafter)
    for length, params in zip(range(30, 80), cycle((SEEDED, GREEDY)), strict=False):
        steps = rounds(target.decoder, prompt_of(length), params, watched, {"chain": 2, "tree": 7}[case.shape])
        for at, draft in watched.drafted.items():
            accepted = steps[at].token_ids[: steps[at].num_accepted_tokens]
            if draft.depth >= 2 and not accepted:
                outcomes.add("zero")
            if len(accepted) >= 2 and not draft.children(_last_node(draft, accepted)):
                outcomes.add("full")
        watched.drafted.clear()
        if len(outcomes) == 2:
            return
    raise AssertionError(f"of all drafts: {outcomes}")


def _last_node(draft: Proposal, path: Sequence[int]) -> int:
    node: int | None = ROOT
    for token in path:
        node = draft.child_with(node, token)
        assert node is not None
    return node


@every_drafting_case
def test_a_stop_inside_a_run_ends_it_there(target: Target, drafter: Drafter, case: Case) -> None:
    """A stop token that is accepted with another behind it."""
    for length in range(20, 50):
        steps = rounds(target.decoder, prompt_of(length), GREEDY, drafter, case.budget)
        before: list[int] = []
        for step in steps.values():
            if len(step.token_ids) > 1 and step.token_ids[0] not in before:
                break
            before.extend(step.token_ids)
        else:
            continue
        expected = [*before, step.token_ids[0]]
        params = replace(GREEDY, stop_token_ids=(step.token_ids[0],))
        stopped = rounds(target.decoder, prompt_of(length), params, drafter, case.budget)
        assert tokens_of([*stopped.values()]) == expected
        engine = target.engine(drafter, case)
        number = engine.add_request(prompt_of(length), params)
        assert run(engine).ids(number) == expected
        return
    raise AssertionError("no prompt has a run of two tokens, the first of them new")


@every_case
def test_without_a_budget_nothing_is_drafted(target: Target, drafter: Drafter, case: Case) -> None:
    steps = rounds(target.decoder, prompt_of(40), SEEDED, drafter, 0)
    assert not any(step.num_draft_tokens for step in steps.values())


@pytest.mark.parametrize("case", UNDECLARED, ids=str)
def test_a_shape_that_is_not_declared_is_refused(target: Target, case: Case) -> None:
    words = rf"'{case.name}' does not take speculative_token_tree|takes speculative_token_tree from '{case.name}'"
    with pytest.raises(PacelineError, match=words):
        target.drafter(case, speculative_token_tree=TREE[case.shape])


def test_a_new_method_is_found_and_must_bring_what_it_needs(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "new", Method("new:create", "", needs="head", shapes=("tree", "chain")))
    assert [case for case in cases() if case not in CASES] == [Case("new", "tree"), Case("new", "chain")]
    with pytest.raises(AssertionError, match="HEADS has no head for method 'new'"):
        target.drafter(Case("new", "tree"))
