"""Native products with plain bf16 weights: the exact product within rounding, and rows that know no neighbours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.ops.dense import DenseLinear, plain_linear
from paceline.ops.linear import Linear
from paceline.ops.native import library

LIBRARY = library.load()
if isinstance(LIBRARY, library.Missing):
    pytest.skip(f"native operators {LIBRARY.reason}", allow_module_level=True)
every_level = pytest.mark.parametrize("level", LIBRARY.levels)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@every_level
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 80), st.integers(1, 150), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_product_bias_and_residual_are_rounded_once(level: str, out: int, inner: int, rows: int, seed: int) -> None:
    w, x = random(out, inner, seed=seed), random(rows, inner, seed=seed + 1)
    bias, residual = random(out, seed=seed + 2), random(rows, out, seed=seed + 3)
    y = DenseLinear(w, bias, level)(x, residual).double()
    exact = x.double() @ w.double().T + bias.double() + residual.double()
    sizes = x.double().abs() @ w.double().abs().T + bias.double().abs() + residual.double().abs()
    assert ((y - exact).abs() <= 2**-8 * exact.abs() + (inner + 2) * 2**-24 * sizes).all()


@every_level
@pytest.mark.parametrize("inner", [33, 96, 576])
def test_a_row_does_not_know_how_many_it_is_among(level: str, inner: int) -> None:
    linear = DenseLinear(random(70, inner, seed=1), random(70, seed=2), level)
    x, residual = random(300, inner, seed=3), random(300, 70, seed=4)  # more than one pass over the weights
    whole = linear(x, residual)
    for count in (1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 64, 100):
        for first in (0, 7, 300 - count):
            part = slice(first, first + count)
            assert torch.equal(linear(x[part], residual[part]), whole[part])


@every_level
def test_what_is_not_a_number_stays_in_its_row_and_output(level: str) -> None:
    w, x = random(40, 70, seed=1), random(20, 70, seed=2)
    clean = DenseLinear(w, None, level)(x)
    x[3, 69], w[39, 0] = torch.nan, torch.inf
    y = DenseLinear(w, None, level)(x)
    spoilt = torch.zeros(20, 40, dtype=torch.bool)
    spoilt[3], spoilt[:, 39] = True, True
    assert not y[spoilt].isfinite().any()
    assert torch.equal(y[~spoilt], clean[~spoilt])


@every_level
def test_threads_do_not_show(level: str) -> None:
    linear, x = DenseLinear(random(200, 96, seed=1), None, level), random(50, 96, seed=2)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(linear(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@every_level
def test_rows_apart_in_memory_and_the_first_outputs(level: str) -> None:
    w, x = random(70, 64, seed=1), random(9, 100, seed=2)
    linear = DenseLinear(w, random(70, seed=3), level)
    wanted = linear(x[:, 20:84].contiguous())
    assert torch.equal(linear(x[:, 20:84]), wanted)
    assert torch.equal(linear(x.T.contiguous().T[:, 20:84]), wanted)
    assert torch.equal(linear.first(33)(x[:, 20:84]), wanted[:, :33])
    assert linear.first(33).weight.data_ptr() == w.data_ptr()


def test_odd_calls_are_refused() -> None:
    linear = DenseLinear(random(8, 16, seed=1))
    for x in (random(2, 15, seed=2), random(2, 16, seed=2).float(), random(1, 2, 16, seed=2)):
        with pytest.raises(ValueError, match=r"bf16 \[T, 16\]"):
            linear(x)
    with pytest.raises(ValueError, match="residual"):
        linear(random(2, 16, seed=2), random(2, 9, seed=3))
    with pytest.raises(PacelineError, match="no native operators"):
        DenseLinear(random(8, 16, seed=1), None, "sse9")


def test_native_only_where_there_is_something_native(monkeypatch: pytest.MonkeyPatch) -> None:
    w = random(8, 16, seed=1)
    assert isinstance(plain_linear(w), DenseLinear)
    assert isinstance(plain_linear(w.float()), Linear)
    monkeypatch.setenv(library.VARIABLE, "torch")
    assert isinstance(plain_linear(w), Linear)
