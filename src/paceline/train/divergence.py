"""How far a draft's distribution q is from the target's p, row by row; all differentiable in q.

Sources: DistillSpec 2310.08461 (the first four); 2602.23881 (−log Σ min(p, q): the acceptance itself).
"""

from collections.abc import Callable

import torch

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(draft logits [n, V], target logits [n, V]) → [n]; 0 where they agree."""


def forward_kl(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Σ p log(p / q). Its gradient is that of cross-entropy with soft labels."""
    distance: torch.Tensor = _ForwardKL.apply(draft, target)  # type: ignore[no-untyped-call]
    return distance


class _ForwardKL(torch.autograd.Function):
    """The default, over the widest matrices of a step. Its gradient q − p is at hand, which saves as many passes."""

    @staticmethod
    def forward(ctx, draft, target):  # type: ignore[no-untyped-def]
        log_q, log_p = draft.log_softmax(-1), target.log_softmax(-1)
        p = log_p.exp()
        distance = log_p.sub_(log_q).mul_(p).sum(-1)
        ctx.save_for_backward(log_q.exp_().sub_(p))
        return distance

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (difference,) = ctx.saved_tensors
        return grad[..., None] * difference, None


def reverse_kl(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Σ q log(q / p)."""
    log_q, log_p = draft.log_softmax(-1), target.log_softmax(-1)
    return _mean_difference(log_q, log_q, log_p)


def jensen_shannon(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """½ KL(p‖m) + ½ KL(q‖m) with m = ½(p + q)."""
    log_q, log_p = draft.log_softmax(-1), target.log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - torch.log(log_p.new_tensor(2.0))
    return (_mean_difference(log_p, log_p, log_m) + _mean_difference(log_q, log_q, log_m)) / 2


def total_variation(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """½ Σ |p − q|: how often a draft is rejected under `standard`."""
    return (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1) / 2


def rejection(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """−log Σ min(p, q): the log-likelihood of acceptance."""
    overlap = torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)
    return -overlap.clamp(min=1e-9).log()


def _mean_difference(of: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Σ exp(of) · (first − second), 0 where exp(of) is: 0 · ∞ is no number."""
    weight = of.exp()
    return torch.where(weight > 0, weight * (first - second), 0.0).sum(-1)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
    "acceptance": rejection,
}
