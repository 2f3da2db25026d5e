"""The command line's own lists and words, against what they stand for."""

import argparse
from dataclasses import fields

import pytest

from paceline.cli import options
from paceline.core.params import SamplingParams
from paceline.core.verify import RULES
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.registry import METHODS
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


def test_drafting_options_reach_the_configuration() -> None:
    assert set(options.DRAFT_HINTS) < set(options.DRAFT_OPTIONS) < {field.name for field in fields(SpeculativeConfig)}
    parser = argparse.ArgumentParser()
    options.add_speculation_options(parser)

    def config(*words: str) -> SpeculativeConfig:
        return options.speculative_config(parser.parse_args(words))

    words = ("--draft-model", "x", "--draft-dtype", "int8")
    for method in ("draft_model", "medusa", "eagle", "eagle3", "early_exit", "auto"):
        found = config("--method", method, *words)
        assert (found.method, found.model, found.draft_dtype) == (method, "x", "int8")
    sized = config("--method", "draft_model", *words, "--draft-vocab-size", "99")
    assert sized.draft_vocab_size == 99
    sure = ("--draft-confidence-threshold", "0.25")
    assert config("--method", "layer_skip", *sure).draft_confidence_threshold == 0.25
    assert config(*sure).method == "auto"  # whose members take it
    several = config("--method", "suffix,layer_skip", *sure)
    assert (several.method, several.draft_confidence_threshold) == ("composite", 0.25)


def test_an_option_that_no_method_takes_is_refused_with_those_that_do() -> None:
    parser = argparse.ArgumentParser()
    options.add_speculation_options(parser)
    for key, option in options.DRAFT_OPTIONS.items():
        words = (option, "bf16" if key == "draft_dtype" else "1")
        with pytest.raises(PacelineError, match=f"^{option} .* contradicts --method suffix,ngram, ") as caught:
            options.speculative_config(parser.parse_args(("--method", "suffix,ngram", *words)))
        named = set((caught.value.hint or "").replace(";", ",").replace("it is for ", "").split(", ")[1:])
        assert named == {name for name in METHODS if key in METHODS[name].options} - {"composite"}


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
