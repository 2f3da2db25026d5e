"""Rotary position embedding."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of every row's position, shared by all layers of a forward: [T, 1, head_dim]."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """What angles are made of: a layer's turns per position (radians, [head_dim / 2]), and a factor on cos and sin."""

    frequencies: torch.Tensor
    factor: float

    def table(self, positions: torch.Tensor, dtype: torch.dtype) -> RotaryTable:
        return rotary_table(positions, self.frequencies, self.factor, dtype)


class RotaryTables:
    """A forward's tables, each made when it is first asked for. positions: [T]."""

    def __init__(self, positions: torch.Tensor, dtype: torch.dtype) -> None:
        self._positions, self._dtype = positions, dtype
        self._made: dict[Rope, RotaryTable] = {}

    def of(self, rope: Rope) -> RotaryTable:
        if rope not in self._made:
            self._made[rope] = rope.table(self._positions, self._dtype)
        return self._made[rope]


def rotary_table(positions: torch.Tensor, inv_freq: torch.Tensor, factor: float, dtype: torch.dtype) -> RotaryTable:
    """Angles in float32 (as checkpoints were trained with), handed out in `dtype`.

    positions: [T], inv_freq: [head_dim / 2].
    """
    angles = positions.float()[:, None] * inv_freq  # [T, head_dim / 2]
    angles = torch.cat((angles, angles), dim=-1)[:, None]  # [T, 1, head_dim]
    return RotaryTable((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


def rotate(x: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Turn each head's halves (x1, x2) by its row's angle. x: [T, heads, head_dim]. Source: Su et al. 2104.09864."""
    first, second = x.chunk(2, dim=-1)
    return x * table.cos + torch.cat((-second, first), dim=-1) * table.sin
