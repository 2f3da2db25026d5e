"""Medusa: heads that each guess one token further ahead from the target's last hidden state; the target is untouched.

loss = Σ_k decay^k · KL(p ‖ q_k), where p is what the target says once it has read the text up to there. The output
layer is the target's, frozen, shared by all heads and not stored; the blocks begin as the identity, so that training
starts from the target's own next token. Source: 2401.10774, §3.1 (Medusa-1).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from paceline.models.decoder import Decoder
from paceline.models.heads import DraftVocabulary, MedusaHead, MedusaHeads
from paceline.models.origin import Origin
from paceline.ops.linear import Linear
from paceline.train.batch import Batch
from paceline.train.divergence import DIVERGENCES
from paceline.train.head_format import write_head
from paceline.train.recipe import (
    Initial,
    Outcome,
    Parameters,
    Recipe,
    float_rows,
    in_one_call,
    stored_dtype,
    trainable,
    working_dtype,
)
from paceline.train.teacher import Teacher, lesson


@dataclass(frozen=True, slots=True)
class MedusaSettings:
    """decay: a further head counts so much less."""

    num_heads: int = 4
    num_blocks: int = 1
    decay: float = 0.8
    divergence: str = "forward_kl"


class MedusaRecipe(Recipe):
    method = "medusa"
    layers: tuple[int, ...] = (-1,)
    drafting: Mapping[str, Any] = MappingProxyType({"speculative_token_tree": "chain"})

    def __init__(
        self, target: Decoder, origin: Origin, vocabulary: DraftVocabulary, settings: MedusaSettings, seed: int
    ) -> None:
        self.target, self.origin, self.vocabulary, self.settings = target, origin, vocabulary, settings
        self.depth = settings.num_heads
        size, draw = target.config.hidden_size, Initial(seed, working_dtype(target), target.device)
        tensors = {}
        for head in range(settings.num_heads):
            for block in range(settings.num_blocks):
                tensors[f"{head}.{block}.linear.weight"] = draw.zeros(size, size)
                tensors[f"{head}.{block}.linear.bias"] = draw.zeros(size)
        self.parameters: Parameters = trainable(tensors)
        self.output = float_rows(target.head, vocabulary.ids).to(working_dtype(target))

    def heads(self) -> MedusaHeads:
        """The heads that inference drafts with, made of the trained tensors: gradients reach them."""
        return self.heads_on(self.output)

    def heads_on(self, output: torch.Tensor) -> MedusaHeads:
        """The same, read by another output layer [D, d]."""
        p, s = self.parameters, self.settings
        shared = Linear(output)
        heads = []
        for head in range(s.num_heads):
            names = [f"{head}.{block}.linear" for block in range(s.num_blocks)]
            blocks = tuple(Linear(p[f"{name}.weight"], p[f"{name}.bias"]) for name in names)
            in_one_call((*blocks, shared))
            heads.append(MedusaHead(blocks, shared))
        return MedusaHeads(tuple(heads), self.vocabulary, output.dtype)

    def learn(self, batch: Batch) -> Outcome:
        return self.learn_from(batch, self._hidden(batch), self.output)

    def learn_from(self, batch: Batch, hidden: torch.Tensor, output: torch.Tensor) -> Outcome:
        """From states [T, d] at the batch's tokens; the output layer [D, d] may be one that is trained."""
        teacher, heads = Teacher.of(self.target, batch, self.vocabulary), self.heads_on(output)
        counts = torch.zeros(self.depth, 3, dtype=torch.float64)
        loss = torch.zeros((), dtype=torch.float64, device=batch.ids.device)
        for head in range(self.settings.num_heads):
            tokens = batch.answers(head + 2).nonzero().flatten()
            if len(tokens):
                states = heads.states(head, hidden[tokens])
                divergence = DIVERGENCES[self.settings.divergence]
                own = lesson(states, output, teacher.select(tokens + head + 1), divergence)
                loss = loss + self.settings.decay**head * own.loss
                counts[head] = own.counts.cpu()
        return Outcome(loss, int(counts[0, 0]), counts)

    def guesses(self, batch: Batch, steps: int) -> torch.Tensor:
        return self.guesses_from(batch, self._hidden(batch), self.output, steps)

    @torch.no_grad()
    def guesses_from(self, batch: Batch, hidden: torch.Tensor, output: torch.Tensor, steps: int) -> torch.Tensor:
        """The same from other states, by another output layer."""
        heads, guesses = self.heads_on(output), torch.full((steps, len(batch.ids)), -1)
        for head in range(min(steps, self.depth)):
            tokens = batch.answers(head + 2).nonzero().flatten()
            guesses[head, tokens.cpu()] = heads.logits(head, hidden[tokens]).argmax(-1).cpu()
        return guesses

    def _hidden(self, batch: Batch) -> torch.Tensor:
        return batch.hidden[-1].to(self.output.dtype)

    def describe(self) -> dict[str, Any]:
        return {**asdict(self.settings), "draft_vocab_size": len(self.output)}

    def write(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        self.write_for(self.origin, folder, provenance)

    def write_for(self, origin: Origin, folder: Path, provenance: Mapping[str, Any]) -> None:
        """As heads of another target."""
        tensors = dict(self.parameters)
        if self.vocabulary.ids is not None:
            tensors["token_map"] = self.vocabulary.ids
        config = {
            "model_type": "medusa",
            "medusa_num_heads": self.settings.num_heads,
            "medusa_num_layers": self.settings.num_blocks,
            "base_model_name_or_path": origin.name,
            "hidden_size": self.target.config.hidden_size,
            "vocab_size": self.target.config.vocab_size,
        }
        own = {"method": self.method, "output_layer": "target"}
        write_head(folder, config, own, origin, tensors, stored_dtype(self.target), provenance)
