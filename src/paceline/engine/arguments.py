"""What the facade's arguments may be. Raises PacelineError for anything else."""

import os
from collections.abc import Mapping
from typing import Any

from paceline.drafters.config import EXAMPLE, SpeculativeConfig
from paceline.drafters.registry import find
from paceline.engine.request import check_kind
from paceline.errors import PacelineError
from paceline.models.adopt import adopt
from paceline.models.home import Progress
from paceline.models.load import LoadedModel, load_model
from paceline.values import elements, shown


def loaded(model: Any, dtype: str, device: str | None, progress: Progress) -> LoadedModel:
    """The model itself, whatever names it. Raises PacelineError for what does not."""
    if isinstance(model, LoadedModel):
        if dtype != "auto" or device is not None:
            raise PacelineError("dtype and device of a loaded model are settled", hint="give them to load_model")
        return model
    if isinstance(model, str | os.PathLike):
        return load_model(str(model), dtype=dtype, device="cpu" if device is None else device, progress=progress)
    if isinstance(model, tuple) and len(model) != 2:
        raise PacelineError(f"the model is a tuple of {len(model)}", hint="give transformers' (model, tokenizer)")
    of_transformers, tokenizer = model if isinstance(model, tuple) else (model, None)
    return adopt(of_transformers, tokenizer, dtype=dtype, device=device, progress=progress)


def speculative_config_of(given: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
    """A configuration, a mapping or a method's name, checked."""
    if isinstance(given, str):
        given = {"method": given}
    if not isinstance(given, SpeculativeConfig | Mapping):
        raise PacelineError(
            f"speculative_config is {shown(given)}; it must be a mapping or a method's name", hint=EXAMPLE
        )
    config = given if isinstance(given, SpeculativeConfig) else SpeculativeConfig.from_dict(given)
    find(config.method)
    for each in (config, *(config.methods or ())):
        check_kind("the draft model", each.model, str | None, "a name, a folder or a file, as text")
    return config


def one_each(name: str, given: Any, default: Any, kind: type, count: int) -> list[Any]:
    """One for all, or one each."""
    if given is None or isinstance(given, kind):
        return [default if given is None else given] * count
    if (values := elements(given)) is None:
        raise PacelineError(f"{name} is {shown(given)}", hint=f"it must be {kind.__name__}, one or a list of them")
    if len(values) != count:
        raise PacelineError(f"{len(values)} {name} for {count} prompts", hint="give one for all, or one each")
    if not all(isinstance(value, kind) for value in values):
        raise PacelineError(f"{name} must be {kind.__name__}, one or a list of them")
    return list(values)
