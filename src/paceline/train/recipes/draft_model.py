"""Distillation of a draft model, by default some of the target's own layers, on whole-vocabulary probabilities.

loss = a divergence of the student's distribution from the target's after every token whose next is the assistant's.
The texts are the target's (off-policy), the student's own answers (on-policy), or some of each. The student may draw
from the first `vocab_size` ids alone, as `draft_vocab_size` has it. Sources: 2310.08461 (DistillSpec), 2602.23881.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from paceline.models.decoder import Decoder
from paceline.models.heads import DraftVocabulary
from paceline.models.hf_folder import describe, write_hf_folder
from paceline.models.home import write_json
from paceline.models.origin import Origin
from paceline.models.tokenizer import Tokenizer
from paceline.ops.packed import unpacked
from paceline.train.batch import Batch
from paceline.train.divergence import DIVERGENCES
from paceline.train.forward import whole_states
from paceline.train.head_format import PROVENANCE
from paceline.train.recipe import Outcome, Parameters, Recipe, next_token_guesses, trainable, working_dtype
from paceline.train.student import pruned, pruned_weights
from paceline.train.teacher import ROWS, Teacher, compare

DEPTH = 4


@dataclass(frozen=True, slots=True)
class DraftModelSettings:
    """layers: of the target, that the student begins as; vocab_size: it draws from the first so many ids, 0: all."""

    layers: tuple[int, ...]
    vocab_size: int = 0
    divergence: str = "forward_kl"


class DraftModelRecipe(Recipe):
    """Raises PacelineError for layers that the target has not, and for a model that cannot be written as a folder."""

    method = "draft_model"
    layers: tuple[int, ...] = (-1,)
    depth = DEPTH  # a drafted token is read as any other is: at each depth alike

    def __init__(
        self, target: Decoder, origin: Origin, tokenizer: Tokenizer | None, settings: DraftModelSettings
    ) -> None:
        self.target, self.origin, self.tokenizer, self.settings = target, origin, tokenizer, settings
        config = pruned(target.config, settings.layers)
        describe(config, target.dtype)  # what cannot be written is not trained
        dtype = working_dtype(target)
        self.parameters: Parameters = trainable(pruned_weights(target, settings.layers, dtype))
        self.student = Decoder(config, self.parameters, dtype, target.device)
        size = settings.vocab_size or config.vocab_size
        whole = size >= config.vocab_size
        self.vocabulary = DraftVocabulary(config.vocab_size, None if whole else torch.arange(size))
        reduced = {} if whole else {"draft_vocab_size": size}
        self.drafting: Mapping[str, Any] = MappingProxyType({"draft_confidence_threshold": 0.0, **reduced})

    def learn(self, batch: Batch) -> Outcome:
        teacher = Teacher.of(self.target, batch, self.vocabulary)
        tokens = batch.answers(1).nonzero().flatten()
        states = self._states(batch)[tokens]
        rows = teacher.select(tokens).rows
        counts = torch.zeros(3, dtype=torch.float64)
        loss = states.new_zeros(())
        for some, own in zip(torch.split(states, ROWS), torch.split(rows, ROWS), strict=True):
            part = compare(self._logits(some), teacher, own, DIVERGENCES[self.settings.divergence])
            loss, counts = loss + part.loss, counts + part.counts.cpu()
        return Outcome(loss, len(tokens), counts.expand(DEPTH, 3))

    def _states(self, batch: Batch) -> torch.Tensor:
        return whole_states(self.student, batch.texts, (-1,))[-1]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        size = self.settings.vocab_size or self.student.config.vocab_size
        logits = F.linear(states, unpacked(self.student.head).weight[:size])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @torch.no_grad()
    def guesses(self, batch: Batch, steps: int) -> torch.Tensor:
        after = self._logits(self._states(batch)).argmax(-1).cpu()
        return next_token_guesses(after, batch, steps)

    def describe(self) -> dict[str, Any]:
        return asdict(self.settings)

    def write(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """A Hugging Face folder: any engine drafts with it, for any target of this vocabulary."""
        dtype = self.target.dtype
        weights = {name: tensor.detach().to(dtype) for name, tensor in self.parameters.items()}
        write_hf_folder(folder, self.student.config, weights, self.tokenizer)
        write_json(folder / PROVENANCE, dict(provenance))
