"""Medusa-2: heads and a copy of the target learn together. The copy is a new target, and the heads are for it alone.

loss = KL(p ‖ q) + λ · Σ_k decay^k · KL(p ‖ q_k), where p is what the ORIGINAL target says, q what the copy does (so it
stays near the original) and q_k what head k reads from the copy's states, through the copy's output layer. The copy's
learning rate is a fraction of the heads': what it knows must not be lost while they still know nothing. Source:
2401.10774, §3.2 (Medusa-2, with its self-distillation).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.heads import DraftVocabulary
from paceline.models.load import LoadedModel
from paceline.models.origin import Origin
from paceline.train.batch import Batch
from paceline.train.divergence import DIVERGENCES
from paceline.train.recipe import Outcome, Recipe
from paceline.train.recipes.medusa import MedusaRecipe, MedusaSettings
from paceline.train.tuned import TunedTarget

TARGET = "target"


@dataclass(frozen=True, slots=True)
class JointSettings:
    """heads_weight: λ; backbone_rate: the copy's learning rate as a share of the heads'."""

    heads_weight: float = 0.2
    backbone_rate: float = 0.05


class JointMedusaRecipe(Recipe):
    """`medusa` holds the heads, `copy` the new target, which is written into the folder `target` beside them.

    Raises PacelineError for a weight or a rate that cannot be.
    """

    method = "medusa"
    layers: tuple[int, ...] = (-1,)
    own_target = TARGET

    def __init__(
        self,
        model: LoadedModel,
        origin: Origin,
        vocabulary: DraftVocabulary,
        settings: MedusaSettings,
        joint: JointSettings,
        seed: int,
    ) -> None:
        of_joint = (("heads' weight", joint.heads_weight, math.inf), ("backbone's rate", joint.backbone_rate, 0.25))
        for name, value, most in of_joint:
            if not 0 < value <= most or value == math.inf:
                raise PacelineError(f"the {name} is {value}; it must be above 0 and at most {most}")
        self.medusa, self.joint = MedusaRecipe(model.decoder, origin, vocabulary, settings, seed), joint
        self.copy = TunedTarget(model, origin)
        backbone = {f"{TARGET}.{name}": tensor for name, tensor in self.copy.parameters.items()}
        self.parameters = {**self.medusa.parameters, **backbone}
        self.rates: Mapping[str, float] = dict.fromkeys(backbone, joint.backbone_rate)
        self.depth, self.drafting = self.medusa.depth, self.medusa.drafting

    def learn(self, batch: Batch) -> Outcome:
        tokens, said = self.copy.original_says(batch)
        states = self.copy.states(batch, (-1,))[-1]
        own = self.copy.compare(states[tokens], said, DIVERGENCES[self.medusa.settings.divergence])
        heads = self.medusa.learn_from(batch, states, self._output())
        return Outcome(own.loss + self.joint.heads_weight * heads.loss, len(tokens), heads.counts)

    @torch.no_grad()
    def guesses(self, batch: Batch, steps: int) -> torch.Tensor:
        return self.medusa.guesses_from(batch, self.copy.states(batch, (-1,))[-1], self._output(), steps)

    def _output(self) -> torch.Tensor:
        return self.copy.output(self.medusa.vocabulary)

    def describe(self) -> dict[str, Any]:
        joint = {"heads_weight": self.joint.heads_weight, "backbone_rate": self.joint.backbone_rate}
        return {**self.medusa.describe(), **joint}

    def write(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """The copy as a Hugging Face folder in `target`, and the heads, which fit it and nothing else."""
        origin = self.copy.write(folder / TARGET, provenance)
        named = replace(origin, name=f"the copy of {origin.name} in its folder `{TARGET}`")
        self.medusa.write_for(named, folder, provenance)
