"""Which arms a run has, from what was asked for. Nothing here imports torch: what cannot be is refused at once."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.registry import find, names
from paceline.errors import PacelineError
from paceline.models.shipped import shipped_methods
from paceline.values import shown

PLAIN = "plain"
ARTICLES = {"model": "a draft model", "head": "a draft head"}


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """A method as it will be measured."""

    label: str
    config: SpeculativeConfig


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What was not measured, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """methods: names, several in one joined by `+`; None: every one that can run. configs: JSON objects of
    speculative_config, each an arm of its own. heads: a draft head's folder by method.
    """

    methods: Sequence[str] | None = None
    configs: Sequence[str] = ()
    draft_model: str | None = None
    heads: Mapping[str, str] | None = None
    num_draft_tokens: int | None = None
    shares_draft_model: bool = False  # another engine drafts with it, too


def arm_specs(wanted: Wanted) -> tuple[list[ArmSpec], list[LeftOut]]:
    """Plain decoding, and what was asked for. Raises PacelineError for a method or an option that cannot be."""
    left_out: list[LeftOut] = []
    chosen = wanted.methods
    if chosen is None:
        chosen, left_out = ([], []) if wanted.configs else _ready(wanted)
    specs = [ArmSpec(PLAIN, SpeculativeConfig(method="none"))]
    for name in chosen:
        _add(specs, name, SpeculativeConfig.from_dict(_values(name, wanted)))
    for text in wanted.configs:
        values = _parsed(text)
        label = values.pop("label", None)
        config = SpeculativeConfig.from_dict(values)
        _add(specs, label or config.method, config)
    _refuse_unused(wanted, specs)
    return specs, left_out


def _ready(wanted: Wanted) -> tuple[list[str], list[LeftOut]]:
    """Every method that has what it needs, and those that have not."""
    chosen: list[str] = []
    left_out: list[LeftOut] = []
    for name in names():
        try:
            needs_model = find(name).needs_model
        except PacelineError as error:  # of a package that is broken
            left_out.append(LeftOut(name, str(error)))
            continue
        if needs_model and _model(name, wanted) is None:
            left_out.append(LeftOut(name, f"it needs {_option(name)}"))
        elif name == "composite":
            chosen += ["suffix+draft_model"] if wanted.draft_model is not None else []
        elif name != "none":
            chosen.append(name)
    return chosen, left_out


def _values(name: str, wanted: Wanted) -> dict[str, Any]:
    """Of a method, or of several joined by `+`."""
    members = [_member(member, wanted) for member in name.split("+")]
    values: dict[str, Any] = members[0] if len(members) == 1 else {"methods": members}
    if wanted.num_draft_tokens is not None and name != "none":
        values["num_speculative_tokens"] = wanted.num_draft_tokens
    return values


def _member(name: str, wanted: Wanted) -> dict[str, Any]:
    if name == "composite":
        raise PacelineError("composite goes by its methods' names here", hint="--methods suffix+draft_model")
    needs, model = find(name).needs, _model(name, wanted)
    if _lacks_model(name, model):
        raise PacelineError(f"method {name} needs {ARTICLES[needs]}", hint=f"name it: {_option(name)}")
    return {"method": name} if model is None else {"method": name, "model": model}


def _lacks_model(name: str, model: str | None) -> bool:
    """Whether it cannot run for want of a model; whose the heads are that come with the package, loading tells."""
    return find(name).needs_model and model is None and name not in shipped_methods()


def _option(name: str) -> str:
    return "--draft-model NAME" if find(name).needs == "model" else f"--head {name}=FOLDER"


def _model(name: str, wanted: Wanted) -> str | None:
    """What a method reads its weights from, needed or welcome."""
    method = find(name)
    if method.needs == "head":
        return (wanted.heads or {}).get(name)
    return wanted.draft_model if "model" in method.options else None


def _parsed(text: str) -> dict[str, Any]:
    hint = '--method-config \'{"method": "suffix", "num_speculative_tokens": 8}\''
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PacelineError(f"--method-config {shown(text)} is not JSON: {error}", hint=hint) from error
    if not isinstance(values, dict) or not isinstance(values.get("label", ""), str):
        raise PacelineError(f"--method-config {shown(text)} is no JSON object", hint=hint)
    return values


def _add(specs: list[ArmSpec], label: str, config: SpeculativeConfig) -> None:
    """Under a label that no other arm has."""
    if _lacks_model(config.method, config.model):
        raise PacelineError(f"method {config.method} needs a model", hint='give the key "model"')
    config.check_options()
    config.check_used()
    taken = {spec.label for spec in specs}
    candidates = (label, f"{label} K {config.num_speculative_tokens}", *(f"{label} #{n}" for n in range(2, 1000)))
    specs.append(ArmSpec(next(name for name in candidates if name not in taken), config))


def _refuse_unused(wanted: Wanted, specs: Sequence[ArmSpec]) -> None:
    """A model that nobody reads is a mistake."""
    used = {(member.method, member.model) for spec in specs for member in (spec.config, *(spec.config.methods or ()))}
    unread = wanted.draft_model not in {None, *(model for _, model in used)}
    if unread and not wanted.shares_draft_model:
        raise PacelineError(
            f"--draft-model {wanted.draft_model} is used by none of the methods", hint="add draft_model to --methods"
        )
    for method, folder in (wanted.heads or {}).items():
        if (method, folder) not in used:
            raise PacelineError(
                f"--head {method}={folder} is used by none of the methods", hint=f"add {method} to --methods"
            )
