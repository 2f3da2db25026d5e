"""What the recipes of heads that read features have in common: a lesson at each step, and their guesses on a text."""

from collections.abc import Callable

import torch

from paceline.models.heads import FeatureHead
from paceline.train.batch import Batch
from paceline.train.recipe import Outcome
from paceline.train.teacher import Lesson
from paceline.train.unroll import unroll

Judge = Callable[[torch.Tensor, torch.Tensor], Lesson]
"""A lesson on states [m, d] that a head made, given the tokens [m] after which the target says what they should."""


def learn(head: FeatureHead, batch: Batch, steps: int, decay: float, judge: Judge) -> Outcome:
    """Σ_i decay^i · the judge's loss at step i, over the rows that have an assistant's token to predict."""
    counts = torch.zeros(steps, 3, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64, device=batch.ids.device)
    for level in unroll(head, batch, steps):
        rows = level.learns(batch)
        if rows.any():
            own = judge(level.states[rows], level.taught_by[rows])
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
