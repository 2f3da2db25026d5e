"""What every registered method must keep. The registry is the list of tests: a new method is in it by its line there.

The law of `standard` is that of `test_decode_law.py` for whatever proposals are handed over as they were drawn, which
is asserted here of every method.
"""

from dataclasses import replace

import pytest
import torch
from drafters.contract import (
    CASES,
    DRAFTING,
    FAMILIES,
    GREEDY,
    SEEDED,
    VOCAB,
    Case,
    HandedOver,
    Pausing,
    Shelf,
    Stumbling,
    Wrapped,
    held,
    nothing_left,
    prompt_of,
    tokens_of,
)
from engine.running import make_engine, plain, run

from paceline.core.proposal import Proposal
from paceline.core.verify import RULES as KNOWN_RULES
from paceline.core.verify import make_rule
from paceline.decode import decode
from paceline.drafters.base import Drafter
from paceline.drafters.registry import METHODS, RULES
from paceline.engine.engine import Engine, RequestOptions
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder

PRIVATE = RequestOptions(private_drafts=True)  # what a request leaves in a pool for others is no state of its own
# Its window runs along in the target's passes, so what it drafts depends on how many there were.
DRAFTS_BY_PASSES = {"lookahead"}


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("contract"))


@pytest.fixture
def family() -> str:
    return "llama"


@pytest.fixture
def target(shelf: Shelf, family: str) -> Decoder:
    return shelf.target(family).decoder


@pytest.fixture
def drafter(shelf: Shelf, case: Case, family: str) -> Drafter:
    return shelf.drafter(case, family)


every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_drafting_case = pytest.mark.parametrize("case", DRAFTING, ids=str)


def engine_for(target: Decoder, drafter: Drafter, case: Case, **options: int) -> Engine:
    return make_engine(target, {"it": drafter}, num_draft_tokens=case.budget, **options)


@every_case
def test_the_loop_changes_no_token(target: Decoder, drafter: Drafter, case: Case) -> None:
    watched = Wrapped(drafter)
    for params, length in ((GREEDY, 1), (SEEDED, 40)):
        steps = list(decode(target, prompt_of(length), params, watched, case.budget, prefill_rows=25))
        assert tokens_of(steps) == plain(target, prompt_of(length), params)
    assert watched.num_rounds > 0


@pytest.mark.parametrize("family", FAMILIES)
@every_case
def test_the_engine_changes_no_token(target: Decoder, drafter: Drafter, case: Case) -> None:
    """Three together with unequal acceptance, beside one without speculation. Alone: the tests below."""
    asked = {}
    with nothing_left(drafter):
        engine = engine_for(target, Wrapped(drafter), case, max_num_batched_tokens=80)
        for length, params in ((61, SEEDED), (25, GREEDY), (70, SEEDED)):
            asked[engine.add_request(prompt_of(length), params, PRIVATE)] = length, params
        engine.add_request(prompt_of(5), GREEDY, RequestOptions(speculative=False))
        result = run(engine)
    for request_id, (length, params) in asked.items():
        assert result.ids(request_id) == plain(target, prompt_of(length), params)
    assert not engine.speculation.faults and engine.pool.blocks_in_use == 0
    first, *others = (result.outputs[i].metrics.speculation for i in asked)
    assert any(other != first for other in others) == (case.name != "none")


@every_drafting_case
def test_full_and_zero_acceptance(target: Decoder, drafter: Drafter, case: Case) -> None:
    """One token a draft: it is right or wrong."""
    outcomes: set[int] = set()
    for length in range(30, 60):
        steps = list(decode(target, prompt_of(length), GREEDY, drafter, 1))
        assert tokens_of(steps) == plain(target, prompt_of(length), GREEDY)
        outcomes |= {step.num_accepted_tokens for step in steps if step.num_draft_tokens}
        if outcomes == {0, 1}:
            return
    raise AssertionError(f"of all drafts so many were right: {outcomes}")


@pytest.mark.parametrize("rule", [name for name, rule in KNOWN_RULES.items() if rule.lossless and name != "coupled"])
@every_case
def test_a_lossless_rule_is_kept_or_refused(target: Decoder, drafter: Drafter, case: Case, rule: str) -> None:
    """Kept: greedy tokens are plain decoding's, and sampled drafts are handed over as they were drawn."""
    engine = engine_for(target, drafter, case)
    options = RequestOptions(rule=rule)
    if rule not in RULES[case.shape]:
        with pytest.raises(PacelineError, match="takes chains"):
            next(decode(target, prompt_of(9), GREEDY, drafter, case.budget, rule=make_rule(rule)))
        with pytest.raises(PacelineError, match="takes chains"):
            engine.add_request(prompt_of(9), GREEDY, options)
        return
    number = engine.add_request(prompt_of(40), GREEDY, options)
    assert run(engine).ids(number) == plain(target, prompt_of(40), GREEDY)
    watched = HandedOver(drafter)
    steps = list(decode(target, prompt_of(40), SEEDED, watched, case.budget, rule=make_rule(rule)))
    assert len(tokens_of(steps)) == SEEDED.max_tokens
    assert not engine.speculation.faults


