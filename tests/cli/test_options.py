"""The command line's own lists and words, against what they stand for."""

from dataclasses import fields

from paceline.cli import options
from paceline.core.params import SamplingParams
from paceline.core.verify import RULES
from paceline.errors import PacelineError
from paceline.models import precision
from paceline.models.sources import PRECISIONS


def test_the_lists_are_those_of_the_registries() -> None:
    """The command line must not import the registries, which need torch, to know their names."""
    assert set(options.RULE_NAMES) == {name if rule.lossless else f"lossy-{name}" for name, rule in RULES.items()}
    assert set(precision.NAMES) == set(PRECISIONS)


def test_every_parameter_that_is_an_option_has_a_hint() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert names - set(options.HINTS) == {"n", "stop_token_ids", "logit_bias", "bad_words"}
    assert set(options.HINTS) < names


def test_parameters_become_options_and_words_stay_words() -> None:
    def renamed(message: str, hint: str | None = None) -> tuple[str, str | None]:
        error = options.in_option_names(PacelineError(message, hint))
        return str(error), error.hint

    assert renamed("max_tokens is 0", "raise max_tokens, or top_k") == (
        "--max-tokens is 0",
        "raise --max-tokens, or --top-k",
    )
    assert renamed("stop holds ''")[0] == "--stop holds ''"
    assert renamed("the temperature is high: stop") == ("the temperature is high: stop", None)
    assert renamed("draft_model has num_speculative_tokens 3")[0] == "draft_model has --num-draft-tokens 3"
    assert renamed("--max-tokens is 0")[0] == "--max-tokens is 0"
    assert renamed("seed is -1")[1] == options.HINTS["seed"]
