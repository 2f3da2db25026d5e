"""An early exit that is read well: a small adapter after the target's first layers; the target is untouched.

loss = KL(p ‖ q), where q is read from the exit at a token and p is what the whole target says there. The adapter begins
as the identity, so that training starts from the bare exit, only less certain. Output layer: the target's.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.decoder import Decoder
from paceline.models.exit_adapter import ExitAdapter, make_adapter
from paceline.models.head_matrices import HeadMatrices
from paceline.models.heads import DraftVocabulary
from paceline.models.origin import Origin
from paceline.ops.linear import Linear
from paceline.train.batch import Batch
from paceline.train.divergence import DIVERGENCES
from paceline.train.head_format import write_head
from paceline.train.recipe import (
    UNSURE,
    Initial,
    Outcome,
    Parameters,
    Recipe,
    float_rows,
    in_one_call,
    next_token_guesses,
    stored_dtype,
    trainable,
    working_dtype,
)
from paceline.train.teacher import Teacher, lesson

DEPTH = 4


@dataclass(frozen=True, slots=True)
class EarlyExitSettings:
    """num_layers: that draft; inner: width of the adapter."""

    num_layers: int
    inner: int
    divergence: str = "forward_kl"


class EarlyExitRecipe(Recipe):
    """scales: the size [d] that values usually have at the exit, and where the output layer reads (−1). A few are
    hundreds of times larger than the rest at the exit; the adapter is trained as if all had size 1 there.

    Raises PacelineError for an exit that is none.
    """

    method = "early_exit"
    depth = DEPTH  # a drafted token is read as any other is: at each depth alike
    drafting: Mapping[str, Any] = MappingProxyType({"draft_confidence_threshold": 0.0})

    def __init__(
        self,
        target: Decoder,
        origin: Origin,
        vocabulary: DraftVocabulary,
        settings: EarlyExitSettings,
        seed: int,
        scales: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        if not 1 <= settings.num_layers < target.config.num_layers:
            raise PacelineError(
                f"the exit is after layer {settings.num_layers}, the target has {target.config.num_layers} layers",
                hint="it must come before the last of them",
            )
        self.target, self.origin, self.vocabulary, self.settings = target, origin, vocabulary, settings
        self.layers: tuple[int, ...] = (settings.num_layers - 1, -1)
        size, draw = target.config.hidden_size, Initial(seed, working_dtype(target), target.device)
        sizes, read = (scales[layer] for layer in self.layers) if scales else (draw.ones(size), target.norm.abs())
        self.sizes = sizes.to(draw.dtype)
        self.parameters: Parameters = trainable(
            {
                "exit.input_norm.weight": draw.ones(size),
                "exit.down.weight": draw.matrix(settings.inner, size),
                "exit.up.weight": draw.zeros(size, settings.inner),
                "exit.norm.weight": draw.copy(UNSURE * read * target.norm.sign()),
            }
        )
        self.output = float_rows(target.head, vocabulary.ids).to(working_dtype(target))

    def adapter(self) -> ExitAdapter:
        """The adapter that inference drafts with, made of the trained tensors: gradients reach them."""
        eps, output = self.target.config.rms_norm_eps, Linear(self.output)
        matrices = HeadMatrices(self.output.dtype, self.output.device)
        adapter = make_adapter(self._tensors(), matrices, self.settings.num_layers, output, self.vocabulary, eps)
        in_one_call((adapter.down, adapter.up, output))
        return adapter

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The adapter's, for states as they are."""
        p, relative = self.parameters, self.sizes.pow(2).mean().sqrt() / self.sizes
        norms = {f"exit.{name}.weight": p[f"exit.{name}.weight"] * relative for name in ("input_norm", "norm")}
        return {**p, **norms, "exit.up.weight": p["exit.up.weight"] * self.sizes[:, None]}

    def learn(self, batch: Batch) -> Outcome:
        teacher = Teacher.of(self.target, batch, self.vocabulary)
        tokens = batch.answers(1).nonzero().flatten()
        states = self.adapter().read(self._hidden(batch)[tokens])
        own = lesson(states, self.output, teacher.select(tokens), DIVERGENCES[self.settings.divergence])
        return Outcome(own.loss, len(tokens), own.counts.cpu().expand(DEPTH, 3))

    @torch.no_grad()
    def guesses(self, batch: Batch, steps: int) -> torch.Tensor:
        return next_token_guesses(self.adapter().logits(self._hidden(batch)).argmax(-1).cpu(), batch, steps)

    def _hidden(self, batch: Batch) -> torch.Tensor:
        return batch.hidden[self.settings.num_layers - 1].to(self.output.dtype)

    def describe(self) -> dict[str, Any]:
        return {**asdict(self.settings), "draft_vocab_size": len(self.output)}

    def write(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        tensors = self._tensors()
        if self.vocabulary.ids is not None:
            tensors["token_map"] = self.vocabulary.ids
        own = {"method": self.method, "early_exit_layer": self.settings.num_layers, "output_layer": "target"}
        config = {"model_type": "early_exit", "hidden_size": self.target.config.hidden_size}
        write_head(folder, config, own, self.origin, tensors, stored_dtype(self.target), provenance)
