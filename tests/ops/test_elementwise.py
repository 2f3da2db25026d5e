"""An element's bits must not depend on where it stands in a call: the end of a range is computed by other code."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from paceline.ops.activation import gated
from paceline.ops.norm import rms_norm
from paceline.ops.rotary import rotary_table, rotate

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(count, width, generator=generator, dtype=torch.float64)).to(dtype)


def rotated(x: torch.Tensor) -> torch.Tensor:
    positions = (7 * torch.arange(97))[: x.shape[0]]
    table = rotary_table(positions, 10_000 ** -torch.linspace(0, 1, x.shape[1] // 2), 1.0, x.dtype)
    return rotate(x[:, None], table)[:, 0]


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: gated(x, "silu"),
    "gelu": lambda x: gated(x, "gelu_tanh"),
    "norm": lambda x: rms_norm(x, x[0].abs(), 1e-6),
    "rotary": rotated,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("width", [16, 42, 200, 1002])
def test_a_row_alone_equals_the_row_among_others(name: str, width: int, dtype: torch.dtype) -> None:
    operation, x = OPERATIONS[name], rows(97, width, dtype)
    for count in (1, 2, 3, 5, 16, 33, 97):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            try:
                got = operation(x[:count])
            finally:
                torch.set_num_threads(1)
            assert torch.equal(got, operation(x)[:count])


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_an_element_alone_equals_the_element_among_others(name: str) -> None:
    """What torch's own silu and gelu fail: the test can see the fault."""
    theirs = {"silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh")}[name]
    x = rows(1, 4096, torch.float32)[0]
    pairs = torch.cat((x, torch.ones_like(x))).view(2, -1).T  # [4096, 2]: gate and an up of 1
    ours = torch.cat([OPERATIONS[name](pair[None])[0] for pair in pairs])
    assert torch.equal(ours, OPERATIONS[name](torch.cat((x, torch.ones_like(x)))[None])[0])
    assert not torch.equal(torch.cat([theirs(x[i : i + 1]) for i in range(4096)]), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_equal_torchs_up_to_rounding(dtype: torch.dtype) -> None:
    x = torch.cat(
        (rows(5, 64, dtype), torch.tensor([[0.0, -0.0, 80.0, -80.0, 1e4, -1e4, 1e-30, -1e-30] * 8], dtype=dtype))
    )
    gate, up = x.double().chunk(2, dim=-1)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    for activation, expected in (("silu", F.silu(gate) * up), ("gelu_tanh", F.gelu(gate, approximate="tanh") * up)):
        got = gated(x, activation).double()
        assert torch.isfinite(got).all()
        assert ((got - expected).abs() <= tolerance * (1 + expected.abs())).all()
