"""Texts that the student wrote itself: it learns to be right where it will be, not where the target would be."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.params import SamplingParams
from paceline.decode import decode
from paceline.drafters.none import NoDrafter
from paceline.models.decoder import Decoder
from paceline.train.dataset import Sample
from paceline.train.generate import derived_seed


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """Replaces the first answer of a share of the samples, and all after it, by what the student now samples there.

    Which samples, and the seeds, follow from the run's seed and the pack's number: a resumed run draws the same.
    """

    student: Decoder
    share: float  # 0: the target's texts, 1: the student's alone
    seed: int
    temperature: float = 1.0

    def __call__(self, samples: Sequence[Sample], number: int) -> list[Sample]:
        return [self._rewritten(sample, number) if self._is_due(sample, number) else sample for sample in samples]

    def _is_due(self, sample: Sample, number: int) -> bool:
        return derived_seed("on-policy", self.seed, number, sample.id) < self.share * 2**64

    def _rewritten(self, sample: Sample, number: int) -> Sample:
        start, stop = sample.assistant[0]
        if start == 0 or start == stop:
            return sample
        params = SamplingParams(
            temperature=self.temperature,
            max_tokens=stop - start,
            seed=derived_seed("student", self.seed, number, sample.id),
        )
        with torch.no_grad():  # its weights are being trained
            steps = decode(self.student, sample.token_ids[:start], params, NoDrafter(), 0)
            answer = tuple(token for step in steps for token in step.token_ids)
        return Sample(sample.id, sample.token_ids[:start] + answer, ((start, start + len(answer)),))
