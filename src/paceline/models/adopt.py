"""A model that transformers has loaded already: its weights, laid out for our decoder."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.checkpoint import canonical_name, effective
from paceline.models.config import ModelConfig
from paceline.models.hf_config import config_from_hf
from paceline.models.home import Progress, silent
from paceline.models.layout import canonical_parts, check_names, prepare
from paceline.models.load import LoadedModel, load_source
from paceline.models.packing import PACKED, pack_weights
from paceline.models.sources import (
    PRECISIONS,
    ModelParts,
    TokenizerCheck,
    accept_all,
    leftover_note,
    own_precision,
    tensors_fingerprint,
)
from paceline.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TransformersSource:
    """transformers' model, and its tokenizer if there is one. Weights whose layout already fits are shared."""

    model: Any
    tokenizer: Any | None
    name: str

    @property
    def origin(self) -> str:
        return f"transformers' {type(self.model).__name__}"

    def describe(self) -> ModelConfig:
        generation = getattr(self.model, "generation_config", None)
        return config_from_hf(self.model.config.to_dict(), None if generation is None else generation.to_dict())

    def fingerprint(self) -> str:
        names = sorted(canonical_parts(self.describe()))
        state = self.model.state_dict().items()
        weights = {canonical_name(name): tensor for name, tensor in state}
        return tensors_fingerprint((name, weights[name]) for name in names)

    def read(
        self, precision: str | None, progress: Progress, accept: TokenizerCheck = accept_all, packed: bool = False
    ) -> ModelParts:
        config = self.describe()
        tokenizer = None if self.tokenizer is None else Tokenizer.from_transformers(self.tokenizer, self.name)
        accept(config, tokenizer)
        weights = {canonical_name(name): tensor.detach() for name, tensor in self.model.state_dict().items()}
        if config.tie_embeddings:
            weights.pop("lm_head.weight", None)  # the embeddings once more
        notes = leftover_note(check_names(config, weights, self.name))
        chosen, precision_note = (precision, ()) if precision else own_precision(self.model.dtype)
        canonical = _effective(config, weights)
        stored = pack_weights(canonical, chosen) if chosen in PACKED else canonical
        tensors = dict(prepare(config, stored, PRECISIONS[chosen], self.name))
        return ModelParts(config, tensors, tokenizer, chosen, notes + precision_note)


def adopt(
    model: Any,
    tokenizer: Any | None = None,
    dtype: str = "auto",
    device: str | None = None,
    max_context: int | None = None,
    progress: Progress = silent,
) -> LoadedModel:
    """Our model from transformers' model and tokenizer; `dtype` and `device` are the model's own unless given.

    Raises PacelineError for an architecture that is not supported, or weights that have no place in it.
    """
    if not hasattr(model, "state_dict") or not hasattr(model, "config"):
        raise PacelineError(
            f"a {type(model).__name__} is no model",
            hint="give a name, a loaded model, or transformers' (model, tokenizer)",
        )
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    source = TransformersSource(model, tokenizer, name)
    return load_source(name, lambda: source, dtype, device or str(model.device), max_context, progress)


def _effective(config: ModelConfig, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights.items():
        yield name, effective(config, name, tensor)
