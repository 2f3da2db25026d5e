"""Ctrl-C as any line of the engine or of its KV cache is about to run: nothing is lost, doubled or left behind."""

import contextlib
import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import tiny
import torch
from drafters import head_files
from engine.running import RequestOptions, Run, make_engine, plain, seeded
from engine.toy_tokenizer import toy_tokenizer

from paceline.core.params import SamplingParams
from paceline.core.tree_shapes import EAGLE_TREE
from paceline.drafters import draft_model, eagle
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine import engine as engine_module
from paceline.engine.llm import LLM
from paceline.engine.outputs import RequestOutput, Update
from paceline.models import cache
from paceline.models.decoder import Decoder
from paceline.models.eagle_checkpoint import load_eagle
from paceline.models.load import LoadedModel, load_model

HERE = (str(Path(engine_module.__file__).parent), cache.__file__)
PREFIX = tiny.prompt(64, seed=9)
T = TypeVar("T")


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny.tiny_decoder("llama", dtype=torch.bfloat16, num_hidden_layers=1)


@dataclass
class Strike:
    """Raises as a line (file and number) is about to run for the so-manieth time; counts how often each has run."""

    line: tuple[str, int] | None = None
    turn: int = 1
    files: tuple[str, ...] = HERE
    turns: Counter[tuple[str, int]] = field(default_factory=Counter)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.turns[line] += 1
            if line == self.line and self.turns[line] == self.turn:
                raise KeyboardInterrupt
        return self

    def until_done(self, call: Callable[[], T]) -> T:
        """Call again if it was interrupted."""
        while True:
            previous = sys.gettrace()
            sys.settrace(self)
            try:
                return call()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(previous)


def engine_attempt(target: Decoder, strike: Strike) -> None:
    """Prefix hits, choices, drafts, stops, a cancelled request, and too few blocks for all."""
    tokenizer, drafter = toy_tokenizer(), DraftModelDrafter(target, 20_000)
    drafters = {"itself": drafter, "suffix": SuffixDrafter()}
    engine = make_engine(
        target, drafters, num_kv_blocks=7, max_num_seqs=4, prefix_cache_blocks=3, tokenizer=tokenizer
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=12)
    answer = plain(target, [*PREFIX, 8], greedy)
    stops = (tokenizer.decode(answer[5:7]), tokenizer.decode(answer[2:5]) + "#")  # found, and never completed
    asked: list[tuple[list[int], SamplingParams, RequestOptions]] = [
        ([*PREFIX, 1, 2], seeded(seed=4, max_tokens=8, n=2, logprobs=1), RequestOptions()),
        ([*PREFIX, 8], replace(greedy, stop=stops), RequestOptions()),
        ([*PREFIX, *tiny.prompt(62, seed=2)], seeded(seed=5, max_tokens=9), RequestOptions(method="suffix")),
        (tiny.prompt(30, seed=3), seeded(seed=6, max_tokens=40, n=2), RequestOptions()),  # is cancelled
        (tiny.prompt(5, seed=4), replace(greedy, max_tokens=10), RequestOptions(method="none")),
    ]
    result, numbers, cancelled = Run(), [], 3
    for prompt, params, options in asked:
        numbers.append(strike.until_done(lambda p=prompt, s=params, o=options: engine.add_request(p, s, o)))  # type: ignore[misc]
        result.take(strike.until_done(engine.step))
    stopped: RequestOutput | None = None
    while engine.has_unfinished:
        assert result.num_steps < 500
        if result.num_steps == 8:
            stopped = strike.until_done(lambda: engine.cancel(numbers[cancelled]))
        result.take(strike.until_done(engine.step))
    if stopped is not None:
        result.outputs[numbers[cancelled]] = stopped
    else:
        assert strike.line is not None
        shown = {key: updates for key, updates in result.shown.items() if key[0] == numbers[cancelled]}
        Run(result.outputs, shown).check_streams()
    assert result.outputs.keys() == set(numbers)
    result.shown = {key: updates for key, updates in result.shown.items() if key[0] != numbers[cancelled]}
    result.check_streams()
    for i, (number, (prompt, params, _)) in enumerate(zip(numbers, asked, strict=True)):
        expected, choice = plain(target, prompt, params), result.outputs[number].outputs[0]
        assert choice.error is None
        assert len(choice.token_ids) == choice.speculation.num_tokens
        match i:
            case 1:
                assert choice.text == tokenizer.decode(expected).split(stops[0])[0]
                assert choice.stop_reason == stops[0]
            case 3:
                assert choice.finish_reason == "abort"
                assert list(choice.token_ids) == expected[: len(choice.token_ids)]
            case _:
                assert list(choice.token_ids) == expected
    for choice in result.outputs[numbers[0]].outputs:
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids) == 8
    assert engine.statistics.num_tokens == sum(o.usage.completion_tokens for o in result.outputs.values())
    assert not engine.speculation.faults
    assert engine.pool.blocks_in_use == engine.prefix_cache.num_blocks <= 3
    strike.until_done(engine.reset_prefix_cache)
    assert engine.pool.blocks_in_use == 0
    assert drafter.pool.blocks_in_use == 0


