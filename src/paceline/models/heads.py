"""The networks of draft heads: Medusa's, EAGLE-1/2's and EAGLE-3's, on top of a target's hidden states.

A head shares the target's device, and where its checkpoint leaves them out, its embedding and output; its precision is
its own (`models.head_matrices`).
Only passes over a cache run in inference mode: the rest is differentiable, and training computes with these classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.models.head_layer import HeadLayer, HeadRows
from paceline.ops.activation import silu
from paceline.ops.packed import AnyLinear, look_up


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Which target tokens a head's output rows stand for: `ids` [D], or None where row i is token i."""

    size: int  # of the target
    ids: torch.Tensor | None = None

    def mask(self) -> torch.Tensor:
        """Which of the target's tokens can be drafted: [V] bool."""
        if self.ids is None:
            return torch.ones(self.size, dtype=torch.bool)
        return torch.zeros(self.size, dtype=torch.bool).index_fill_(0, self.ids.cpu(), True)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, D] → [n, V], −∞ for tokens that the head never drafts."""
        if self.ids is None:
            return logits
        return logits.new_full((len(logits), self.size), -torch.inf).index_copy_(1, self.ids, logits)


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """y ← y + SiLU(W y + b) block by block, then an output layer (2401.10774, §3.1)."""

    blocks: tuple[AnyLinear, ...]
    output: AnyLinear


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Head k predicts the token k + 2 places after the one whose hidden state it reads."""

    heads: tuple[MedusaHead, ...]
    vocabulary: DraftVocabulary
    dtype: torch.dtype  # of states

    def logits(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of head `index`; `hidden` [n, d]: what the target's output layer reads."""
        return self.vocabulary.spread(self.heads[index].output(self.states(index, hidden)))

    def states(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """What head `index`'s output layer reads: [n, d]."""
        hidden = hidden.to(self.dtype)
        for block in self.heads[index].blocks:
            hidden = hidden + silu(block(hidden))
        return hidden


class FeatureHead(Protocol):
    """A network that reads a token and the feature before it, and yields a state that the next token is read from.

    `hidden_layers`: the target's states that make a feature: output of layer i, or −1 for what the output layer reads.
    """

    layer: HeadLayer
    hidden_layers: tuple[int, ...]

    def fuse(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The target's true features of n tokens: [n, d]."""

    def inputs(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer's attention reads [T, ·], and what it is added to [T, d]; tokens [T], features [T, d]."""

    def forward(self, rows: Sequence[HeadRows]) -> torch.Tensor:
        """States [T, d] of all rows in order; nothing is committed. Raises CacheFull."""

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """States as the output layer reads them: [n, d]."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of the token after each state's."""

    def feedback(self, states: torch.Tensor) -> torch.Tensor:
        """States as features of the rows under them, where the target has not been yet: [n, d]."""


class EagleHead:
    """EAGLE-1 and -2: the state is a guess at the target's last hidden state, and its output layer reads it.

    x = fc([embedding, feature]); one layer without a norm before its attention. Source: 2401.15077, §4.1.
    """

    hidden_layers: tuple[int, ...] = (-1,)

    def __init__(self, layer: HeadLayer, embedding: torch.Tensor, fc: AnyLinear, output: AnyLinear) -> None:
        self.layer, self.embedding, self.fc, self.output = layer, embedding, fc, output

    def fuse(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return hidden[-1].to(self.layer.dtype)

    def inputs(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fc(torch.cat((look_up(tokens, self.embedding).to(features.dtype), features), dim=-1))
        return x, x

    @torch.inference_mode()
    def forward(self, rows: Sequence[HeadRows]) -> torch.Tensor:
        return self.layer(*self.inputs(_tokens(rows, self.embedding), _features(rows)), rows)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.output(states)

    def read(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def feedback(self, states: torch.Tensor) -> torch.Tensor:
        return states


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """What differs between EAGLE-3 checkpoints, and no weight tells.

    aux_layers: whose *outputs* are fused, counted from 0 (Hugging Face's hidden_states[i + 1]).
    norm_before_residual: the residual stream begins with the normed feature. norm_output (EAGLE-3.1): a state is fed
    back as the output layer reads it, after the norm.
    """

    aux_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_output: bool = False


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """Besides the layer's. `fuse_norms`: of each fused state (EAGLE-3.1); `input_norm`: of all of them together."""

    embedding: torch.Tensor
    fc: AnyLinear
    fuse_norms: tuple[torch.Tensor, ...]
    input_norm: torch.Tensor | None
    embedding_norm: torch.Tensor
    feature_norm: torch.Tensor
    output_norm: torch.Tensor
    output: AnyLinear


class Eagle3Head:
    """EAGLE-3: the feature is a projection of three hidden states; the state has no meaning but to the head itself.

    Attention reads [norm(embedding), norm(feature)]. Source: 2503.01840, §3.1; as released, without the second
    projection of its Figure 5.
    """

    def __init__(
        self, layer: HeadLayer, weights: Eagle3Weights, vocabulary: DraftVocabulary, options: Eagle3Options
    ) -> None:
        self.layer, self.weights, self.vocabulary, self.options = layer, weights, vocabulary, options
        self.hidden_layers = options.aux_layers

    def fuse(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        w = self.weights
        states = [hidden[layer].to(self.layer.dtype) for layer in self.hidden_layers]
        if w.fuse_norms:
            states = [self.layer.norm(state, norm) for state, norm in zip(states, w.fuse_norms, strict=True)]
        x = torch.cat(states, dim=-1)
        return w.fc(x if w.input_norm is None else self.layer.norm(x, w.input_norm))

    def inputs(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = self.weights
        normed = self.layer.norm(features, w.feature_norm)
        embedded = look_up(tokens, w.embedding).to(features.dtype)
        x = torch.cat((self.layer.norm(embedded, w.embedding_norm), normed), dim=-1)
        return x, normed if self.options.norm_before_residual else features

    @torch.inference_mode()
    def forward(self, rows: Sequence[HeadRows]) -> torch.Tensor:
        return self.layer(*self.inputs(_tokens(rows, self.weights.embedding), _features(rows)), rows)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.vocabulary.spread(self.weights.output(self.read(states)))

    def feedback(self, states: torch.Tensor) -> torch.Tensor:
        return self.read(states) if self.options.norm_output else states

    def read(self, states: torch.Tensor) -> torch.Tensor:
        return self.layer.norm(states, self.weights.output_norm)


def _tokens(rows: Sequence[HeadRows], embedding: torch.Tensor) -> torch.Tensor:
    """[T]. A target with more padding can emit ids that the head has no row for; any stand-in is lossless."""
    ids = [token if token < len(embedding) else 0 for own in rows for token in own.tokens]
    return torch.tensor(ids, device=embedding.device)


def _features(rows: Sequence[HeadRows]) -> torch.Tensor:
    return rows[0].features if len(rows) == 1 else torch.cat([own.features for own in rows])
