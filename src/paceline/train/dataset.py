"""Samples to train on, as `paceline data generate` writes them, and their order."""

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.train.conversation import Span
from paceline.train.journal import read_journal

KIND = "samples"


@dataclass(frozen=True, slots=True)
class Sample:
    """A document: token ids, and the spans of them that are the assistant's."""

    id: str
    token_ids: tuple[int, ...]
    assistant: tuple[Span, ...]

    @property
    def num_assistant(self) -> int:
        return sum(stop - start for start, stop in self.assistant)

    @property
    def num_prompt(self) -> int:
        """Tokens before the first answer."""
        return self.assistant[0][0]

    def mask(self) -> list[bool]:
        """For each token whether the assistant wrote it."""
        mask = [False] * len(self.token_ids)
        for start, stop in self.assistant:
            mask[start:stop] = [True] * (stop - start)
        return mask


@dataclass(frozen=True, slots=True)
class Samples:
    """What a file holds; `skipped` counts by reason what is of no use: "empty", "no answer", "too long"."""

    about: dict[str, Any]
    kept: tuple[Sample, ...]
    skipped: dict[str, int]


def read_samples(path: Path, max_length: int) -> Samples:
    """Raises PacelineError for a file of something else, a line that is no sample, or if none is of use."""
    about, *records = read_journal(path, KIND)
    kept: list[Sample] = []
    skipped: Counter[str] = Counter()
    for number, record in enumerate(records, 2):
        for sample in _samples(path, number, record):
            if (reason := _useless(sample, max_length)) is not None:
                skipped[reason] += 1
            else:
                kept.append(sample)
    if not kept:
        raise PacelineError(f"{path} holds no sample of use: {dict(skipped) or 'it is empty'}", hint="generate more")
    return Samples(about, tuple(kept), dict(skipped))


def _samples(path: Path, number: int, record: dict[str, Any]) -> list[Sample]:
    """Of one prompt: as many as there are beginnings that its template wrote."""
    try:
        return [_sample(str(record["id"]), values) for values in record["samples"]]
    except (LookupError, TypeError, ValueError) as error:
        raise PacelineError(f"{path}, line {number}: no sample: {error}") from error


def _sample(name: str, values: dict[str, Any]) -> Sample:
    ids, spans = tuple(values["token_ids"]), tuple((start, stop) for start, stop in values["assistant"])
    edges = [0, *(edge for span in spans for edge in span), len(ids)]
    if edges != sorted(edges) or not all(isinstance(token, int) for token in ids):
        raise ValueError("spans that are not in order, or tokens that are no numbers")
    return Sample(name, ids, spans)


def _useless(sample: Sample, max_length: int) -> str | None:
    if not sample.token_ids:
        return "empty"
    if len(sample.token_ids) > max_length:
        return "too long"
    return None if sample.num_assistant and len(sample.token_ids) > 2 else "no answer"


def hold_aside(samples: Sequence[Sample], count: int) -> tuple[list[Sample], list[Sample]]:
    """(for training, held aside): by the hash of the ids, so that the same are held aside whenever they are there."""
    ids = sorted({sample.id for sample in samples}, key=lambda own: hashlib.sha256(own.encode()).digest())
    aside = set(ids[:count])
    return [s for s in samples if s.id not in aside], [s for s in samples if s.id in aside]


def packs_per_epoch(samples: Sequence[Sample], max_tokens: int, seed: int) -> int:
    """How many `batches` the first epoch takes."""
    left, count = len(samples), 0
    packs = batches(samples, max_tokens, seed)
    while left > 0:
        left -= len(next(packs))
        count += 1
    return count


def batches(samples: Sequence[Sample], max_tokens: int, seed: int) -> Iterator[list[Sample]]:
    """Packs of samples of at most `max_tokens` tokens together (one alone may have more), epoch after epoch.

    The order is new in each epoch and follows from the seed. A pack is a list: its documents never see each other.
    """
    for epoch in range(1_000_000):
        order = list(samples)
        random.Random(f"paceline order {seed} {epoch}").shuffle(order)
        pack: list[Sample] = []
        for sample in order:
            if pack and sum(len(other.token_ids) for other in pack) + len(sample.token_ids) > max_tokens:
                yield pack
                pack = []
            pack.append(sample)
        if pack:
            yield pack
