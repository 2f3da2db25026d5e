"""What the target says after each token, in the draft's vocabulary, and how far a draft is from it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.models.decoder import Decoder
from paceline.models.heads import DraftVocabulary
from paceline.ops.packed import unpacked
from paceline.train.batch import Batch
from paceline.train.divergence import Divergence

ROWS = 256  # whole rows of logits that are held at once
ROWS_IN_CACHE = 8  # and that are looked at several times over


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's logits where the next token is the assistant's: N rows, D draft tokens.

    row: [T], which of the N rows belongs to a token. Where its arg-max is no draft token, a row is not `covered` and
    teaches nothing (as in EAGLE-3's code): renormalised, it would teach a wrong token.
    """

    row: torch.Tensor  # [T]
    logits: torch.Tensor  # [N, D]
    log_norm: torch.Tensor  # [N] over the whole vocabulary
    covered: torch.Tensor  # [N] bool
    best: torch.Tensor  # [N] arg-max of `logits`

    @classmethod
    @torch.no_grad()
    def of(cls, target: Decoder, batch: Batch, vocabulary: DraftVocabulary) -> "Teacher":
        """`batch.hidden` holds what the output layer reads (−1)."""
        wanted = batch.answers(1)
        states = batch.hidden[-1][wanted].to(target.embedding.dtype)
        head = unpacked(target.head)
        kept, norms, covered, best = [], [], [], []
        for rows in torch.split(states, ROWS):
            for logits in torch.split(F.linear(rows, head.weight, head.bias), ROWS_IN_CACHE):
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                norms.append(logits.logsumexp(-1))
                kept.append(logits if vocabulary.ids is None else logits[:, vocabulary.ids])
                highest, where = kept[-1].max(-1)
                covered.append(highest == logits.amax(-1))
                best.append(where)
        row = torch.cumsum(wanted, 0) - 1
        return cls(row, *(torch.cat(parts) for parts in (kept, norms, covered, best)))

    def select(self, tokens: torch.Tensor) -> "Selection":
        """The rows of these tokens [m], each followed by one of the assistant's."""
        return Selection(self, self.row[tokens])


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows [m] of a teacher."""

    teacher: Teacher
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Lesson:
    """loss: summed over the rows, differentiable in the states; counts: [3] rows, arg-max agreed, Σ min(p, q)."""

    loss: torch.Tensor
    counts: torch.Tensor


def lesson(states: torch.Tensor, output: torch.Tensor, selection: Selection, divergence: Divergence) -> Lesson:
    """Compare what an output layer [D, d] makes of states [m, d] with the teacher's rows.

    Gradients, the output layer's too unless it is frozen, are found at once, chunk by chunk: logits of more than
    `ROWS` rows never exist together.
    """
    loss, counts = _ThroughOutput.apply(states, output, selection, divergence)  # type: ignore[no-untyped-call]
    return Lesson(loss, counts)


class _ThroughOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, output, selection, divergence):  # type: ignore[no-untyped-def]
        total = states.new_zeros(())
        counts = torch.zeros(3, dtype=torch.float64, device=states.device)
        weight = output.detach().to(states.dtype).requires_grad_(ctx.needs_input_grad[1])
        by_states = torch.zeros_like(states)
        by_output = torch.zeros_like(weight) if weight.requires_grad else None
        for start in range(0, len(states), ROWS):
            part = slice(start, start + ROWS)
            leaf = states[part].detach().requires_grad_()
            own, gradients = _through(leaf, weight, selection.teacher, selection.rows[part], divergence)
            total += own.loss
            counts += own.counts
            by_states[part] = gradients[0]
            if by_output is not None:
                by_output += gradients[1]
        ctx.save_for_backward(by_states, by_output)
        ctx.mark_non_differentiable(counts)
        return total, counts

    @staticmethod
    def backward(ctx, grad_loss, grad_counts):  # type: ignore[no-untyped-def]
        by_states, by_output = ctx.saved_tensors
        return grad_loss * by_states, None if by_output is None else grad_loss * by_output, None, None


def _through(
    states: torch.Tensor, output: torch.Tensor, teacher: Teacher, rows: torch.Tensor, divergence: Divergence
) -> tuple[Lesson, tuple[torch.Tensor, ...]]:
    """A chunk's lesson, and its gradients by those of states and output that want one."""
    with torch.enable_grad():
        logits = F.linear(states, output)
        own = compare(logits.to(torch.promote_types(logits.dtype, torch.float32)), teacher, rows, divergence)
        gradients = torch.autograd.grad(own.loss, [leaf for leaf in (states, output) if leaf.requires_grad])
    return Lesson(own.loss.detach(), own.counts), gradients


def compare(logits: torch.Tensor, teacher: Teacher, rows: torch.Tensor, divergence: Divergence) -> Lesson:
    """Draft logits [m, D] against rows [m] of the teacher's: differentiable in all that they depend on."""
    goal, covered = teacher.logits[rows], teacher.covered[rows]
    loss = (divergence(logits, goal) * covered).sum()
    with torch.no_grad():
        own = logits.gather(-1, teacher.best[rows][:, None])[:, 0]
        agreed = (own == logits.amax(-1)) & covered
        p = (goal - teacher.log_norm[rows][:, None]).exp_()
        overlap = torch.minimum(logits.softmax(-1), p, out=p).sum()
        counts = torch.stack([overlap.new_tensor(len(rows)), agreed.sum().to(overlap), overlap]).double()
    return Lesson(loss, counts)
