"""The decoder-only transformer that every method reaches inside: ragged rows in, hidden states and logits out.

One forward takes rows of any number of sequences: prompt chunks, single tokens, chains, trees. Linear layers see one
[T, d] matrix; attention works sequence by sequence over each one's own cache. A row's bits depend on its own path
alone (see `ops.linear` and `ops.attention`).
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.models.cache import KVPool, SequenceCache
from paceline.models.config import ModelConfig, RopeConfig, inverse_frequencies
from paceline.ops.activation import gated
from paceline.ops.attention import BLOCK, OpenBlocks, attention_calls, block_attention
from paceline.ops.linear import Linear
from paceline.ops.norm import rms_norm
from paceline.ops.packed import AnyLinear, PackedLinear, linear_of, look_up
from paceline.ops.rotary import RotaryTable, rotary_table, rotate


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


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: AnyLinear
    output: AnyLinear
    gate_up: AnyLinear
    down: AnyLinear
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    post_attention_norm: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None
    window: int | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a segment's attention needs, worked out once a forward and shared by its layers."""

    cache: SequenceCache
    rows: slice
    blocks: torch.Tensor | slice  # pool blocks to read
    write_to: tuple[torch.Tensor, torch.Tensor]  # pool block and offset of each row
    positions: torch.Tensor  # [n]
    reach: list[int]  # blocks up to each row's own position
    open_blocks: OpenBlocks | None
    hidden: dict[int | None, torch.Tensor] = field(default_factory=dict)  # by sliding window, [n, blocks, 64] bool


