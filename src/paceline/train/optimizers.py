"""Which optimizer moves which of the trained tensors. Decay is for matrices alone."""

from collections.abc import Callable, Iterable, Sequence

import torch

from paceline.train.muon import Muon
from paceline.train.recipe import Recipe
from paceline.train.settings import Settings

Tensors = Sequence[torch.Tensor]


def _adamw(matrices: Tensors, vectors: Tensors, rate: float, decay: float) -> list[torch.optim.Optimizer]:
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))]


def _muon(matrices: Tensors, vectors: Tensors, rate: float, decay: float) -> list[torch.optim.Optimizer]:
    others = torch.optim.AdamW(vectors, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, rate, decay), others]


OPTIMIZERS: dict[str, Callable[[Tensors, Tensors, float, float], list[torch.optim.Optimizer]]] = {
    "adamw": _adamw,
    "muon": _muon,
}


def optimizers(parameters: Iterable[torch.Tensor], settings: Settings) -> list[torch.optim.Optimizer]:
    """Those that together move all parameters."""
    tensors = list(parameters)
    matrices, vectors = [p for p in tensors if p.dim() > 1], [p for p in tensors if p.dim() <= 1]
    return OPTIMIZERS[settings.optimizer](matrices, vectors, settings.learning_rate, settings.weight_decay)


def paced(recipe: Recipe, settings: Settings) -> list[tuple[float, torch.optim.Optimizer]]:
    """Those that move a recipe's parameters, each with the factor of its learning rate."""
    by_factor: dict[float, list[torch.Tensor]] = {}
    for name, parameter in recipe.parameters.items():
        by_factor.setdefault(recipe.rates.get(name, 1.0), []).append(parameter)
    return [(factor, made) for factor, own in by_factor.items() for made in optimizers(own, settings)]