def test_a_draft_that_is_not_handed_over_whole_is_seen(shelf: Shelf, target: Decoder) -> None:
    """The control: a sampled token is dropped, or another row goes along."""
    drafter = shelf.drafter(Case("draft_model", "chain"), "llama")

    class Dropping(Wrapped):
        def drafts(self, sequences, budgets):  # type: ignore[no-untyped-def]
            (whole,) = super().drafts(sequences, budgets)
            return [Proposal.chain(whole.tokens[:-1], [whole.draft_row(i - 1) for i in range(len(whole) - 1)])]

    class Flat(Wrapped):
        def drafts(self, sequences, budgets):  # type: ignore[no-untyped-def]
            (whole,) = super().drafts(sequences, budgets)
            return [Proposal.chain(whole.tokens, [torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)] * len(whole))]

    for faulty in (Dropping, Flat):
        with pytest.raises(AssertionError):
            list(decode(target, prompt_of(40), SEEDED, HandedOver(faulty(drafter)), 4, rule=make_rule("standard")))


@every_drafting_case
def test_it_pauses_and_is_back_at_once(shelf: Shelf, target: Decoder, case: Case, family: str) -> None:
    """And its drafts have the shape that the registry says."""
    params = replace(GREEDY, max_tokens=30)
    steady, pausing = (Pausing(shelf.drafter(case, family), every) for every in (1, 3))
    for drafter in (steady, pausing):
        steps = list(decode(target, prompt_of(45), params, drafter, case.budget))
        assert tokens_of(steps) == plain(target, prompt_of(45), params)
    common = {at for at in steady.drafted.keys() & pausing.drafted.keys() if case.name not in DRAFTS_BY_PASSES}
    assert {at: steady.drafted[at] for at in common} == {at: pausing.drafted[at] for at in common}
    assert any(len(draft) for draft in pausing.drafted.values())
    assert common or sum(step.num_accepted_tokens for step in steps) > 0
    assert steady.needs.trees == (case.shape == "tree")
    assert all(draft.is_chain for draft in steady.drafted.values()) == (case.shape == "chain")


@every_drafting_case
def test_a_prefix_hit_finds_it_ready(target: Decoder, drafter: Drafter, case: Case) -> None:
    """The second time it drafts as the first time; two choices go their own ways from there."""
    with nothing_left(drafter):
        engine = engine_for(target, drafter, case, prefix_cache_blocks=4)
        drafts = []
        for _ in range(2):
            number = engine.add_request(prompt_of(70), SEEDED, PRIVATE)
            output = run(engine).outputs[number]
            assert list(output.outputs[0].token_ids) == plain(target, prompt_of(70), SEEDED)
            drafts.append(output.metrics.speculation)
        assert output.usage.cached_tokens == 64
        assert drafts[0] == drafts[1] and drafts[0].num_draft_tokens > 0
        number = engine.add_request(prompt_of(70), replace(SEEDED, n=2), PRIVATE)
        result = run(engine)
        assert result.ids(number, 0) == plain(target, prompt_of(70), SEEDED) != result.ids(number, 1)
        engine.reset_prefix_cache()
    assert not engine.speculation.faults and engine.pool.blocks_in_use == 0


@every_drafting_case
def test_a_stop_inside_a_run_ends_it_there(target: Decoder, drafter: Drafter, case: Case) -> None:
    """A stop token that is accepted with another behind it."""
    for length in range(20, 50):
        steps = list(decode(target, prompt_of(length), GREEDY, drafter, case.budget))
        before: list[int] = []
        for step in steps:
            if len(step.token_ids) > 1 and step.token_ids[0] not in before:
                break
            before.extend(step.token_ids)
        else:
            continue
        params = replace(GREEDY, stop_token_ids=(step.token_ids[0],))
        expected = [*before, step.token_ids[0]]
        engine = engine_for(target, drafter, case)
        number = engine.add_request(prompt_of(length), params)
        assert tokens_of(list(decode(target, prompt_of(length), params, drafter, case.budget))) == expected
        assert run(engine).ids(number) == expected == plain(target, prompt_of(length), params)
        return
    raise AssertionError("no prompt has a run of two tokens, the first of them new")


@every_drafting_case
def test_an_exception_in_mid_draft_leaves_it_as_it_was(shelf: Shelf, target: Decoder, case: Case, family: str) -> None:
    """Asked again, it drafts what it would have drafted."""
    statistics = []
    for wrapper in (Wrapped, Stumbling):
        drafter = shelf.drafter(case, family)
        with nothing_left(drafter):
            engine = engine_for(target, watched := wrapper(drafter), case)
            numbers = [engine.add_request(prompt_of(length), SEEDED, PRIVATE) for length in (40, 33)]
            result = run(engine)
        assert [result.ids(n) for n in numbers] == [plain(target, prompt_of(length), SEEDED) for length in (40, 33)]
        assert not engine.speculation.faults and engine.pool.blocks_in_use == 0
        statistics.append([result.outputs[n].metrics.speculation for n in numbers])
    assert isinstance(watched, Stumbling) and watched.num_stumbles > 2
    assert statistics[0] == statistics[1]


def test_every_method_of_the_registry_is_here() -> None:
    assert {case.name for case in CASES} >= set(METHODS)


def test_what_is_held_is_counted(shelf: Shelf) -> None:
    """The count that `nothing_left` goes by sees a request's state."""
    for case in DRAFTING:
        drafter = shelf.drafter(case, "llama")
        target, before = shelf.target("llama").decoder, held(drafter)
        steps = decode(target, prompt_of(20), GREEDY, drafter, case.budget)
        next(steps)
        stateless = case.name in ("layer_skip", "early_exit")
        assert (held(drafter) > before) != stateless, case
        steps.close()
