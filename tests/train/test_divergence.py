"""Divergences: against sums written out, zero where the distributions agree, and with the right gradient."""

import math

import pytest
import torch

from paceline.train.divergence import DIVERGENCES

P = [0.5, 0.3, 0.2]
Q = [0.2, 0.2, 0.6]
M = [(p + q) / 2 for p, q in zip(P, Q, strict=True)]


def kl(a: list[float], b: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))


EXPECTED = {
    "forward_kl": kl(P, Q),
    "reverse_kl": kl(Q, P),
    "jsd": (kl(P, M) + kl(Q, M)) / 2,
    "tv": 0.4,
    "acceptance": -math.log(0.2 + 0.2 + 0.2),
}


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log() + 1.5


@pytest.mark.parametrize("name", DIVERGENCES)
def test_it_is_what_its_definition_says(name: str) -> None:
    found = DIVERGENCES[name](logits(Q, P), logits(P, P))
    torch.testing.assert_close(found, torch.tensor([EXPECTED[name], 0.0], dtype=torch.float64))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_its_gradient_is_right_and_finite_where_probabilities_vanish(name: str) -> None:
    draft = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    target = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert torch.autograd.gradcheck(lambda q: DIVERGENCES[name](q, target), (draft,))
    extreme = torch.tensor([[0.0, 900.0, -900.0]]).requires_grad_()
    DIVERGENCES[name](extreme, torch.tensor([[900.0, 0.0, -900.0]])).sum().backward()
    assert extreme.grad is not None and extreme.grad.isfinite().all()
