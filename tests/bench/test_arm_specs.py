"""From what was asked for to arms."""

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from paceline.bench.specs import PLAIN, Wanted, arm_specs
from paceline.drafters import registry
from paceline.drafters.registry import find, names
from paceline.errors import PacelineError


def labels(wanted: Wanted) -> list[str]:
    return [spec.label for spec in arm_specs(wanted)[0]]


def test_without_a_word_every_method_that_can_run_does() -> None:
    specs, left_out = arm_specs(Wanted())
    ready = [name for name in names() if find(name).needs == "nothing" and name != "none"]
    assert [spec.label for spec in specs] == [PLAIN, *ready]
    assert {each.name for each in left_out} == {name for name in names() if find(name).needs_model}
    reasons = {each.name: each.why for each in left_out}
    assert "--draft-model" in reasons["draft_model"] and "--head medusa=FOLDER" in reasons["medusa"]


def test_models_reach_the_methods_that_take_them() -> None:
    specs, left_out = arm_specs(Wanted(draft_model="small", heads={"eagle3": "head"}))
    by_label = {spec.label: spec.config for spec in specs}
    assert by_label["draft_model"].model == "small" and by_label["eagle3"].model == "head"
    members = by_label["suffix+draft_model"].methods
    assert members is not None and [(m.method, m.model) for m in members] == [
        ("suffix", None),
        ("draft_model", "small"),
    ]
    assert by_label["ngram"].model is None
    assert {each.name for each in left_out} == {"medusa", "eagle"}


def test_methods_by_name_and_by_configuration() -> None:
    own = '{"method": "suffix", "suffix_decoding_max_tree_depth": 6, "label": "short"}'
    specs, _ = arm_specs(Wanted(["ngram", "none", "suffix+ngram"], [own], num_draft_tokens=3))
    assert [spec.label for spec in specs] == [PLAIN, "ngram", "none", "suffix+ngram", "short"]
    assert [spec.config.num_speculative_tokens for spec in specs[1:]] == [3, 4, 3, 6]
    assert labels(Wanted(configs=[own])) == [PLAIN, "short"]  # and not every other method too


def test_labels_are_told_apart() -> None:
    configs = [f'{{"method": "ngram", "num_speculative_tokens": {k}}}' for k in (2, 8, 8, 8)]
    assert labels(Wanted(["ngram"], configs)) == [PLAIN, "ngram", "ngram K 2", "ngram K 8", "ngram #2", "ngram #3"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"methods": ["ngrm"]}, "unknown speculative method 'ngrm'"),
        ({"methods": ["draft_model"]}, "method draft_model needs a draft model"),
        ({"methods": ["suffix+draft_model"]}, "method draft_model needs a draft model"),
        ({"methods": ["eagle"]}, "method eagle needs a draft head"),
        ({"methods": ["composite"]}, "composite goes by its methods' names"),
        ({"methods": ["ngram"], "draft_model": "small"}, "--draft-model small is used by none"),
        ({"methods": ["ngram"], "heads": {"eagle3": "x"}}, "--head eagle3=x is used by none"),
        ({"heads": {"ngram": "x"}}, "--head ngram=x is used by none"),
        ({"configs": ["{"]}, "is not JSON"),
        ({"configs": ["[]"]}, "is no JSON object"),
        ({"configs": ['{"method": "ngram", "label": 3}']}, "is no JSON object"),
        ({"configs": ['{"method": "ngram", "colour": "red"}']}, "has no key 'colour'"),
        ({"configs": ['{"method": "ngram", "lookahead_window": 3}']}, "'ngram' does not take lookahead_window"),
        ({"configs": ['{"method": "draft_model"}']}, "method draft_model needs a model"),
    ],
)
def test_what_cannot_be_is_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message) as error:
        arm_specs(Wanted(**wanted))
    assert error.value.hint


def test_a_head_that_comes_with_the_package_need_not_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.bench.specs.shipped_methods", lambda: frozenset({"eagle3"}))
    config = '{"method": "eagle3", "speculative_token_tree": "dynamic", "label": "tree"}'
    assert labels(Wanted(["eagle3"], [config])) == [PLAIN, "eagle3", "tree"]
    for wanted in (Wanted(["medusa"]), Wanted(configs=['{"method": "medusa"}'])):
        with pytest.raises(PacelineError, match="method medusa needs a"):
            arm_specs(wanted)


def test_a_draft_model_may_be_another_engines_alone() -> None:
    assert labels(Wanted(["ngram"], draft_model="small", shares_draft_model=True)) == [PLAIN, "ngram"]


def test_a_package_that_is_broken_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("flawed", "no.such.module:method", registry.GROUP)
    monkeypatch.setattr(registry, "_installed", lambda: [broken])
    specs, left_out = arm_specs(Wanted())
    assert "flawed" not in {spec.label for spec in specs}
    assert "cannot be loaded" in {each.name: each.why for each in left_out}["flawed"]


def test_plain_decoding_is_always_first() -> None:
    specs, _ = arm_specs(Wanted(["suffix"]))
    assert specs[0].label == PLAIN and specs[0].config.method == "none"
