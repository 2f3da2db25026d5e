"""A reduced draft vocabulary: the tokens that the target says most, and how much of its text they make up."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.models.heads import DraftVocabulary
from paceline.train.dataset import Sample


@dataclass(frozen=True, slots=True)
class Coverage:
    """What share of the assistant's tokens a draft vocabulary holds, in training and in what is held aside."""

    size: int
    training: float
    held_aside: float


def most_frequent(samples: Sequence[Sample], size: int, vocab_size: int, always: Iterable[int] = ()) -> DraftVocabulary:
    """The `size` tokens that assistants say most, in id order, `always` among them; 0 is the whole vocabulary."""
    if size == 0 or size >= vocab_size:
        return DraftVocabulary(vocab_size)
    counts = _counts(samples)
    wanted = list(dict.fromkeys(always))
    # unseen ones by id: byte-pair vocabularies number frequent tokens first
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    chosen = list(dict.fromkeys([*wanted, *ranked]))[:size]
    return DraftVocabulary(vocab_size, torch.tensor(sorted(chosen)))


def coverage(vocabulary: DraftVocabulary, training: Sequence[Sample], aside: Sequence[Sample]) -> Coverage:
    if vocabulary.ids is None:
        return Coverage(vocabulary.size, 1.0, 1.0)
    held = set(vocabulary.ids.tolist())
    return Coverage(len(held), _share(held, training), _share(held, aside))


def _counts(samples: Sequence[Sample]) -> Counter[int]:
    return Counter(token for s in samples for start, stop in s.assistant for token in s.token_ids[start:stop])


def _share(held: set[int], samples: Sequence[Sample]) -> float:
    counts = _counts(samples)
    return sum(n for token, n in counts.items() if token in held) / max(1, counts.total())
