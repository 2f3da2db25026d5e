"""Muon: directions made orthogonal, steps as large as AdamW's, and what is resumed is what was not interrupted."""

import torch

from paceline.train.muon import Muon, orthogonal
from paceline.train.optimizers import OPTIMIZERS, optimizers
from paceline.train.settings import Settings


def test_a_matrix_is_made_nearly_orthogonal_and_keeps_its_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((8, 24), (24, 8)):
        u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
        made = orthogonal(u @ torch.diag(torch.logspace(-1, 1, 8)) @ v)
        along = torch.diag(u.T @ made @ v.T)
        assert along.min() > 0.6 and along.max() < 1.3
        assert (made - u @ torch.diag(along) @ v).abs().max() < 0.05
    assert orthogonal(torch.zeros(3, 5)).abs().max() == 0


def test_a_step_goes_against_the_gradient_by_the_rate() -> None:
    """Of 64 × 64 with one size of gradient: the root mean square of a step is the rate, 0.2 of it by the scaling."""
    p = torch.zeros(64, 64, requires_grad=True)
    p.grad = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))[0]
    Muon([p], lr=0.01, weight_decay=0.0).step()
    assert float((p.detach() * p.grad).sum()) < 0
    assert 0.6 < float(p.detach().pow(2).mean().sqrt()) / (0.2 * 0.01) < 1.3


def test_every_parameter_is_moved_once() -> None:
    parameters = [torch.ones(4, 6, requires_grad=True), torch.ones(5, requires_grad=True)]
    for name in OPTIMIZERS:
        made = optimizers(parameters, Settings(steps=1, learning_rate=0.1, optimizer=name))
        held = [id(p) for each in made for group in each.param_groups for p in group["params"]]
        assert sorted(held) == sorted(id(p) for p in parameters)
