"""Ctrl-C at any moment: what was not struck goes on unmoved, and nothing shown is lost or shown twice."""

import contextlib
import itertools
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import tiny
import torch
from engine.running import Run, make_engine, plain, run, seeded

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engine import scheduler
from paceline.models.decoder import Decoder, ForwardOutput

PROMPTS = [tiny.prompt(20 + 7 * number, seed=number) for number in range(4)]


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny.tiny_decoder("llama", dtype=torch.bfloat16)


@pytest.mark.parametrize("where", ["_verify", "_prefill"])
@pytest.mark.parametrize("strike", [1, 2, 4])
def test_an_interruption_after_the_pass_costs_nothing(
    target: Decoder, where: str, strike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a pass's results are taken in: everyone gets all, and nothing is shown twice."""
    engine = make_engine(target, {"itself": DraftModelDrafter(target, 20_000)})
    numbers = [engine.add_request(prompt, seeded(seed=2)) for prompt in PROMPTS]
    inner, calls = getattr(engine, where), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(calls) == strike:
            raise KeyboardInterrupt
        return inner(*args)

    monkeypatch.setattr(engine, where, interrupted)
    result = Run()
    while engine.has_unfinished:
        with contextlib.suppress(KeyboardInterrupt):
            result.take(engine.step())
    result.check_streams()
    assert next(calls) > strike
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        assert result.ids(number) == plain(target, prompt, seeded(seed=2))
    assert engine.pool.blocks_in_use == 0


@pytest.mark.parametrize("strike", range(1, 5))
def test_choices_survive_an_interrupted_pass(target: Decoder, strike: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt without rows forks in the very step that admits it: an interruption there must not let it run ahead."""
    params = seeded(seed=4, n=3, max_tokens=8)
    reference = make_engine(target)
    wanted = [reference.add_request(prompt, params) for prompt in ([7], PROMPTS[0])]
    expected = run(reference)
    engine = make_engine(target)
    first = engine.add_request(PROMPTS[1], seeded(max_tokens=20))
    engine.step()
    numbers = [engine.add_request(prompt, params) for prompt in ([7], PROMPTS[0])]
    forward, calls = target.forward, itertools.count(1)

    def interrupted(*args: Any, **kwargs: Any) -> ForwardOutput:
        if next(calls) == strike:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    result = Run()
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", interrupted)
        while engine.has_unfinished:
            with contextlib.suppress(KeyboardInterrupt):
                result.take(engine.step())
    assert len(result.outputs) == 3
    assert first in result.outputs
    for mine, theirs in zip(numbers, wanted, strict=True):
        assert [result.ids(mine, i) for i in range(3)] == [expected.ids(theirs, i) for i in range(3)]
    assert engine.pool.blocks_in_use == 0


def test_an_interrupted_step_can_be_made_again(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a forward loses nothing."""
    engine = make_engine(target, {"itself": DraftModelDrafter(target, 20_000)})
    numbers = [engine.add_request(prompt, seeded(seed=2)) for prompt in PROMPTS]
    forward, calls = target.forward, [0]

    def interrupted(*args: Any, **kwargs: Any) -> ForwardOutput:
        calls[0] += 1
        out = forward(*args, **kwargs)
        if calls[0] % 3 == 0:
            raise KeyboardInterrupt
        return out

    result = Run()
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", interrupted)
        while engine.has_unfinished:
            with contextlib.suppress(KeyboardInterrupt):
                result.take(engine.step())
            if calls[0] > 40:
                break
    while engine.has_unfinished:
        result.take(engine.step())
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        assert result.ids(number) == plain(target, prompt, seeded(seed=2))


class Strike:
    """Ctrl-C when a line of the scheduler is about to run for the first time; without one, it notes which do."""

    def __init__(self, line: int | None = None) -> None:
        self.line = line
        self.seen: dict[int, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != scheduler.__file__:
            return None
        if event == "line" and frame.f_lineno not in self.seen:
            self.seen[frame.f_lineno] = frame.f_code.co_name
            if frame.f_lineno == self.line:
                raise KeyboardInterrupt
        return self


def test_no_line_of_the_scheduler_loses_a_request(target: Decoder) -> None:
    """With requests that are admitted behind a found prefix, forked, and put back; drafts stay all right, too."""
    drafter = DraftModelDrafter(target, 20_000)
    prefix, params = tiny.prompt(64, seed=9), seeded(seed=4, max_tokens=8)
    prompts = [[*prefix, 1, 2], [*prefix, *tiny.prompt(62, seed=2)]]
    answers = [plain(target, prompt, params) for prompt in prompts]

    def attempt(strike: Strike) -> None:
        engine = make_engine(target, {"itself": drafter}, num_kv_blocks=4, max_num_seqs=3, prefix_cache_blocks=1)
        engine.add_request([*prefix, 5], seeded(seed=1, max_tokens=1))
        run(engine)
        numbers = [engine.add_request(prompts[0], replace(params, n=2)), engine.add_request(prompts[1], params)]
        result, previous = Run(), sys.gettrace()
        sys.settrace(strike)
        try:
            for _ in range(40):
                if not engine.has_unfinished:
                    break
                with contextlib.suppress(KeyboardInterrupt):
                    result.take(engine.step())
        finally:
            sys.settrace(previous)
        assert not engine.has_unfinished, f"line {strike.line}"
        assert [result.ids(number) for number in numbers] == answers
        for number in numbers:
            assert result.outputs[number].metrics.queued_s is not None
            assert result.outputs[number].metrics.speculation.draft_acceptance_rate == 1
        assert not engine.speculation.faults
        engine.reset_prefix_cache()
        assert engine.pool.blocks_in_use == 0

    clean = Strike()
    attempt(clean)
    assert {"schedule", "_turn", "_admit", "_put_back", "_free_up"} <= set(clean.seen.values())
    for line in clean.seen:
        attempt(Strike(line))
