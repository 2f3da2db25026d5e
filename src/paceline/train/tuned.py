"""A copy of the target all of whose weights are trained. It is another target: its answers are its own.

What keeps it near the original is the loss alone: how far its next token's distribution is from the original's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from paceline.models.decoder import Decoder
from paceline.models.heads import DraftVocabulary
from paceline.models.hf_folder import describe, write_hf_folder
from paceline.models.home import write_json
from paceline.models.load import LoadedModel
from paceline.models.origin import Origin
from paceline.models.sources import FolderSource
from paceline.ops.norm import rms_norm
from paceline.train.batch import Batch
from paceline.train.divergence import Divergence
from paceline.train.forward import whole_states
from paceline.train.head_format import PROVENANCE
from paceline.train.recipe import Parameters, float_rows, trainable, working_dtype
from paceline.train.student import pruned_weights
from paceline.train.teacher import Lesson, Selection, Teacher, lesson


class TunedTarget:
    """`parameters`: the copy's, in the prepared layout. It has all the original's positions, whatever a run allows.

    Raises PacelineError for a model that cannot be written as a folder, before anything is trained.
    """

    def __init__(self, model: LoadedModel, origin: Origin) -> None:
        self.original, self.origin, self.tokenizer = model.decoder, origin, model.tokenizer
        config = replace(model.config, max_context=model.source.describe().max_context)
        describe(config, model.decoder.dtype)  # what cannot be written is not trained
        dtype = working_dtype(model.decoder)
        weights = pruned_weights(model.decoder, range(config.num_layers), dtype)
        self.parameters: Parameters = trainable(weights)
        self.decoder = Decoder(config, self.parameters, dtype, model.decoder.device)

    def states(
        self,
        batch: Batch,
        layers: Sequence[int],
        left_out: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> dict[int, torch.Tensor]:
        """[T, d] after layers, as the output layer reads them (−1: after the last); `left_out` as in `whole_states`."""
        found = whole_states(self.decoder, batch.texts, layers, left_out)
        norm, eps = self.decoder.norm, self.decoder.config.rms_norm_eps
        return {layer: x if layer == -1 else rms_norm(x, norm, eps) for layer, x in found.items()}

    def output(self, vocabulary: DraftVocabulary) -> torch.Tensor:
        """The output layer's rows [D, d] for these tokens: gradients reach them."""
        return float_rows(self.decoder.head, vocabulary.ids)

    @property
    def vocabulary(self) -> DraftVocabulary:
        """All of it."""
        return DraftVocabulary(self.decoder.config.vocab_size)

    def original_says(self, batch: Batch) -> tuple[torch.Tensor, Selection]:
        """Where the next token is the assistant's: these tokens [m], and the original's distributions after them."""
        tokens = batch.answers(1).nonzero().flatten()
        return tokens, Teacher.of(self.original, batch, self.vocabulary).select(tokens)

    def compare(self, states: torch.Tensor, said: Selection, divergence: Divergence) -> Lesson:
        """How far what the output layer reads from states [m, d] is from what the original says."""
        return lesson(states, self.output(self.vocabulary), said, divergence)

    def write(self, folder: Path, provenance: Mapping[str, Any]) -> Origin:
        """A Hugging Face folder, made if need be, in the original's precision; whom heads for it are for."""
        folder.mkdir(exist_ok=True)
        weights = {name: tensor.detach().to(self.original.dtype) for name, tensor in self.parameters.items()}
        write_hf_folder(folder, self.decoder.config, weights, self.tokenizer)
        write_json(folder / PROVENANCE, dict(provenance))
        return replace(self.origin, weights=FolderSource(folder).fingerprint())
