"""Packed matrices: what gguf-py reads from the file's rows, products within rounding, rows that know no neighbours."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_samples import HALVES, QUANTISED, Sample, activations, as_multiplied, sample

from paceline.errors import PacelineError
from paceline.ops.native import library
from paceline.ops.packed import BF16, TYPES, PackedLinear, pack, parts

LIBRARY = library.load()
if isinstance(LIBRARY, library.Missing):
    pytest.skip(f"native operators {LIBRARY.reason}", allow_module_level=True)
LEVELS = LIBRARY.levels
BLOCK = {name: 256 if name.endswith("K") else 32 for name in TYPES.values()}
every_level = pytest.mark.parametrize("level", LEVELS)
every_type = pytest.mark.parametrize("type_id", TYPES, ids=TYPES.values())


def linear(s: Sample, level: str, bias: torch.Tensor | None = None) -> PackedLinear:
    return PackedLinear(pack(s.rows, s.type_id, s.weight.shape[1]), bias, level)


def assert_close(y: torch.Tensor, x: torch.Tensor, s: Sample) -> None:
    """One rounding to bf16, and float32 rounding of a sum of as many terms as there are groups and pairs.

    Both terms of `scale · code − minimum` are summed by themselves, so it is their sizes that count.
    """
    x = as_multiplied(x, s.type_id)
    exact = x @ s.weight.double().T
    terms = x.shape[1] if s.type_id == BF16 else x.shape[1] // 16 + 64
    sizes = x.abs() @ s.size.double().T
    allowed = 2**-8 * exact.abs() + terms * 2**-24 * sizes + 1e-37
    assert ((y.double() - exact).abs() <= allowed).all()


@every_type
def test_rows_are_what_gguf_py_reads(type_id: int) -> None:
    for out, blocks in ((1, 1), (31, 2), (33, 1), (70, 3)):
        s = sample(type_id, out, blocks * 256)
        got = linear(s, LEVELS[0]).rows(torch.arange(out).flip(0))
        assert torch.equal(got, s.weight.to(torch.bfloat16).flip(0))


@every_type
def test_packing_keeps_the_files_size(type_id: int) -> None:
    s = sample(type_id, 64, 512)
    assert pack(s.rows, type_id, 512).numel() == s.rows.numel() * s.rows.element_size() + 64


@every_level
@every_type
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 90), st.integers(1, 12), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_products_are_those_of_the_dequantised_weight(
    level: str, type_id: int, out: int, blocks: int, rows: int, seed: int
) -> None:
    inner = blocks * (BLOCK[TYPES[type_id]] if BLOCK[TYPES[type_id]] == 32 else 64 * 4)
    s = sample(type_id, out, inner, seed)
    x = activations(rows, inner, seed + 1)
    assert_close(linear(s, level)(x), x, s)


@every_level
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 70), st.integers(1, 100), st.integers(1, 40))
def test_bf16_of_any_width(level: str, out: int, inner: int, rows: int) -> None:
    s, x = sample(BF16, out, inner), activations(rows, inner)
    assert_close(linear(s, level)(x), x, s)


@every_level
@every_type
def test_a_row_does_not_know_how_many_it_is_among(level: str, type_id: int) -> None:
    s = sample(type_id, 70, 768)
    bias = activations(1, 70)[0]
    product, x = linear(s, level, bias), activations(530, 768)
    alone = torch.cat([product(row[None]) for row in x[:70]])
    for count in range(1, 71):
        assert torch.equal(product(x[:count]), alone[:count]), count
    assert torch.equal(product(x)[:70], alone)  # prefill: several blocks of rows
    assert torch.equal(product(x[:70].flip(0)), alone.flip(0))  # other places
    assert torch.equal(product(torch.cat((x[300:313], x[:70])))[13:], alone)


@every_level
@every_type
def test_a_spoilt_row_harms_nobody(level: str, type_id: int) -> None:
    s = sample(type_id, 40, 512)
    product, x = linear(s, level), activations(35, 512)
    whole = product(x)
    spoilt = x.clone()
    spoilt[3, 100], spoilt[20, 7], spoilt[34, 500] = torch.nan, torch.inf, -torch.inf
    got = product(spoilt)
    clean = [row for row in range(35) if row not in (3, 20, 34)]
    assert torch.equal(got[clean], whole[clean])
    assert got[3].isnan().all() and not got[[20, 34]].isfinite().any()


@every_level
@every_type
def test_threads_change_no_bit(level: str, type_id: int) -> None:
    s = sample(type_id, 200, 512)
    product, x = linear(s, level), activations(19, 512)
    one = product(x)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(product(x), one)
        finally:
            torch.set_num_threads(1)


@pytest.mark.parametrize("type_id", QUANTISED, ids=QUANTISED.values())
def test_every_level_has_the_same_bits(type_id: int) -> None:
    """Sums of a group are exact integers; what is done with them is one sequence of float32 operations."""
    inner = 1280 if BLOCK[TYPES[type_id]] == 256 else 1312  # 41 groups: neither pairs nor chunks come out even
    s = sample(type_id, 70, inner)
    bias, residual, x = activations(1, 70)[0], activations(40, 70), activations(40, inner)
    x[5, 32:64], x[6], x[7, 64:96] = 0, 0, 1e-38
    products = [linear(s, level, bias) for level in LEVELS]
    for rows in range(1, 41):
        first, *others = [product(x[:rows], residual[:rows]) for product in products]
        assert all(torch.equal(other, first) for other in others), rows


@pytest.mark.parametrize("type_id", QUANTISED, ids=QUANTISED.values())
def test_every_level_has_the_same_bits_of_the_largest_dots(type_id: int) -> None:
    """Codes and activations of the largest sizes and all one sign, where sums of a group are farthest from zero."""
    rows = sample(type_id, 33, 512).rows
    blocks = rows.view(-1, rows.shape[1] * BLOCK[TYPES[type_id]] // 512)
    halves = [at + byte for at in HALVES[type_id] for byte in (0, 1)]
    codes = [byte for byte in range(blocks.shape[1]) if byte not in halves]
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        blocks[:, codes] = byte
        products = [PackedLinear(pack(rows, type_id, 512), None, level) for level in LEVELS]
        for sign in (1, -1):
            x = torch.full((19, 512), sign, dtype=torch.bfloat16)
            for count in (8, 19):  # products in vectors, and in matrix units
                first, *others = [product(x[:count]) for product in products]
                assert first.isfinite().all() and all(torch.equal(other, first) for other in others)


def test_activations_are_as_near_as_8_bits_allow() -> None:
    x = activations(4, 256)
    largest = x.double().view(4, 8, 32).abs().amax(2, keepdim=True).expand(4, 8, 32).reshape(4, 256)
    assert ((as_multiplied(x, 8) - x.double()).abs() <= largest / 127 * 0.50001).all()


@every_level
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_extreme_activations(level: str, size: float) -> None:
    for type_id in TYPES:
        s = sample(type_id, 33, 256)
        x = (activations(3, 256).float() * size).to(torch.bfloat16)
        assert_close(linear(s, level)(x), x, s)


@every_level
def test_extreme_scales(level: str) -> None:
    """float16's largest, smallest and subnormal numbers."""
    for type_id in QUANTISED:
        for scale in (6e4, 1e-7):
            s, x = sample(type_id, 33, 256, scale=scale), activations(3, 256)
            assert_close(linear(s, level)(x), x, replace(s, size=s.size + 1e-7))


