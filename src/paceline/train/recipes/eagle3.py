"""EAGLE-3: one layer on three of the target's hidden states, trained as it drafts, on its own states too.

loss = Σ_i decay^i · KL(p ‖ q_i) over `steps` steps; p restricted to the draft vocabulary and renormalised. Embedding
and output rows are the target's, frozen, and not stored. Source: 2503.01840, §3.2.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.decoder import Decoder
from paceline.models.heads import DraftVocabulary, Eagle3Head, Eagle3Options, Eagle3Weights
from paceline.models.hf_config import config_from_hf
from paceline.models.origin import Origin
from paceline.ops.linear import Linear
from paceline.train.batch import Batch
from paceline.train.divergence import DIVERGENCES
from paceline.train.feature_head import guess, learn
from paceline.train.head_format import layer_description, write_head
from paceline.train.layer import initial_layer, trained_layer
from paceline.train.recipe import (
    UNSURE,
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

LAYER = "midlayer."


@dataclass(frozen=True, slots=True)
class Eagle3Settings:
    """steps: of training-time test; decay: a further step counts so much less; aux_layers: whose outputs are read,
    None: a layer near the start, the middle one, one near the end, as published."""

    steps: int = 5
    decay: float = 0.8
    divergence: str = "forward_kl"
    aux_layers: tuple[int, ...] | None = None
    fuse_norms: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


class Eagle3Recipe(Recipe):
    """scales: of each layer that is read, and of −1, the size [d] that its values usually have. A few are hundreds of
    times larger than the rest; `fc` is trained as if all had size 1, and written as what reads the states as they are.
    The output norm begins with the sizes that the output layer is used to: with those of a few giants, only they learn.

    Raises PacelineError for a target with too few layers to choose three of.
    """

    method = "eagle3"
    drafting: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        target: Decoder,
        origin: Origin,
        vocabulary: DraftVocabulary,
        settings: Eagle3Settings,
        seed: int,
        scales: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.target, self.origin, self.vocabulary, self.settings = target, origin, vocabulary, settings
        aux = settings.aux_layers or default_aux_layers(target.config.num_layers)
        self.options = Eagle3Options(aux, settings.norm_before_residual, settings.norm_output)
        self.layers, self.depth = (*aux, -1), settings.steps
        self.description = layer_description(target.config)
        self.layer_config = config_from_hf(self.description)
        dtype = working_dtype(target)
        one = torch.ones(target.config.hidden_size, device=target.device)
        scales = scales or {-1: target.norm.abs(), **dict.fromkeys(aux, one)}
        self.scales = torch.cat([scales[layer].to(dtype) for layer in aux])  # [3 d]
        self.parameters: Parameters = trainable(self._initial(seed, scales[-1]))
        self.output = float_rows(target.head, vocabulary.ids).to(working_dtype(target))

    def _initial(self, seed: int, read: torch.Tensor) -> dict[str, torch.Tensor]:
        count, size = len(self.options.aux_layers), self.layer_config.hidden_size
        draw = Initial(seed, working_dtype(self.target), self.target.device)
        # what begins as the last of the states, scaled: read by the output layer, it says about what the target will
        tensors = {"fc.weight": draw.matrix(size, count * size, scale=0.1)}
        tensors["fc.weight"][:, -size:] += torch.eye(size, dtype=draw.dtype, device=draw.device)
        tensors |= initial_layer(draw, self.layer_config, 2 * size, LAYER)
        tensors |= {f"{LAYER}{name}.weight": draw.ones(size) for name in ("hidden_norm", "input_layernorm")}
        tensors["norm.weight"] = draw.copy(UNSURE * read * self.target.norm.sign())
        if self.settings.fuse_norms:
            tensors |= {f"fc_norm.{i}.weight": draw.ones(size) for i in range(count)}
        return tensors

    def head(self) -> Eagle3Head:
        """The head that inference drafts with, made of the trained tensors: gradients reach them."""
        p, output = self.parameters, Linear(self.output)
        weights = Eagle3Weights(
            embedding=self.target.embedding,
            fc=Linear(p["fc.weight"] / self.scales),
            fuse_norms=tuple(p[f"fc_norm.{i}.weight"] for i in range(len(self.options.aux_layers)))
            if self.settings.fuse_norms
            else (),
            input_norm=None,
            embedding_norm=p[f"{LAYER}input_layernorm.weight"],
            feature_norm=p[f"{LAYER}hidden_norm.weight"],
            output_norm=p["norm.weight"],
            output=output,
        )
        in_one_call((weights.fc, output))
        layer = trained_layer(p, self.layer_config, LAYER)
        return Eagle3Head(layer, weights, self.vocabulary, self.options)

    def learn(self, batch: Batch) -> Outcome:
        s, head = self.settings, self.head()
        teacher = Teacher.of(self.target, batch, self.vocabulary)

        def judge(states: torch.Tensor, after: torch.Tensor) -> Lesson:
            return lesson(head.read(states), self.output, teacher.select(after), DIVERGENCES[s.divergence])

        return learn(head, batch, s.steps, s.decay, judge)

    def guesses(self, batch: Batch, steps: int) -> torch.Tensor:
        return guess(self.head(), batch, steps)

    def describe(self) -> dict[str, Any]:
        return {**asdict(self.settings), "aux_layers": self.options.aux_layers, "draft_vocab_size": len(self.output)}

    def write(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        tensors = {**self.parameters, "fc.weight": self.parameters["fc.weight"] / self.scales}
        if (ids := self.vocabulary.ids) is not None:
            tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
            tensors["t2d"] = self.vocabulary.mask()
        config = {
            **self.description,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.output),
            "target_hidden_size": self.target.config.hidden_size,
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.options.aux_layers],
            "norm_before_residual": self.options.norm_before_residual,
            "norm_output": self.options.norm_output,
            "norm_before_fc": False,
            "fc_norm": self.settings.fuse_norms,
        }
        own = {
            "method": self.method,
            "aux_hidden_layers": self.options.aux_layers,  # outputs, counted from 0
            "output_layer": "target",
            "embedding": "target",
        }
        write_head(folder, config, own, self.origin, tensors, stored_dtype(self.target), provenance)


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Outputs of layers 1, L/2 − 1 and L − 4; of few layers: the first, middle and last. Raises PacelineError."""
    if num_layers < 3:
        raise PacelineError(f"EAGLE-3 reads three layers of the target, which has {num_layers}", hint="name them")
    if num_layers >= 7:
        return (1, num_layers // 2 - 1, num_layers - 4)
    return (0, num_layers // 2, num_layers - 1)
