"""Muon: momentum whose directions all get the same step, for matrices (Jordan et al. 2024; scaled as in 2502.16982).

A few directions of a target's states carry most of the gradient. AdamW's steps, large in all entries at once, add up
along them; made orthogonal, a step moves none further than another, so that rates may be higher and runs shorter.
torch.optim.Muon is the same from torch 2.9 on; the oldest that we run with has none.
"""

from collections.abc import Callable, Iterable

import torch

MOMENTUM = 0.95
_QUINTIC = (3.4445, -4.7750, 2.0315)  # of the Newton–Schulz iteration; singular values end near 1
_ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, times 0.2 √max(rows, columns): entries then move as far as AdamW's do."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p].setdefault("momentum", torch.zeros_like(p))
                held.lerp_(p.grad, 1 - MOMENTUM)
                direction = orthogonal(p.grad.lerp(held, MOMENTUM))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(direction, alpha=-0.2 * group["lr"] * max(p.shape) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its singular values brought near 1; zero stays zero."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix / matrix.norm().clamp(min=1e-20)).to(torch.bfloat16)
    x = x.T if tall else x
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    made: torch.Tensor = x.T if tall else x
    return made.to(matrix.dtype)
