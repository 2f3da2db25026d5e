"""The operators in torch: any precision, any device, and the reference of the native ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.ops.activation import gated
from paceline.ops.attention import BLOCK, AttentionCalls, OpenBlocks, attention_calls, block_attention
from paceline.ops.norm import rms_norm
from paceline.ops.operators import AttentionLayer, AttentionRows
from paceline.ops.rotary import RotaryTable, RotaryTables, rotate


@dataclass(frozen=True, slots=True)
class TorchOperators:
    """dtype: of the model; bf16 computes attention in float32."""

    dtype: torch.dtype
    flexible: bool = False
    name: str = "torch"

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = rms_norm(x, weight, eps)
        return y if residual is None else residual + y

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        return gated(gate_up, activation)

    def maxima(self, x: torch.Tensor) -> torch.Tensor:
        short = -x.shape[1] % 128
        padded = torch.nn.functional.pad(x, (0, short), value=float("-inf")) if short else x
        largest = padded.view(len(x), -1, 128).amax(2)
        return largest if largest.dtype == torch.float64 else largest.float()

    def step(self, rows: Sequence[AttentionRows], num_heads: int) -> "TorchStep":
        return TorchStep(self, rows, num_heads)

    def trusting(self, flexible: bool) -> "TorchOperators":
        return TorchOperators(self.dtype, flexible)


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """What a sequence's attention needs."""

    rows: slice
    source: AttentionRows
    positions: torch.Tensor  # [n]
    blocks: torch.Tensor | slice  # to read
    write_to: tuple[torch.Tensor, torch.Tensor]  # block and offset of each row
    reach: list[int]  # blocks up to each row's own position
    open_blocks: OpenBlocks | None
    hidden: dict[int | None, torch.Tensor] = field(default_factory=dict)  # by sliding window, [n, blocks, 64] bool

    @classmethod
    def of(cls, source: AttentionRows, start: int, device: torch.device) -> "_Sequence":
        length, depths = source.length, source.depths
        blocks = -(-(length + max(depths) + 1) // BLOCK)  # of positions
        paths = None if source.is_straight else source.paths
        stored = blocks if paths is None else -(-(length + source.first + source.count) // BLOCK)
        slots = torch.arange(source.count) + length + source.first
        return cls(
            rows=slice(start, start + source.count),
            source=source,
            positions=torch.tensor([length + depth for depth in depths], device=device),
            blocks=_index(source.blocks[:stored], device),
            write_to=(torch.tensor(source.blocks)[slots // BLOCK].to(device), (slots % BLOCK).to(device)),
            reach=[(length + depth) // BLOCK + 1 for depth in depths],
            open_blocks=None if paths is None else OpenBlocks.of(paths, length, blocks, device),
        )

    def unseen(self, window: int | None) -> torch.Tensor:
        """[n, blocks, 64] bool by absolute position."""
        if window not in self.hidden:
            places = torch.arange(max(self.reach) * BLOCK, device=self.positions.device)
            unseen = places > self.positions[:, None]
            if window is not None:
                unseen |= places <= self.positions[:, None] - window
            self.hidden[window] = unseen.view(len(self.reach), -1, BLOCK)
        return self.hidden[window]


def _index(blocks: Sequence[int], device: torch.device) -> torch.Tensor | slice:
    """A slice where the blocks are neighbours: reading those copies nothing."""
    if all(block == blocks[0] + i for i, block in enumerate(blocks)):
        return slice(blocks[0], blocks[0] + len(blocks))
    return torch.tensor(blocks, device=device)


class TorchStep:
    """Attention sequence by sequence, by `ops.attention`."""

    def __init__(self, operators: TorchOperators, rows: Sequence[AttentionRows], num_heads: int) -> None:
        kv_heads = rows[0].keys.shape[2]
        self._calls = AttentionCalls(attention_calls(num_heads // kv_heads).rows, operators.flexible)
        self._compute_dtype = torch.float32 if operators.dtype == torch.bfloat16 else operators.dtype
        self._sequences: list[_Sequence] = []
        start = 0
        for source in rows:
            self._sequences.append(_Sequence.of(source, start, source.keys.device))
            start += source.count
        positions = torch.cat([sequence.positions for sequence in self._sequences])
        self._tables = RotaryTables(positions, self._compute_dtype)

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        q, k, v = queries_keys_values(qkv, layer, self._tables.of(layer.rope))
        out = [self._attend(q, k, v, layer, sequence) for sequence in self._sequences]
        return (out[0] if len(out) == 1 else torch.cat(out)).to(qkv.dtype).flatten(1)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        sequence: _Sequence,
    ) -> torch.Tensor:
        rows, (blocks, offsets) = sequence.rows, sequence.write_to
        keys, values = sequence.source.keys[layer.index], sequence.source.values[layer.index]
        keys[blocks, :, offsets] = k[rows]
        values[blocks, :, offsets] = v[rows]
        return block_attention(
            q[rows],
            keys[sequence.blocks].to(self._compute_dtype),  # [blocks, kv_heads, 64, head_dim]
            values[sequence.blocks].to(self._compute_dtype),
            sequence.unseen(layer.window),
            sequence.reach,
            sequence.open_blocks,
            self._calls,
        )


def queries_keys_values(
    qkv: torch.Tensor, layer: AttentionLayer, rotary: RotaryTable
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normed and turned: queries [T, heads, head_dim], scaled, in the table's precision; keys and values in qkv's."""
    heads = qkv.view(qkv.shape[0], -1, layer.head_dim)
    q, k, v = torch.split(heads, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, layer.eps), rms_norm(k, layer.k_norm, layer.eps)
    wide = rotary.cos.dtype
    return rotate(q.to(wide), rotary) * layer.scale, rotate(k.to(wide), rotary).to(qkv.dtype), v
