"""What the recipes of heads that read features have in common: a lesson at each step, and their guesses on a text."""

import torch

from paceline.models.heads import FeatureHead
from paceline.train.batch import Batch
from paceline.train.divergence import Divergence
from paceline.train.recipe import Outcome
from paceline.train.teacher import Teacher, lesson
from paceline.train.unroll import unroll


def learn(
    head: FeatureHead,
    teacher: Teacher,
    batch: Batch,
    output: torch.Tensor,
    steps: int,
    decay: float,
    divergence: Divergence,
) -> Outcome:
    """Σ_i decay^i · divergence at step i, over the rows that have an assistant's token to predict.

    `output` [D, d]: the frozen output layer's rows, of the draft vocabulary that the teacher speaks.
    """
    counts = torch.zeros(steps, 3, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64, device=batch.ids.device)
    for level in unroll(head, batch, steps):
        rows = level.learns(batch)
        if rows.any():
            own = lesson(head.read(level.states[rows]), output, teacher.select(level.taught_by[rows]), divergence)
            loss = loss + decay**level.step * own.loss
            counts[level.step] = own.counts.cpu()
    return Outcome(loss, int(counts[0, 0]), counts)


@torch.no_grad()
def guess(head: FeatureHead, batch: Batch, steps: int) -> torch.Tensor:
    """[steps, T] token ids, −1 where there is nothing to predict."""
    guesses = torch.full((steps, len(batch.ids)), -1)
    for level in unroll(head, batch, steps):
        rows = level.learns(batch)
        if rows.any():
            guesses[level.step, level.tokens[rows].cpu()] = head.logits(level.states[rows]).argmax(-1).cpu()
    return guesses
