"""Divergences: against sums written out, zero where the distributions agree, and with the right gradient."""

import math
from pathlib import Path

import pytest
import torch
from train.making import batch_of, random_samples, target_of

from paceline.models.heads import DraftVocabulary
from paceline.train.divergence import DIVERGENCES, forward_kl
from paceline.train.teacher import Teacher, compare, lesson

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


def test_the_output_layer_learns_what_autograd_says(tiny_llama_dir: Path) -> None:
    model = target_of(tiny_llama_dir, "fp64")
    batch = batch_of(model, random_samples(40, 250), (-1,))
    tokens = batch.answers(1).nonzero().flatten()
    assert len(tokens) > 256  # several chunks
    teacher = Teacher.of(model.decoder, batch, DraftVocabulary(model.config.vocab_size))
    states = (batch.hidden[-1][tokens] * 0.9).requires_grad_()
    output = (model.decoder.head.weight * 1.1).requires_grad_()
    ours = lesson(states, output, teacher.select(tokens), forward_kl)
    direct = compare(states @ output.T, teacher, teacher.row[tokens], forward_kl)
    torch.testing.assert_close(ours.loss, direct.loss)
    for mine, right in zip(
        torch.autograd.grad(3 * ours.loss, (states, output)),
        torch.autograd.grad(3 * direct.loss, (states, output)),
        strict=True,
    ):
        torch.testing.assert_close(mine, right)
