"""What a method keeps between steps and requests serves it, and is gone when it should be."""

from dataclasses import replace

import pytest
from drafters.contract import (
    GREEDY,
    PRIVATE,
    SEEDED,
    Case,
    Target,
    every_drafting_case,
    longer,
    prompt_of,
    rounds,
)
from drafters.watching import Absent, Struck, Stumbling, Wrapped, held, nothing_left
from engine.running import plain, run

from paceline.drafters.base import Drafter
from paceline.drafters.registry import find


@every_drafting_case
def test_it_sits_out_and_is_back_at_once(target: Target, case: Case) -> None:
    """Where one that never sat out is right, one that did in the steps before drafts the same, and is as right.

    What lives on its own passes has missed some: of several such places it must know as much at one.
    """
    params = longer(GREEDY, 20)
    for length in range(45, 75):
        steady = Wrapped(target.drafter(case))
        always = rounds(target.decoder, prompt_of(length), params, steady, case.budget)
        off_from = [*always][1]
        at = next((at for at, step in always.items() if step.num_accepted_tokens and at >= off_from + 3), None)
        if at is None:
            continue
        absent = Absent(target.drafter(case), until=at)
        back = rounds(target.decoder, prompt_of(length), params, absent, case.budget)
        assert not any(back[off].num_draft_tokens for off in range(off_from, at))
        same = back[at].num_accepted_tokens == always[at].num_accepted_tokens
        # scratch nodes run along in the target's passes: what comes of them depends on how many there were
        by_passes = steady.needs.scratch_argmax
        assert (same and absent.drafted[at] == steady.drafted[at]) or by_passes
        if same:
            return
    raise AssertionError("it was never right, or not when it was back")


@every_drafting_case
def test_a_prefix_hit_finds_it_ready(target: Target, drafter: Drafter, case: Case) -> None:
    """The second time it drafts as the first time; two choices go their own ways from there."""
    expected = plain(target.decoder, prompt_of(70), SEEDED)
    with nothing_left(drafter):
        engine = target.engine(drafter, case, prefix_cache_blocks=4)
        drafts = []
        for _ in range(2):
            number = engine.add_request(prompt_of(70), SEEDED, PRIVATE)
            output = run(engine).outputs[number]
            assert list(output.outputs[0].token_ids) == expected
            drafts.append(output.metrics.speculation)
        assert output.usage.cached_tokens == 64
        assert drafts[0] == drafts[1] and drafts[0].num_draft_tokens > 0
        number = engine.add_request(prompt_of(70), replace(SEEDED, n=2), PRIVATE)
        result = run(engine)
        assert result.ids(number, 0) == expected != result.ids(number, 1)
        engine.reset_prefix_cache()
    assert not engine.speculation.faults and engine.pool.blocks_in_use == 0


@every_drafting_case
def test_a_choice_drafts_as_if_it_were_alone(target: Target, case: Case) -> None:
    """What its sibling goes through after they parted is not its own."""
    drafts = []
    for n in (1, 2):
        engine = target.engine(watched := Wrapped(target.drafter(case)), case)
        engine.add_request(prompt_of(40), replace(longer(SEEDED, 40), n=n), PRIVATE)
        run(engine)
        first = min(number for number, _ in watched.drafted_by)
        drafts.append({length: p.tokens for (number, length), p in watched.drafted_by.items() if number == first})
    assert drafts[0] == drafts[1] and any(drafts[0].values())


@every_drafting_case
def test_what_is_kept_outlasts_an_interruption(target: Target, case: Case) -> None:
    """Struck while another request drafts: a kept state is still its own when that request has run to its end."""
    drafter = Struck(target.drafter(case))
    with nothing_left(drafter.inner):
        engine = target.engine(drafter, case, prefix_cache_blocks=4)
        drafts = []
        for _ in range(2):
            number = engine.add_request(prompt_of(70), SEEDED, PRIVATE)
            output = run(engine).outputs[number]
            assert list(output.outputs[0].token_ids) == plain(target.decoder, prompt_of(70), SEEDED)
            drafts.append(output.metrics.speculation)
            if len(drafts) == 1:
                other = engine.add_request(prompt_of(100)[:63], SEEDED, PRIVATE)
                drafter.armed = True
                with pytest.raises(KeyboardInterrupt):
                    run(engine)
                assert run(engine).ids(other) == plain(target.decoder, prompt_of(100)[:63], SEEDED)
        assert output.usage.cached_tokens == 64
        assert drafts[0] == drafts[1]
        engine.reset_prefix_cache()
    assert not engine.speculation.faults and engine.pool.blocks_in_use == 0


@every_drafting_case
def test_an_exception_in_mid_draft_leaves_it_as_it_was(target: Target, case: Case) -> None:
    """Asked again, it drafts what it would have drafted."""
    statistics, params = [], longer(SEEDED, 14)
    for wrapper in (Wrapped, Stumbling):
        drafter = target.drafter(case)
        with nothing_left(drafter):
            engine = target.engine(watched := wrapper(drafter), case)
            numbers = [engine.add_request(prompt_of(length), params, PRIVATE) for length in (40, 33)]
            result = run(engine)
        expected = [plain(target.decoder, prompt_of(length), params) for length in (40, 33)]
        assert [result.ids(number) for number in numbers] == expected
        assert not engine.speculation.faults and engine.pool.blocks_in_use == 0
        statistics.append([result.outputs[number].metrics.speculation for number in numbers])
    assert isinstance(watched, Stumbling) and (watched.num_stumbles > 0 or watched.looks == 0)
    assert statistics[0] == statistics[1]


@every_drafting_case
def test_a_request_that_is_given_up_leaves_nothing(target: Target, drafter: Drafter, case: Case) -> None:
    """Cancelled in the midst of it; what is held until then is counted, and is nothing where the method says so."""
    before = held(drafter)
    with nothing_left(drafter):
        engine = target.engine(drafter, case)
        number = engine.add_request(prompt_of(40), longer(SEEDED, 60), PRIVATE)
        for _ in range(4):
            engine.step()
        assert (held(drafter) > before) == (not find(case.name).stateless)
        assert engine.cancel(number) is not None
    assert engine.pool.blocks_in_use == 0 and not engine.speculation.faults
