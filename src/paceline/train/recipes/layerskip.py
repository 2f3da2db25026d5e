"""LayerSkip: a copy of the target is trained until its first layers draft for it, without an adapter. A new target.

Two things teach it. Layers are left out at random, document by document, later ones more often:
p_l = p_max · (exp(l · ln 2 / (L − 1)) − 1), so that less hangs on them. And some layers are read by the final norm and
the output layer: every R-th, from one that is drawn anew for each batch, and always the last. The loss is
Σ_l e(l) · KL(p ‖ q_l) / Σ_l e(l), where p is what the ORIGINAL target says: the copy stays near it, in all its layers.
e(l) = s · Σ_{i ≤ l} i, and L − 1 more for the last layer (of s · Σ_{i ≤ L − 2} i). Source: 2404.16710, §4.1.
"""

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.load import LoadedModel
from paceline.models.origin import Origin
from paceline.train.batch import Batch
from paceline.train.divergence import DIVERGENCES
from paceline.train.generate import derived_seed
from paceline.train.recipe import Outcome, Recipe, next_token_guesses
from paceline.train.tuned import TunedTarget

DEPTH = 4


@dataclass(frozen=True, slots=True)
class LayerSkipSettings:
    """num_layers: that draft when it is measured; dropout: p_max; every: R; exit_scale: s."""

    num_layers: int
    dropout: float = 0.1
    every: int = 8
    exit_scale: float = 0.2
    divergence: str = "forward_kl"


def dropout_rates(num_layers: int, highest: float) -> list[float]:
    """How often each layer is left out."""
    return [highest * (math.exp(layer * math.log(2) / (num_layers - 1)) - 1) for layer in range(num_layers)]


def exit_weights(layers: Iterable[int], num_layers: int, scale: float) -> dict[int, float]:
    """What the loss after each of these layers counts; 1 together."""
    last = num_layers - 1
    sums = {layer: scale * layer * (layer + 1) / 2 for layer in layers}
    if last in sums:
        sums[last] = last + scale * last * (last - 1) / 2
    return {layer: own / sum(sums.values()) for layer, own in sums.items()}


class LayerSkipRecipe(Recipe):
    """Raises PacelineError for an exit that is none, and for shares and distances that cannot be."""

    method = "early_exit"
    layers: tuple[int, ...] = (-1,)
    depth = DEPTH  # a drafted token is read as any other is: at each depth alike
    own_target = "."

    def __init__(self, model: LoadedModel, origin: Origin, settings: LayerSkipSettings, seed: int) -> None:
        count = model.config.num_layers
        if not 1 <= settings.num_layers < count:
            raise PacelineError(
                f"the exit is after layer {settings.num_layers}, the target has {count} layers",
                hint="it must come before the last of them",
            )
        if not 0 <= settings.dropout <= 1:
            raise PacelineError(f"the dropout is {settings.dropout}; it must be from 0 to 1")
        if not 1 <= settings.every <= count:
            raise PacelineError(
                f"every {settings.every} layers one is read; it must be 1 to {count}, the layers' count"
            )
        if not 0 < settings.exit_scale < math.inf:
            raise PacelineError(f"the exit scale is {settings.exit_scale}; it must be above 0")
        self.settings, self.seed, self.count = settings, seed, count
        self.copy = TunedTarget(model, origin)
        self.parameters = self.copy.parameters
        exits = {"early_exit_layer": settings.num_layers, "draft_confidence_threshold": 0.0}
        self.drafting: Mapping[str, Any] = MappingProxyType({"model": None, **exits})

    def exits(self, batch: Batch) -> dict[int, float]:
        """The layers that are read this time, and what each counts."""
        start = self._drawn(batch, "exits").randrange(self.settings.every)
        layers = {*range(start, self.count, self.settings.every), self.count - 1}
        return exit_weights(sorted(layers), self.count, self.settings.exit_scale)

    def left_out(self, batch: Batch) -> dict[int, torch.Tensor]:
        """For each layer the tokens [T] of documents that pass it by, if there are any."""
        source, lengths, found = self._drawn(batch, "dropout"), torch.tensor(batch.lengths), {}
        for layer, rate in enumerate(dropout_rates(self.count, self.settings.dropout)):
            documents = [source.random() < rate for _ in batch.lengths]
            if any(documents):
                found[layer] = torch.tensor(documents).repeat_interleave(lengths).to(batch.ids.device)
        return found

    def _drawn(self, batch: Batch, what: str) -> random.Random:
        """Of the batch and the seed alone: the same in a resumed run, and whichever process has the batch."""
        return random.Random(derived_seed("layerskip", what, self.seed, batch.lengths, batch.ids.tolist()))

    def learn(self, batch: Batch) -> Outcome:
        divergence, drafting = DIVERGENCES[self.settings.divergence], self.settings.num_layers - 1
        tokens, said = self.copy.original_says(batch)
        exits = self.exits(batch)
        states = self.copy.states(batch, (*exits, drafting), self.left_out(batch))
        loss = torch.zeros((), dtype=torch.float64, device=batch.ids.device)
        for layer, weight in exits.items():
            loss = loss + weight * self.copy.compare(states[layer][tokens], said, divergence).loss
        with torch.no_grad():
            counts = self.copy.compare(states[drafting][tokens], said, divergence).counts.cpu()
        return Outcome(loss, len(tokens), counts.expand(DEPTH, 3))

    @torch.no_grad()
    def guesses(self, batch: Batch, steps: int) -> torch.Tensor:
        layer = self.settings.num_layers - 1
        logits = self.copy.states(batch, (layer,))[layer] @ self.copy.output(self.copy.vocabulary).T
        return next_token_guesses(logits.argmax(-1).cpu(), batch, steps)

    def describe(self) -> dict[str, Any]:
        return {**asdict(self.settings), "recipe": "layerskip"}

    def write(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """A Hugging Face folder: the new target, which drafts for itself."""
        self.copy.write(folder, provenance)