@every_level
def test_joined_matrices_stand_side_by_side(level: str) -> None:
    """Query, key and value of one file may be of several types, and end anywhere in a unit of rows."""
    samples = [sample(type_id, out, 256) for type_id, out in ((12, 70), (14, 33), (8, 1), (BF16, 45))]
    bias, x = activations(1, 149)[0], activations(21, 256)
    whole = PackedLinear(torch.cat([pack(s.rows, s.type_id, 256) for s in samples]), bias, level)
    assert [(part.type, part.out) for part in whole.parts] == [("Q4_K", 70), ("Q6_K", 33), ("Q8_0", 1), ("BF16", 45)]
    split = torch.split(bias, [70, 33, 1, 45])
    apart = [linear(s, level, own)(x) for s, own in zip(samples, split, strict=True)]
    assert torch.equal(whole(x), torch.cat(apart, dim=1))
    assert torch.equal(whole.weight(), torch.cat([s.weight.to(torch.bfloat16) for s in samples]))


@every_level
def test_bias_and_residual_are_added_before_the_rounding(level: str) -> None:
    s, x = sample(8, 40, 256), activations(7, 256)
    bias, residual = activations(1, 40)[0], activations(7, 40)
    exact = as_multiplied(x, 8) @ s.weight.double().T + bias.double() + residual.double()
    got = linear(s, level, bias)(x, residual).double()
    assert ((got - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


@every_level
def test_rows_of_a_larger_matrix_are_read_in_place(level: str) -> None:
    s, x = sample(12, 40, 256), activations(9, 512)
    product = linear(s, level)
    assert torch.equal(product(x[:, 256:]), product(x[:, 256:].contiguous()))
    assert torch.equal(product(x[::2, :256]), product(x[::2, :256].contiguous()))


def test_what_does_not_fit_is_refused() -> None:
    s = sample(12, 4, 256)
    product = linear(s, LEVELS[0])
    with pytest.raises(ValueError, match="activations"):
        product(activations(1, 255))
    with pytest.raises(ValueError, match="activations"):
        product(activations(1, 256).float())
    with pytest.raises(ValueError, match="residual"):
        product(activations(1, 256), activations(2, 4))
    with pytest.raises(IndexError):
        product.rows(torch.tensor([4]))
    with pytest.raises(ValueError, match="blocks"):
        pack(s.rows, 12, 255)
    with pytest.raises(ValueError, match="no packed matrix"):
        parts(torch.zeros(128, dtype=torch.uint8))


def test_the_level_is_capped_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    assert library.level() == LEVELS[-1]
    for index, name in enumerate(library.LEVELS):
        monkeypatch.setenv(library.VARIABLE, name)
        assert library.level() == [level for level in LEVELS if library.LEVELS.index(level) <= index][-1]
    monkeypatch.setenv(library.VARIABLE, "torch")
    assert library.level() is None
    monkeypatch.setenv(library.VARIABLE, "sse9")
    with pytest.raises(PacelineError, match="sse9"):
        library.level()
