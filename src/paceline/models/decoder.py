"""The decoder-only transformer that every method reaches inside: ragged rows in, hidden states and logits out.

One forward takes rows of any number of sequences: prompt chunks, single tokens, chains, trees. Linear layers see one
[T, d] matrix; attention goes to each sequence's own cache. A row's bits depend on its own path alone (see `ops.linear`,
and `ops.operators` for all else).
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.models.cache import KVPool, SequenceCache
from paceline.models.config import ModelConfig, RopeConfig, inverse_frequencies
from paceline.ops.attention import BLOCK
from paceline.ops.fused import operators_for
from paceline.ops.fused_layer import fuse
from paceline.ops.layer import Layer
from paceline.ops.operators import AttentionLayer, AttentionRows, Step
from paceline.ops.packed import AnyLinear, PackedLinear, linear_of, look_up
from paceline.ops.rotary import Rope


@dataclass(frozen=True, slots=True)
class EarlyRows:
    """hidden: [m, d] after the first `layer` layers, of a segment's first m rows.

    Their keys and values of those layers lie in the cache already, behind its committed rows.
    """

    layer: int
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows that one sequence adds to a forward.

    `parents[i]` is the row before row i on its path, −1 for the last committed row of the cache; a parent comes
    before its children. None means a chain: a prompt chunk, or a token and a chain drafted after it. `early`: the first
    rows of a chain have run through the first layers already.
    """

    cache: SequenceCache
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    early: EarlyRows | None = None

    @property
    def is_chain(self) -> bool:
        return self.parents is None or all(parent == i - 1 for i, parent in enumerate(self.parents))

    def rows(self) -> AttentionRows:
        """Its rows behind the committed ones, whose slots are reserved."""
        paths = None if self.is_chain else _paths(self.parents or ())
        return self.cache.rows(len(self.token_ids), paths)

    def rest(self) -> "Segment":
        """The rows that have not run yet."""
        if self.early is None:
            return self
        if not self.is_chain:
            raise ValueError("the first rows of a tree cannot have run already: only a chain's can")
        count = len(self.early.hidden)
        return Segment(self.cache.beyond(count), self.token_ids[count:])


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One layer, or the half of it that a self-speculating drafter keeps."""

    index: int
    attention: bool = True
    mlp: bool = True


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """hidden: [T, d] after the last layer that ran, before the final norm; taps[i]: [T, d] after layer i."""

    hidden: torch.Tensor
    taps: dict[int, torch.Tensor]


class Decoder:
    """A target or a draft model, ready to run.

    weights: the prepared layout (`models.layout`), in `dtype`. bf16 computes attention in float32 and keeps keys and
    values in bf16; float32 and float64 keep one precision throughout. Matrices may be packed (`ops.packed`), with bf16.
    What is no matrix product is computed by `operators`, native ones where there are some (`ops.fused`).
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.compute_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        self.operators = operators_for(dtype, self.device)
        held = {name: tensor.to(self.device) for name, tensor in weights.items()}
        self.embedding = held["embed"]
        self.norm = held["norm"]
        self.head = linear_of(held.get("head", held["embed"]))
        rope, local = self._rope(config.rope), self._rope(config.local_rope or config.rope)
        self.layers = [
            self._layer(held, index, rope if window is None else local)
            for index, window in enumerate(config.sliding_windows)
        ]

        self.fused = [fuse(layer, self.operators) for layer in self.layers]

    def _rope(self, rope: RopeConfig) -> Rope:
        frequencies, factor = inverse_frequencies(rope, self.config.head_dim, self.config.max_context)
        return Rope(frequencies.to(self.device), factor)

    def _layer(self, held: Mapping[str, torch.Tensor], index: int, rope: Rope) -> Layer:
        def weight(name: str) -> torch.Tensor | None:
            return held.get(f"layers.{index}.{name}")

        def linear(name: str) -> AnyLinear:
            return linear_of(held[f"layers.{index}.{name}"], weight(f"{name}_bias"))

        c = self.config
        return Layer(
            qkv=linear("qkv"),
            output=linear("output"),
            gate_up=linear("gate_up"),
            down=linear("down"),
            attention=AttentionLayer(
                index,
                c.num_heads,
                c.num_kv_heads,
                c.head_dim,
                c.attention_scale,
                c.rms_norm_eps,
                weight("q_norm"),
                weight("k_norm"),
                c.sliding_windows[index],
                rope,
            ),
            attention_norm=held[f"layers.{index}.attention_norm"],
            mlp_norm=held[f"layers.{index}.mlp_norm"],
            post_attention_norm=weight("post_attention_norm"),
            post_mlp_norm=weight("post_mlp_norm"),
            eps=c.rms_norm_eps,
            activation=c.activation,
        )

    def linears(self) -> Iterable[AnyLinear]:
        """Every linear layer, once, the output head last."""
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        yield self.head

    def packed_linears(self) -> Iterable[PackedLinear]:
        """Those whose matrix is packed."""
        return (linear for linear in self.linears() if isinstance(linear, PackedLinear))

    def first_layers(self, count: int) -> "Decoder":
        """A decoder of the first `count` layers with the same norm and head; the weights are shared."""
        shorter = copy.copy(self)
        windows = self.config.sliding_windows[:count]
        shorter.config = replace(self.config, num_layers=count, sliding_windows=windows)
        shorter.layers = self.layers[:count]
        return shorter

    def with_vocabulary(self, size: int) -> "Decoder":
        """The same decoder with logits for the first `size` token ids alone; the weights are shared."""
        smaller = copy.copy(self)
        smaller.head = self.head.first(size)
        return smaller

    def new_pool(self, positions: int) -> KVPool:
        """A block pool with room for `positions` rows."""
        return KVPool(self.config, -(-positions // BLOCK), self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        *,
        layers: Sequence[LayerStep] | None = None,
        start: torch.Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> ForwardOutput:
        """Run the segments' rows, in order, through `layers` (all of them by default).

        `start` [T, d] takes the embedding's place. Keys and values are written behind each cache's committed rows;
        nothing is committed. Raises CacheFull before anything is written if a pool has no room.
        """
        if any(segment.early is not None for segment in segments):
            return self._resume(segments, taps)
        step = self._step(segments)
        if start is None:
            ids = [token for segment in segments for token in segment.token_ids]
            x = look_up(torch.tensor(ids, device=self.device), self.embedding)
            if self.config.embedding_scale != 1.0:
                x = x * torch.tensor(self.config.embedding_scale, dtype=self.dtype, device=self.device)
        else:
            x = start
        tapped: dict[int, torch.Tensor] = {}
        for part in layers if layers is not None else [LayerStep(i) for i in range(self.config.num_layers)]:
            layer, fused = self.layers[part.index], self.fused[part.index]
            if part.attention:
                x = layer.attend(x, step, self.operators) if fused is None else fused.attend(x, step)
            if part.mlp:
                x = layer.feed_forward(x, self.operators) if fused is None else fused.feed_forward(x)
            if part.index in taps:
                tapped[part.index] = x
        return ForwardOutput(x, tapped)

    def _resume(self, segments: Sequence[Segment], taps: Sequence[int]) -> ForwardOutput:
        """Rows that have not run through the first layers do so first; then all go on together.

        Where somebody wants to see one of those first layers, every row runs from the start.
        """
        exits = {segment.early.layer for segment in segments if segment.early is not None}
        if len(exits) > 1:
            raise ValueError(f"rows go on at different layers: {sorted(exits)}")
        (layer,) = exits
        whole = [replace(segment, early=None) for segment in segments]
        if any(tap < layer for tap in taps):
            return self.forward(whole, taps=taps)
        for segment in segments:
            segment.cache.reserve(len(segment.token_ids))
        steps = [LayerStep(i) for i in range(self.config.num_layers)]
        rests = [segment.rest() for segment in segments]
        late = [rest for rest in rests if rest.token_ids]
        caught_up = self.forward(late, layers=steps[:layer]).hidden if late else None
        rows, first = [], 0
        for segment, rest in zip(segments, rests, strict=True):
            if segment.early is not None:
                rows.append(segment.early.hidden)
            if caught_up is not None:
                rows.append(caught_up[first : first + len(rest.token_ids)])
            first += len(rest.token_ids)
        return self.forward(whole, layers=steps[layer:], start=torch.cat(rows), taps=taps)

    @torch.inference_mode()
    def final_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """`forward`'s hidden states after the final norm, as the output head reads them: [n, d] → [n, d]."""
        return self.operators.norm(hidden, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits of `forward`'s hidden states: [n, d] → [n, V], in the model's precision."""
        return self.head(self.final_hidden(hidden))

    def maxima(self, logits: torch.Tensor) -> torch.Tensor:
        """Of each 128 logits the largest, NaN if they hold one: [n, V] → [n, ⌈V / 128⌉], as `core.rows` wants them."""
        return self.operators.maxima(logits)

    def _step(self, segments: Sequence[Segment]) -> Step:
        for segment in segments:
            segment.cache.reserve(len(segment.token_ids))
        return self.operators.step([segment.rows() for segment in segments], self.config.num_heads)


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """Every row's path from the cache's end to itself, as rows of the segment."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        if not -1 <= parent < row:
            raise ValueError(f"row {row} has parent {parent}: parents come before their children")
        paths.append([*(paths[parent] if parent >= 0 else ()), row])
    return paths
