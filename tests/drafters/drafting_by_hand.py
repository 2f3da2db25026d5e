"""Requests outside of an engine: a sampler that notes the logits it sees, and transformers' states of the target."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.drafting import DraftSampler, Draw, TopDrafts
from paceline.core.params import SamplingParams
from paceline.core.path import PathSampler
from paceline.core.rng import CounterNoise
from paceline.drafters.base import Features

NUM_LAYERS = 8
TARGET_HF = tiny.hf_model(tiny.hf_config("llama", num_hidden_layers=NUM_LAYERS), dtype=torch.float64)
TARGET = tiny.decoder_of(TARGET_HF, torch.float64)
EMBED = TARGET_HF.get_input_embeddings().weight.detach()
OUTPUT = TARGET_HF.get_output_embeddings().weight.detach()


@dataclass(frozen=True)
class Noting:
    """Greedy drafts; `noted[path]`: the draft logits after a drafted path."""

    inner: TopDrafts
    noted: dict[tuple[int, ...], Tensor]
    path: tuple[int, ...] = ()
    prunable = True

    def draw(self, logits: Tensor, k: int = 1) -> Draw:
        self.noted[self.path] = logits
        return self.inner.draw(logits, k)

    def scored(self, logits: Tensor, k: int) -> Draw:
        self.noted[self.path] = logits
        return self.inner.scored(logits, k)

    def advance(self, *tokens: int) -> "Noting":
        return Noting(self.inner.advance(*tokens), self.noted, (*self.path, *tokens))


@dataclass
class Request:
    token_ids: list[int]
    request_id: int = 0
    noted: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    private_drafts: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return 1

    @property
    def draft_sampler(self) -> DraftSampler:
        self.noted.clear()
        path = PathSampler.start(SamplingParams(temperature=0), self.token_ids, 256, CounterNoise(1))
        return Noting(TopDrafts(path), self.noted)


def hidden_states(text: list[int], layers: Iterable[int], model: PreTrainedModel = TARGET_HF) -> dict[int, Tensor]:
    """transformers' states [n, d] at `text`: outputs of layers, or −1 for what the output layer reads."""
    with torch.no_grad():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    return {layer: states[-1][0] if layer < 0 else states[layer + 1][0] for layer in layers}


def features(text: list[int], layers: Iterable[int], start: int, stop: int) -> Features:
    return Features({layer: rows[start:stop] for layer, rows in hidden_states(text[:stop], layers).items()})