class Decoder:
    """A target or a draft model, ready to run.

    weights: the prepared layout (`models.layout`), in `dtype`. bf16 computes attention in float32 and keeps keys and
    values in bf16; float32 and float64 keep one precision throughout. Matrices may be packed (`ops.packed`), with bf16.
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
        self.attention_calls = attention_calls(config.num_heads // config.num_kv_heads)
        held = {name: tensor.to(self.device) for name, tensor in weights.items()}
        self.embedding = held["embed"]
        self.norm = held["norm"]
        self.head = linear_of(held.get("head", held["embed"]))
        self.layers = [self._layer(held, index) for index in range(config.num_layers)]
        self._frequencies = {
            rope: inverse_frequencies(rope, config.head_dim, config.max_context)
            for rope in (config.rope, config.local_rope)
            if rope is not None
        }

    def _layer(self, held: Mapping[str, torch.Tensor], index: int) -> _Layer:
        def weight(name: str) -> torch.Tensor | None:
            return held.get(f"layers.{index}.{name}")

        def linear(name: str) -> AnyLinear:
            return linear_of(held[f"layers.{index}.{name}"], weight(f"{name}_bias"))

        return _Layer(
            qkv=linear("qkv"),
            output=linear("output"),
            gate_up=linear("gate_up"),
            down=linear("down"),
            attention_norm=held[f"layers.{index}.attention_norm"],
            mlp_norm=held[f"layers.{index}.mlp_norm"],
            q_norm=weight("q_norm"),
            k_norm=weight("k_norm"),
            post_attention_norm=weight("post_attention_norm"),
            post_mlp_norm=weight("post_mlp_norm"),
            window=self.config.sliding_windows[index],
        )

    def linears(self) -> Iterable[Linear]:
        """Every linear layer that is torch's product, once, the output head last."""
        return (linear for linear in self._linears() if isinstance(linear, Linear))

    def packed_linears(self) -> Iterable[PackedLinear]:
        """Every linear layer whose matrix is packed, once, the output head last."""
        return (linear for linear in self._linears() if isinstance(linear, PackedLinear))

    def _linears(self) -> Iterable[AnyLinear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        yield self.head

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
        plans = self._plans(segments)
        if start is None:
            ids = [token for segment in segments for token in segment.token_ids]
            x = look_up(torch.tensor(ids, device=self.device), self.embedding)
            if self.config.embedding_scale != 1.0:
                x = x * torch.tensor(self.config.embedding_scale, dtype=self.dtype, device=self.device)
        else:
            x = start
        steps = layers if layers is not None else [LayerStep(i) for i in range(self.config.num_layers)]
        rotary = self._rotary(torch.cat([plan.positions for plan in plans]))
        tapped: dict[int, torch.Tensor] = {}
        for step in steps:
            layer = self.layers[step.index]
            if step.attention:
                x = x + self._attention(layer, step.index, x, plans, rotary)
            if step.mlp:
                x = x + self._mlp(layer, x)
            if step.index in taps:
                tapped[step.index] = x
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
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits of `forward`'s hidden states: [n, d] → [n, V], in the model's precision."""
        return self.head(self.final_hidden(hidden))

    def _attention(
        self,
        layer: _Layer,
        index: int,
        x: torch.Tensor,
        plans: Sequence[_Plan],
        rotary: Mapping[RopeConfig, RotaryTable],
    ) -> torch.Tensor:
        c = self.config
        qkv = layer.qkv(rms_norm(x, layer.attention_norm, c.rms_norm_eps))
        heads = qkv.view(x.shape[0], -1, c.head_dim)
        q, k, v = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)  # [T, heads, head_dim]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, c.rms_norm_eps), rms_norm(k, layer.k_norm, c.rms_norm_eps)
        rope = c.local_rope if layer.window is not None and c.local_rope is not None else c.rope
        q = rotate(q.to(self.compute_dtype), rotary[rope]) * c.attention_scale
        k = rotate(k.to(self.compute_dtype), rotary[rope]).to(self.dtype)
        out = [self._attend(layer.window, index, q[plan.rows], k[plan.rows], v[plan.rows], plan) for plan in plans]
        mixed = (out[0] if len(out) == 1 else torch.cat(out)).to(self.dtype)
        y = layer.output(mixed.reshape(x.shape[0], -1))
        if layer.post_attention_norm is not None:
            y = rms_norm(y, layer.post_attention_norm, c.rms_norm_eps)
        return y

    def _attend(
        self,
        window: int | None,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: _Plan,
    ) -> torch.Tensor:
        pool = plan.cache.pool
        pool.keys[index][plan.write_to[0], :, plan.write_to[1]] = k
        pool.values[index][plan.write_to[0], :, plan.write_to[1]] = v
        keys = pool.keys[index][plan.blocks].to(self.compute_dtype)  # [blocks, kv_heads, 64, head_dim]
        values = pool.values[index][plan.blocks].to(self.compute_dtype)
        return block_attention(q, keys, values, plan.hidden[window], plan.reach, plan.open_blocks, self.attention_calls)

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        y = layer.down(gated(layer.gate_up(rms_norm(x, layer.mlp_norm, eps)), self.config.activation))
        return y if layer.post_mlp_norm is None else rms_norm(y, layer.post_mlp_norm, eps)

    def _rotary(self, positions: torch.Tensor) -> dict[RopeConfig, RotaryTable]:
        return {
            rope: rotary_table(positions, inv_freq.to(self.device), factor, self.compute_dtype)
            for rope, (inv_freq, factor) in self._frequencies.items()
        }

    def _plans(self, segments: Sequence[Segment]) -> list[_Plan]:
        for segment in segments:
            segment.cache.reserve(len(segment.token_ids))
        plans, start = [], 0
        for segment in segments:
            stop = start + len(segment.token_ids)
            plans.append(self._plan(segment, slice(start, stop)))
            start = stop
        return plans

    def _plan(self, segment: Segment, rows: slice) -> _Plan:
        cache, n = segment.cache, len(segment.token_ids)
        paths = None if segment.is_chain else _paths(segment.parents or ())
        depths = list(range(n)) if paths is None else [len(path) - 1 for path in paths]
        positions = torch.tensor([cache.length + depth for depth in depths], device=self.device)
        blocks = -(-(cache.length + max(depths) + 1) // BLOCK)  # of positions
        stored = -(-(cache.length + n) // BLOCK)
        places = torch.arange(blocks * BLOCK, device=self.device)
        hidden = {}
        for window in set(self.config.sliding_windows):
            unseen = places > positions[:, None]
            if window is not None:
                unseen |= places <= positions[:, None] - window
            hidden[window] = unseen.view(n, blocks, BLOCK)
        return _Plan(
            cache=cache,
            rows=rows,
            blocks=cache.block_index(stored if paths is not None else blocks),
            write_to=cache.slots(cache.length, n),
            positions=positions,
            reach=[(cache.length + depth) // BLOCK + 1 for depth in depths],
            open_blocks=None if paths is None else OpenBlocks.of(paths, cache.length, blocks, self.device),
            hidden=hidden,
        )


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """Every row's path from the cache's end to itself, as rows of the segment."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        if not -1 <= parent < row:
            raise ValueError(f"row {row} has parent {parent}: parents come before their children")
        paths.append([*(paths[parent] if parent >= 0 else ()), row])
    return paths
