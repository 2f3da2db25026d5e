"""The engine on the real 135M model in bf16: eight requests of all methods at once, each as `decode` gives it alone."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from engine.running import RequestOptions, make_engine, plain, run
from matrix import PARAMS
from prompts import LONG, SHORT

from paceline.drafters.base import Drafter
from paceline.drafters.composite import CompositeDrafter, Member
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.models.load import LoadedModel, load_model

pytestmark = pytest.mark.model
METHODS = ("none", "ngram", "suffix", "draft_model", "composite")


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> LoadedModel:
    return load_model("smollm2-135m")


def drafters(model: LoadedModel) -> dict[str, Drafter]:
    """The draft model is the target's own first layers: wrong more often than right, so both are seen."""
    draft = model.decoder.first_layers(10)
    both = [Member(SuffixDrafter()), Member(DraftModelDrafter(draft, 20_000))]
    return {
        "ngram": NgramDrafter(),
        "suffix": SuffixDrafter(),
        "draft_model": DraftModelDrafter(draft, 20_000),
        "composite": CompositeDrafter(both),
    }


def chats(model: LoadedModel, texts: Sequence[str]) -> list[list[int]]:
    assert model.tokenizer is not None
    return [model.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]


def check(model: LoadedModel, requests: Iterable[tuple[list[int], str, int]]) -> None:
    """Prompt, method and length of each: greedy (every other one under `standard`) and seeded, eight at a time."""
    engine = make_engine(model.decoder, drafters(model), max_num_seqs=8, max_model_len=2048, prefix_cache_blocks=40)
    wanted: dict[int, list[int]] = {}
    answers: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
    for i, (prompt, method, length) in enumerate(requests):
        name, rule = ("greedy", "standard" if i % 4 else "coupled") if i % 2 == 0 else ("seeded", "coupled")
        params, key = replace(PARAMS[name], max_tokens=length), (name, tuple(prompt), length)
        if key not in answers:
            answers[key] = plain(model.decoder, prompt, params)
        options = RequestOptions(method=method, num_speculative_tokens=4, rule=rule)
        wanted[engine.add_request(prompt, params, options)] = answers[key]
    result = run(engine)
    assert {number: result.ids(number) for number in wanted} == wanted
    assert not engine.speculation.faults
    spoken = [output.metrics.speculation for output in result.outputs.values()]
    assert 0 < sum(s.num_accepted_tokens for s in spoken) < sum(s.num_draft_tokens for s in spoken)


def test_eight_at_once(model: LoadedModel) -> None:
    """Unequal prompts, unequal answers, all methods."""
    texts = [SHORT[5], SHORT[10], LONG[2][-300:], SHORT[2], SHORT[12], SHORT[0], SHORT[15], SHORT[8]]
    lengths = [9, 6, 5, 9, 8, 4, 6, 8]
    check(model, zip(chats(model, texts), itertools.cycle(METHODS), lengths))


@pytest.mark.slow
def test_every_method_with_every_prompt(model: LoadedModel) -> None:
    texts = [*SHORT, *LONG[:2]]
    check(model, [(prompt, method, 40) for method in METHODS for prompt in chats(model, texts)])
