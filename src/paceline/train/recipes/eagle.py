"""EAGLE-1/2: one layer that guesses the target's next last hidden state, which the target's output layer reads.

loss = Σ_i decay^i · (SmoothL1(state, the target's state) + token_weight · KL(p ‖ q_i)); the first mean over the state's
values. More than one step trains on the head's own states, as HASS does. Embedding and output layer are the target's,
frozen, and not stored. Sources: 2401.15077, §4.2; 2408.15766 (HASS).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from paceline.models.decoder import Decoder
from paceline.models.heads import DraftVocabulary, EagleHead
from paceline.models.hf_config import config_from_hf
from paceline.models.origin import Origin
from paceline.ops.linear import Linear
from paceline.train.batch import Batch
from paceline.train.divergence import DIVERGENCES
from paceline.train.feature_head import guess, learn
from paceline.train.head_format import layer_description, write_head
from paceline.train.layer import initial_layer, trained_layer
from paceline.train.recipe import (
    Initial,
    Outcome,
    Parameters,
    Recipe,
    float_rows,
    in_one_call,
    stored_dtype,
    trainable,
    working_dtype,
)
from paceline.train.teacher import Lesson, Teacher, lesson

LAYER = "layers.0."


@dataclass(frozen=True, slots=True)
class EagleSettings:
    """steps: of training on own states; decay: a further step counts so much less."""

    steps: int = 3
    decay: float = 0.8
    token_weight: float = 0.1
    divergence: str = "forward_kl"


class EagleRecipe(Recipe):
    method = "eagle"
    layers: tuple[int, ...] = (-1,)
    drafting: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, target: Decoder, origin: Origin, settings: EagleSettings, seed: int) -> None:
        self.target, self.origin, self.settings = target, origin, settings
        self.depth = settings.steps
        self.description = layer_description(target.config)
        self.layer_config = config_from_hf(self.description)
        size, draw = target.config.hidden_size, Initial(seed, working_dtype(target), target.device)
        tensors = {"fc.weight": draw.matrix(size, 2 * size)} | initial_layer(draw, self.layer_config, size, LAYER)
        self.parameters: Parameters = trainable(tensors)
        self.output = float_rows(target.head).to(working_dtype(target))

    def head(self) -> EagleHead:
        """The head that inference drafts with, made of the trained tensors: gradients reach them."""
        fc, output = Linear(self.parameters["fc.weight"]), Linear(self.output)
        in_one_call((fc, output))
        layer = trained_layer(self.parameters, self.layer_config, LAYER)
        return EagleHead(layer, self.target.embedding, fc, output)

    def learn(self, batch: Batch) -> Outcome:
        s = self.settings
        teacher = Teacher.of(self.target, batch, DraftVocabulary(self.target.config.vocab_size))

        def judge(states: torch.Tensor, after: torch.Tensor) -> Lesson:
            own = lesson(states, self.output, teacher.select(after), DIVERGENCES[s.divergence])
            distance = F.smooth_l1_loss(states, batch.hidden[-1][after].to(states.dtype), reduction="none")
            return Lesson(distance.mean(-1).sum() + s.token_weight * own.loss, own.counts)

        return learn(self.head(), batch, s.steps, s.decay, judge)

    def guesses(self, batch: Batch, steps: int) -> torch.Tensor:
        return guess(self.head(), batch, steps)

    def describe(self) -> dict[str, Any]:
        return asdict(self.settings)

    def write(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        config = {**self.description, "bias": False}
        own = {"method": self.method, "output_layer": "target", "embedding": "target"}
        write_head(folder, config, own, self.origin, self.parameters, stored_dtype(self.target), provenance)