def drafter_attempt(target: Decoder, make: Callable[[], Any], strike: Strike) -> None:
    """Choices, prefix hits and drafts that are partly right, over block boundaries of the drafter's own cache."""
    drafter = make()
    engine = make_engine(target, {"it": drafter}, prefix_cache_blocks=3)
    asked = [
        ([*PREFIX, 1, 2], seeded(seed=4, max_tokens=8, n=2)),
        (tiny.prompt(60, seed=3), SamplingParams(temperature=0, max_tokens=12)),
        ([*PREFIX, 8], seeded(seed=5, max_tokens=8)),
    ]
    result, numbers = Run(), []
    for prompt, params in asked:
        numbers.append(engine.add_request(prompt, params))
        result.take(strike.until_done(engine.step))
        result.take(strike.until_done(engine.step))
    while engine.has_unfinished:
        assert result.num_steps < 200
        result.take(strike.until_done(engine.step))
    for number, (prompt, params) in zip(numbers, asked, strict=True):
        assert result.ids(number) == plain(target, prompt, params)
    assert not engine.speculation.faults
    strike.until_done(engine.reset_prefix_cache)
    assert engine.pool.blocks_in_use == drafter.pool.blocks_in_use == len(drafter._states) == 0


def llm_attempt(model: LoadedModel, strike: Strike) -> None:
    """Two streams and a call, in turn; the one that is interrupted is asked for again."""
    llm = LLM(model, {"method": "ngram"}, max_num_seqs=3, kv_cache_memory_bytes=4_000_000)
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = [llm.generate(text, params)[0].outputs[0].token_ids for text in ("hello", "you", "there")]
    updates: dict[str, list[Update]] = {}

    def read(text: str, count: int) -> None:
        """On in its stream; from its start again where that was interrupted, for then it is over."""
        for _ in range(count):
            stream = streams.get(text)
            if stream is None:
                stream = streams[text] = strike.until_done(lambda: llm.stream(text, params))
                updates[text] = []
            try:
                sys.settrace(strike)
                update = next(stream, None)
            except KeyboardInterrupt:
                del streams[text]
            else:
                if update is None:
                    return
                updates[text].append(update)
            finally:
                sys.settrace(None)

    streams: dict[str, Any] = {}
    read("hello", 3)
    read("you", 2)
    (output,) = strike.until_done(lambda: llm.generate("there", params))
    left = strike.until_done(lambda: llm.stream("left", params))
    with contextlib.suppress(KeyboardInterrupt):
        next(left)
    strike.until_done(left.close)  # type: ignore[attr-defined]
    read("you", 30)
    read("hello", 30)
    assert output.outputs[0].token_ids == expected[2]
    for text, answer in zip(("hello", "you"), expected, strict=False):
        assert tuple(token for update in updates[text] for token in update.token_ids) == answer
        assert [update.output is not None for update in updates[text]][-2:] == [False, True]
    assert (
        strike.until_done(lambda: llm.generate("there", params))[0].outputs == output.outputs
    )  # and all is cleared up
    assert not llm.engine.has_unfinished
    llm.reset_prefix_cache()
    assert llm.engine.pool.blocks_in_use == 0


def strikes(clean: Strike, count: int | None) -> Iterator[Strike]:
    """At each line that ran in a clean attempt, its first turn and another; or at some of those.

    Always where a block is taken: between free and held it is nobody's.
    """
    source, turns = random.Random(7), clean.turns
    chosen = [(line, turn) for line, last in turns.items() for turn in {1, source.randint(1, last)}]
    if count is not None:
        code, first = inspect.getsourcelines(cache.KVPool.take)
        taking = [(cache.__file__, first + i) for i in range(len(code))]
        chosen = source.sample(chosen, count) + [(line, turns[line]) for line in taking if line in turns]
    return (Strike(line, turn, clean.files) for line, turn in chosen)


def check_all(attempt: Callable[[Strike], None], count: int | None, files: tuple[str, ...] = HERE) -> None:
    attempt(clean := Strike(files=files))
    num_struck = 0
    for strike in strikes(clean, count):
        try:
            attempt(strike)
        except Exception as error:
            raise AssertionError(f"struck at {strike.line}, turn {strike.turn}") from error
        assert strike.line is not None
        num_struck += strike.turns[strike.line] >= strike.turn
    assert num_struck > 0


COUNTS = [8, pytest.param(None, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
def test_no_line_of_the_engine_loses_anything(target: Decoder, count: int | None) -> None:
    check_all(lambda strike: engine_attempt(target, strike), count)


@pytest.mark.parametrize("count", COUNTS)
def test_no_line_of_the_facade_loses_anything(tiny_llama_dir: Path, count: int | None) -> None:
    model = load_model(str(tiny_llama_dir), dtype="bf16")
    check_all(lambda strike: llm_attempt(model, strike), count)


@pytest.mark.parametrize("count", COUNTS)
def test_no_line_of_a_draft_model_loses_anything(target: Decoder, count: int | None) -> None:
    like = tiny.tiny_decoder("llama", dtype=torch.bfloat16)  # with two layers more: right now and then
    files = (draft_model.__file__, cache.__file__)
    check_all(lambda strike: drafter_attempt(target, lambda: DraftModelDrafter(like, 2000), strike), count, files)


@pytest.mark.parametrize("count", COUNTS)
def test_no_line_of_a_head_loses_anything(target: Decoder, count: int | None, tmp_path: Path) -> None:
    embed = target.embedding.double()
    head = load_eagle(str(head_files.eagle(embed, embed).write(tmp_path)), target)
    files = (eagle.__file__, cache.__file__)
    check_all(
        lambda strike: drafter_attempt(target, lambda: eagle.EagleDrafter("eagle", head, EAGLE_TREE, 2000), strike),
        count,
        files,
    )
