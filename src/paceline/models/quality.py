"""How far a model's distributions are from those of a reference with the same weights: what its layout costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.models.decoder import Decoder, Segment

WINDOW = 256  # tokens that see one another; bounds the logits in memory
_ROWS = 32  # of logits compared at a time, in float64


@dataclass(frozen=True, slots=True)
class Quality:
    """mean_kl: KL(reference ‖ model) in nats, over all positions. same_top1: share of positions with one arg-max."""

    tokens: int
    mean_kl: float
    same_top1: float
    perplexity: float
    reference_perplexity: float


def compare(model: Decoder, reference: Decoder, ids: Sequence[int]) -> Quality:
    """Next-token distributions after each token of `ids`, read in windows. Needs two tokens or more."""
    kl = same = loss = reference_loss = 0.0
    count = scored = 0
    for window in _windows(ids):
        ours, theirs = _hidden(model, window), _hidden(reference, window)
        following = torch.tensor([*window[1:], -1])
        for first in range(0, len(window), _ROWS):
            rows = slice(first, first + _ROWS)
            q = model.logits(ours[rows]).double().log_softmax(-1)
            p = reference.logits(theirs[rows]).double().log_softmax(-1)
            kl += float((p.exp() * (p - q)).sum())
            same += float((p.argmax(-1) == q.argmax(-1)).sum())
            known = following[rows] >= 0
            target = following[rows][known][:, None]
            loss -= float(q[known].gather(1, target).sum())
            reference_loss -= float(p[known].gather(1, target).sum())
            count, scored = count + len(q), scored + int(known.sum())
    mean, reference_mean = torch.tensor([loss / scored, reference_loss / scored], dtype=torch.float64).exp().tolist()
    return Quality(count, kl / count, same / count, mean, reference_mean)


def _windows(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """The last one is left out if it is a single token, which has nothing to follow it."""
    for first in range(0, len(ids), WINDOW):
        window = ids[first : first + WINDOW]
        if len(window) > 1:
            yield window


def _hidden(decoder: Decoder, ids: Sequence[int]) -> torch.Tensor:
    cache = decoder.new_pool(len(ids)).new_sequence()
    return decoder.forward([Segment(cache, ids)]).hidden
