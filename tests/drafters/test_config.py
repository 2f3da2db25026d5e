"""`speculative_config`: vLLM's keys, Hugging Face's aliases, nothing accepted and ignored."""

import pytest

from paceline.drafters.base import METHODS, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.errors import PacelineError


def test_keys_and_aliases() -> None:
    config = SpeculativeConfig.from_dict({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3})
    assert (config.method, config.num_speculative_tokens, config.prompt_lookup_max) == ("ngram", 5, 3)
    config = SpeculativeConfig.from_dict({"assistant_model": "x", "num_assistant_tokens": 7})
    assert (config.method, config.model, config.num_speculative_tokens) == ("draft_model", "x", 7)
    assert SpeculativeConfig.from_dict({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2}).method == "ngram"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1; it must be a whole number from 0 to 128"),
        ({"num_speculative_tokens": 129}, "num_speculative_tokens is 129"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 2}, "prompt_lookup_min is 5 but prompt_lookup_max is 2"),
        ({"speculative_tokens": 4}, "has no key 'speculative_tokens'"),
        ({"num_draft_tokens": 4, "num_assistant_tokens": 4}, "gives num_speculative_tokens twice"),
    ],
)
def test_bad_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(PacelineError) as error:
        SpeculativeConfig.from_dict(values)
    assert message in str(error.value)


def test_unknown_methods_and_foreign_options_are_refused() -> None:
    with pytest.raises(PacelineError, match="unknown speculative method 'egale'") as error:
        create_drafter(SpeculativeConfig(method="egale"), None)  # type: ignore[arg-type]
    assert error.value.hint is not None and all(name in error.value.hint for name in METHODS)
    with pytest.raises(PacelineError, match="'none' does not take prompt_lookup_max"):
        create_drafter(SpeculativeConfig(prompt_lookup_max=3), None)  # type: ignore[arg-type]
    with pytest.raises(PacelineError, match="'ngram' does not take model"):
        create_drafter(SpeculativeConfig(method="ngram", model="x"), None)  # type: ignore[arg-type]
    with pytest.raises(PacelineError, match="needs a draft model"):
        create_drafter(SpeculativeConfig(method="draft_model"), None)  # type: ignore[arg-type]
