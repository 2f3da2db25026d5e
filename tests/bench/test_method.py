"""An arm of ours, on a tiny model: what it counts, and what it leaves behind."""

from pathlib import Path

import pytest
import tiny

from paceline.bench.answers import Measured
from paceline.bench.method import MethodArm
from paceline.core.params import SamplingParams
from paceline.drafters.config import SpeculativeConfig
from paceline.models.load import LoadedModel, load_model

PROMPTS = [tiny.prompt(150, seed=1), tiny.prompt(20, seed=2) * 3]
PARAMS = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 30)]


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(str(tiny_llama_dir))


def arm(model: LoadedModel, **config: object) -> MethodArm:
    return MethodArm("x", model, SpeculativeConfig.from_dict(config), concurrency=2)


def histograms(measured: Measured) -> list[list[int]]:
    return [answer.speculation.acceptance_histogram for answer in measured.answers if answer.speculation]


@pytest.mark.parametrize("method", ["ngram", "suffix", "layer_skip", "early_exit"])
def test_the_drafts_seen_from_outside_are_those_that_the_engine_counts(model: LoadedModel, method: str) -> None:
    measured = arm(model, method=method).answer(PROMPTS, PARAMS)
    for answer, own in zip(measured.answers, PARAMS, strict=True):
        assert answer.speculation is not None and len(answer.token_ids) == own.max_tokens
        assert sum(answer.drafts_of_depth) == answer.speculation.num_draft_tokens  # of chains, each token is a depth
        assert answer.first_s is not None and 0 < answer.first_s < answer.seconds <= measured.seconds
    assert any(answer.drafts_of_depth for answer in measured.answers)
    costs = measured.costs
    assert costs is not None and min(costs.draft_s, costs.target_s, costs.rest_s, costs.prompt_s) > 0
    assert costs.draft_s + costs.target_s + costs.rest_s + costs.prompt_s <= measured.seconds
    longest = max(sum(histogram) for histogram in histograms(measured))
    assert longest <= costs.passes <= longest + 3  # a prompt of 150 tokens begins two chunks later


def test_passes_are_shared_by_what_runs_together(model: LoadedModel) -> None:
    costs = arm(model, method="none").answer([PROMPTS[1], PROMPTS[1][:30]], [PARAMS[1]] * 2).costs
    assert costs is not None and costs.passes == 30 and costs.draft_s < costs.target_s


def test_nothing_is_watched_afterwards(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    one = arm(model, method="ngram")
    one.answer(PROMPTS, PARAMS)

    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(one.llm.engine.scheduler), "schedule", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.answer(PROMPTS, PARAMS)
    assert not {"propose", "observe"} & vars(one.llm.engine.speculation).keys()
    assert not {"forward", "logits"} & vars(model.decoder).keys()


def test_a_warm_up_leaves_no_trace(model: LoadedModel) -> None:
    """Not even in a drafter that learns from answers: the same prompts again would be child's play to it."""
    fresh, warm, used = (arm(model, method="suffix") for _ in range(3))
    warm.warm_up(PROMPTS, PARAMS)
    used.answer(PROMPTS, PARAMS)
    used.forget()
    first = fresh.answer(PROMPTS, PARAMS)
    after_warm_up, again = warm.answer(PROMPTS, PARAMS), used.answer(PROMPTS, PARAMS)
    assert histograms(after_warm_up) == histograms(first) != histograms(again)
    assert all(answer.cached_tokens == 0 for answer in (*after_warm_up.answers, *again.answers))


def test_until_it_is_told_to_forget_a_prompt_is_found_again(model: LoadedModel) -> None:
    one = arm(model, method="none")
    one.answer(PROMPTS, PARAMS)
    assert [answer.cached_tokens for answer in one.answer(PROMPTS, PARAMS).answers] == [128, 0]


def test_an_arm_that_chooses_tells_what_it_chose(model: LoadedModel) -> None:
    one = arm(model, method="auto")
    one.answer(PROMPTS, PARAMS)
    assert one.choices is not None and one.choices["num_choices"] > 0
    assert arm(model, method="ngram").choices is None


def test_no_drafter_learns_from_a_private_answer(model: LoadedModel) -> None:
    """`suffix` drafts from finished answers: asked a second time, it has the whole answer, unless that was private."""

    def passes(one: MethodArm, private: bool) -> list[int]:
        ask = one.answer_privately if private else one.answer
        return [sum(sum(histogram) for histogram in histograms(ask(PROMPTS, PARAMS))) for _ in range(2)]

    first, second = passes(arm(model, method="suffix"), private=True)
    assert first == second
    first, second = passes(arm(model, method="suffix"), private=False)
    assert second < first / 2
