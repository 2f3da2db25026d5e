"""The real 135M model in bf16: whichever registered method drafts, its tokens are those of plain decoding."""

from collections.abc import Callable
from pathlib import Path

import pytest
from drafters.contract import DRAFTING, Case, Target, every_case, rounds, smollm2
from drafters.watching import Wrapped
from prompts import SHORT

from paceline.core.params import SamplingParams

pytestmark = pytest.mark.model

NUM_TOKENS = 8
PARAMS = (
    SamplingParams(temperature=0, ignore_eos=True, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=0.8, top_p=0.95, seed=20_260, ignore_eos=True, max_tokens=NUM_TOKENS),
)


@pytest.fixture
def target(made: Callable[..., Target], smollm2_gguf: Path) -> Target:
    return made(smollm2)


@every_case
def test_the_real_models_tokens_stay(target: Target, case: Case) -> None:
    assert target.model.precision == "bf16" and target.model.tokenizer is not None
    prompt = target.model.tokenizer.apply_chat_template([{"role": "user", "content": SHORT[5]}])
    watched, drafted = Wrapped(target.drafter(case)), False
    for params in PARAMS:
        rounds(target.decoder, prompt, params, watched, {"chain": 3, "tree": 8}[case.shape])
        drafted |= any(map(len, watched.drafted.values()))
    assert drafted == (case in DRAFTING)
