"""Documents side by side, with what the target computed at their tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.models.decoder import Decoder
from paceline.train.dataset import Sample
from paceline.train.forward import Texts, whole_states


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of several documents, one after another: nothing is padded, and no document sees another.

    hidden[layer]: [T, d], the target's states there: outputs of layers, −1: what its output layer reads.
    """

    lengths: tuple[int, ...]
    ids: torch.Tensor  # [T]
    assistant: torch.Tensor  # [T] bool: the assistant wrote this token
    hidden: Mapping[int, torch.Tensor]
    positions: torch.Tensor = field(init=False)  # [T] in the own document
    following: torch.Tensor = field(init=False)  # [T] how many tokens of it come after

    def __post_init__(self) -> None:
        counts = [torch.arange(length) for length in self.lengths]
        positions = torch.cat(counts).to(self.ids.device)
        object.__setattr__(self, "positions", positions)
        following = torch.cat([count.flip(0) for count in counts]).to(self.ids.device)
        object.__setattr__(self, "following", following)

    @classmethod
    def of(cls, samples: Sequence[Sample], hidden: Mapping[int, torch.Tensor]) -> "Batch":
        device = next(iter(hidden.values())).device if hidden else torch.device("cpu")
        ids = torch.tensor([token for sample in samples for token in sample.token_ids], device=device)
        assistant = torch.tensor([own for sample in samples for own in sample.mask()], device=device)
        return cls(tuple(len(sample.token_ids) for sample in samples), ids, assistant, hidden)

    def answers(self, ahead: int) -> torch.Tensor:
        """For each token [T] whether the one `ahead` places on is there and is the assistant's."""
        there = self.following >= ahead
        places = (torch.arange(len(self.ids), device=self.ids.device) + ahead).clamp(max=len(self.ids) - 1)
        return there & self.assistant[places]

    def spans(self) -> list[tuple[int, int]]:
        """Where each document lies: [start, stop)."""
        stops = torch.tensor(self.lengths).cumsum(0).tolist()
        return list(zip([0, *stops], stops, strict=False))

    @property
    def texts(self) -> Texts:
        return Texts(self.ids, self.positions, self.spans())


@torch.no_grad()
def target_states(target: Decoder, samples: Sequence[Sample], layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """The frozen target's states [T, d] at the samples' tokens; no gradient reaches it."""
    return whole_states(target, Texts.of([sample.token_ids for sample in samples], target.device), layers)
