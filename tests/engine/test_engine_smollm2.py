"""The engine on the real 135M model in bf16: eight requests of all methods at once, each as `decode` gives it alone."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from engine.running import RequestOptions, Run, make_engine, plain
from matrix import PARAMS
from prompts import LONG, SHORT

from paceline.drafters.base import Drafter
from paceline.drafters.composite import CompositeDrafter, Member
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.outputs import RequestOutput
from paceline.models.load import LoadedModel, load_model

pytestmark = pytest.mark.model
METHODS = ("none", "ngram", "suffix", "draft_model", "composite")


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> LoadedModel:
    return load_model("smollm2-135m", dtype="bf16")


def drafters(model: LoadedModel) -> dict[str, Drafter]:
    """The draft model is all but the target's last layer: right about as often as wrong."""
    draft = model.decoder.first_layers(model.config.num_layers - 1)
    both = [Member(SuffixDrafter()), Member(DraftModelDrafter(draft, 20_000))]
    return {
        "ngram": NgramDrafter(),
        "suffix": SuffixDrafter(),
        "draft_model": DraftModelDrafter(draft, 20_000),
        "composite": CompositeDrafter(both),
    }


def chats(model: LoadedModel, texts: Sequence[str]) -> list[tuple[int, ...]]:
    assert model.tokenizer is not None
    return [tuple(model.tokenizer.apply_chat_template([{"role": "user", "content": text}])) for text in texts]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; `k` tokens are drafted a step. Greedy ones under `standard` where `k` is odd."""

    prompt: tuple[int, ...]
    method: str
    params: str
    k: int
    length: int

    @property
    def rule(self) -> str:
        return "standard" if self.params == "greedy" and self.k % 2 else "coupled"


def check(model: LoadedModel, requests: Sequence[Asked], at_once: int = 8, arrive: int = 0, cancel: int = 0) -> None:
    """All requests through one engine, `at_once` at a time, against `decode` for each alone.

    arrive: one comes every so many steps; 0: all are there from the start.
    cancel: with every so-manieth that comes, the youngest that decodes goes; 0: none does. What it had must be right.
    """
    engine = make_engine(
        model.decoder, drafters(model), max_num_seqs=at_once, max_model_len=2048, prefix_cache_blocks=40
    )
    result, numbers, gone = Run(), list[int](), dict[int, RequestOutput]()
    for asked in requests:
        params = replace(PARAMS[asked.params], max_tokens=asked.length)
        options = RequestOptions(method=asked.method, num_speculative_tokens=asked.k, rule=asked.rule)
        numbers.append(engine.add_request(asked.prompt, params, options))
        for _ in range(arrive):
            result.take(engine.step())
        decoding = [each.request.request_id for each in engine.scheduler.running if each.num_output]
        if cancel and len(numbers) % cancel == 0 and decoding:
            output = engine.cancel(decoding[-1])
            assert output is not None
            gone[decoding[-1]] = output
    while engine.has_unfinished:
        result.take(engine.step())
    result.outputs |= gone
    assert result.outputs.keys() == set(numbers)
    for number, asked in zip(numbers, requests, strict=True):
        answer = plain(model.decoder, asked.prompt, replace(PARAMS[asked.params], max_tokens=asked.length))
        assert result.ids(number) == (answer[: len(result.ids(number))] if number in gone else answer)
    assert bool(cancel) == bool(gone)
    print(f"{len(numbers)} requests, {len(gone)} of them cancelled, in {result.num_steps} steps")
    assert not engine.speculation.faults
    engine.reset_prefix_cache()
    assert engine.pool.blocks_in_use == 0
    spoken = [output.metrics.speculation for output in result.outputs.values()]
    assert 0 < sum(s.num_accepted_tokens for s in spoken) < sum(s.num_draft_tokens for s in spoken)


def test_eight_at_once(model: LoadedModel) -> None:
    """Unequal prompts, unequal answers, all methods."""
    texts = [SHORT[5], SHORT[10], LONG[2][-300:], SHORT[2], SHORT[12], SHORT[0], SHORT[15], SHORT[8]]
    methods = ("ngram", "suffix", "draft_model", "composite", "none", "suffix", "draft_model", "composite")
    names = ("greedy", "seeded", "greedy", "seeded", "greedy", "greedy", "seeded", "greedy")
    asked = zip(chats(model, texts), methods, names, (1, 3, 5, 8, 1, 4, 3, 8), (9, 6, 5, 9, 8, 4, 6, 8), strict=True)
    check(model, [Asked(*each) for each in asked])


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_the_identity_matrix(model: LoadedModel, at_once: int) -> None:
    """Every method × greedy and seeded × K, each on prompts of its own; one of them is long."""
    prompts = itertools.cycle(chats(model, [*SHORT, LONG[0]]))
    cells = itertools.product(METHODS, PARAMS, (1, 3, 5, 8))
    check(model, [Asked(next(prompts), method, name, k, 40) for method, name, k in cells], at_once)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [3, 8])
def test_the_identity_matrix_with_requests_that_join_and_leave(model: LoadedModel, at_once: int) -> None:
    """The same, of unequal lengths: each comes between two steps while others decode, some are cancelled half-way."""
    prompts, lengths = itertools.cycle(chats(model, [*SHORT, LONG[0]])), itertools.cycle((40, 11, 26, 3, 33))
    cells = itertools.product(METHODS, PARAMS, (1, 3, 5, 8))
    requests = [Asked(next(prompts), method, name, k, next(lengths)) for method, name, k in cells]
    check(model, requests, at_once, arrive=3, cancel=5)
