"""Ctrl-C at any moment: what was not struck goes on unmoved, and nothing shown is lost or shown twice."""

import contextlib
import itertools
from typing import Any

import pytest
import tiny
import torch
from engine.running import Run, make_engine, plain, run, seeded

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.models.decoder import Decoder, ForwardOutput

PROMPTS = [tiny.prompt(20 + 7 * number, seed=number) for number in range(4)]


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny.tiny_decoder("llama", dtype=torch.bfloat16)


@pytest.mark.parametrize("where", ["_verify", "_prefill"])
@pytest.mark.parametrize("strike", [1, 2, 5, 9])
def test_an_interruption_after_the_pass_costs_one_request_at_most(
    target: Decoder, where: str, strike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a pass's results are taken in: who had theirs keeps it, nothing shown is lost or shown twice."""
    engine = make_engine(target, {"itself": DraftModelDrafter(target, 20_000)})
    numbers = [engine.add_request(prompt, seeded(seed=2)) for prompt in PROMPTS]
    inner, calls = getattr(engine, where), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(calls) == strike:
            raise KeyboardInterrupt
        return inner(*args)

    monkeypatch.setattr(engine, where, interrupted)
    result, struck = Run(), 0
    while engine.has_unfinished:
        try:
            result.take(engine.step())
        except KeyboardInterrupt:
            struck += 1
    result.check_streams()
    assert result.outputs.keys() == set(numbers)
    ended = [number for number in numbers if result.outputs[number].outputs[0].error == "interrupted"]
    assert len(ended) == (struck if where == "_verify" else 0) <= 1
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        expected = plain(target, prompt, seeded(seed=2))
        assert result.ids(number) == (expected[: len(result.ids(number))] if number in ended else expected)
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
