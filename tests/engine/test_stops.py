"""Stop strings: text, ids, logprobs, usage, statistics and cache end where plain decoding's would."""

import random
from collections.abc import Sequence

import pytest
import tiny
import torch
from drafters.scripted import oracle
from engine.running import Run, make_engine, plain, run
from engine.test_engine import Prompter
from engine.toy_tokenizer import toy_tokenizer

from paceline.core.params import SamplingParams
from paceline.drafters.base import Needs
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engine.engine import Engine, RequestOptions
from paceline.models.decoder import Decoder

TOKENIZER = toy_tokenizer()
PROMPT = tiny.prompt(70, seed=2)
LENGTH = 26


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny.tiny_decoder("llama", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def answer(target: Decoder) -> list[int]:
    return plain(target, PROMPT, params())


def params(stop: Sequence[str] = (), **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=LENGTH, stop=stop, **changes)  # type: ignore[arg-type]


def expected(answer: Sequence[int], stop: Sequence[str]) -> tuple[str, list[int], str | None]:
    """By the definition: the stop that begins first in the whole text, cut after the token that completes it."""
    text = TOKENIZER.decode(answer)
    found = [(text.find(s), len(s), s) for s in stop if s in text]
    if not found:
        return text, list(answer), None
    at, length, which = min(found)
    count = next(n for n in range(1, len(answer) + 1) if len(TOKENIZER.decode(answer[:n])) >= at + length)
    return text[:at], list(answer[:count]), which


def scripted_engine(target: Decoder, answer: Sequence[int], right: int, **settings: object) -> Engine:
    drafter = Prompter(oracle(lambda: right, 256))
    drafter.needs = Needs(hidden_layers=(1,), top_tokens=2)  # so that whatever is observed is also shown
    drafter.know(PROMPT, answer)
    return make_engine(
        target,
        {"scripted": drafter},
        num_draft_tokens=20 if right > 2 else 6,
        tokenizer=TOKENIZER,
        **settings,  # type: ignore[arg-type]
    )


def check(result: Run, number: int, answer: Sequence[int], stop: Sequence[str]) -> None:
    output = result.outputs[number]
    (choice,) = output.outputs
    text, ids, which = expected(answer, stop)
    assert (choice.text, list(choice.token_ids), choice.stop_reason) == (text, ids, which)
    assert choice.finish_reason == ("length" if which is None else "stop")
    assert output.usage.completion_tokens == len(ids) == choice.speculation.num_tokens
    assert choice.logprobs is not None
    assert [position.chosen.token_id for position in choice.logprobs] == ids


@pytest.mark.parametrize("right", [0, 2, 7, 99])
def test_every_window_as_a_stop_string(target: Decoder, answer: list[int], right: int) -> None:
    """1, 2 and 3 tokens, wherever they lie in a block: stopped at the first place their text occurs."""
    engine = scripted_engine(target, answer, right)
    stops = {}
    for size in (1, 2, 3):
        for start in range(LENGTH - size + 1):
            stop = TOKENIZER.decode(answer[start : start + size])
            stops[engine.add_request(PROMPT, params([stop], logprobs=1))] = [stop]
    result = run(engine)
    for number, stop_list in stops.items():
        check(result, number, answer, stop_list)
    assert not engine.speculation.faults
    assert engine.pool.blocks_in_use == 0


def test_several_stop_strings_and_those_that_come_to_light_late(target: Decoder, answer: list[int]) -> None:
    """A long stop that stays open holds back a match inside it: tokens of earlier passes are then taken back."""
    text = TOKENIZER.decode(answer)
    source = random.Random(4)
    engine = scripted_engine(target, answer, 3)
    stops: dict[int, list[str]] = {}
    late = 0
    for _ in range(60):
        at = source.randrange(len(text) - 24)
        length = source.randrange(8, 24)
        never = text[at : at + length] + "#"  # almost there, but not quite
        inside = at + source.randrange(1, 4)
        chosen = [never, text[inside : inside + source.randrange(2, 4)]]
        source.shuffle(chosen)
        stops[engine.add_request(PROMPT, params(chosen, logprobs=0))] = chosen
    result = run(engine)
    for number, chosen in stops.items():
        check(result, number, answer, chosen)
        late += sum(u.token_ids == () for u in result.shown[number, 0])
    assert not engine.speculation.faults
    assert late > 10, "no text was held back over a pass"
    whole = scripted_engine(target, answer, 3)
    number = whole.add_request(PROMPT, params(["#never#"], logprobs=0))
    check(run(whole), number, answer, ["#never#"])


def test_after_a_stop_string_the_cache_is_that_of_the_cut_text(target: Decoder) -> None:
    """What follows a stop string must not be found by the next request, and what precedes it must."""
    answer = plain(target, PROMPT, SamplingParams(temperature=0, max_tokens=140))
    text = TOKENIZER.decode(answer)
    drafter = DraftModelDrafter(target, 5000)
    for count in (57, 58, 59, 100):  # 70 + 58 = two blocks
        engine = make_engine(target, {"itself": drafter}, tokenizer=TOKENIZER, prefix_cache_blocks=10)
        stop = TOKENIZER.decode(answer[count - 3 : count])
        first = engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=140, stop=[stop]))
        kept = run(engine).ids(first)
        assert kept == expected(answer, [stop])[1]
        assert engine.prefix_cache.num_blocks == (len(PROMPT) + len(kept) - 1) // 64
        second = engine.add_request([*PROMPT, *kept, 5, 6], SamplingParams(temperature=0, max_tokens=20))
        result = run(engine)
        assert result.outputs[second].usage.cached_tokens == (len(PROMPT) + len(kept) - 1) // 64 * 64
        assert result.ids(second) == plain(target, [*PROMPT, *kept, 5, 6], SamplingParams(temperature=0, max_tokens=20))
        statistics = result.outputs[second].metrics.speculation
        assert statistics.num_accepted_tokens == statistics.num_draft_tokens > 0
        engine.reset_prefix_cache()
        assert engine.pool.blocks_in_use == drafter.pool.blocks_in_use == 0
    assert len(text) > 140


def test_a_cancelled_answer_keeps_what_it_had(target: Decoder, answer: list[int]) -> None:
    for after in range(1, 9):
        engine = scripted_engine(target, answer, 2)
        number = engine.add_request(PROMPT, params(["#"], logprobs=0))
        shown = [update for _ in range(after) for update in engine.step()]
        output = engine.cancel(number)
        assert output is not None
        assert engine.cancel(number) is None
        choice = output.outputs[0]
        assert choice.finish_reason == "abort"
        assert list(choice.token_ids) == answer[: len(choice.token_ids)]
        assert choice.text == TOKENIZER.decode(choice.token_ids)
        assert "".join(update.text for update in shown) == choice.text[: sum(len(u.text) for u in shown)]
        assert not engine.has_unfinished
        assert engine.pool.blocks_in_use == 0


def test_speculation_off_gives_the_same_text(target: Decoder, answer: list[int]) -> None:
    engine = scripted_engine(target, answer, 99)
    stop = TOKENIZER.decode(answer[9:12])
    numbers = [
        engine.add_request(PROMPT, params([stop], logprobs=2), RequestOptions(speculative=speculative))
        for speculative in (True, False)
    ]
    result = run(engine)
    first, second = (result.outputs[number].outputs[0] for number in numbers)
    assert (first.text, first.token_ids, first.logprobs) == (second.text, second.token_ids, second.logprobs)
