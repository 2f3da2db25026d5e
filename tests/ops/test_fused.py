"""Native operators of a layer: what torch's twins compute but for rounding, and rows that know no neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.rows import chunk_maxima
from paceline.errors import PacelineError
from paceline.ops.activation import gated
from paceline.ops.fused import NativeOperators, operators_for
from paceline.ops.native import library
from paceline.ops.norm import rms_norm
from paceline.ops.operators import AttentionLayer, AttentionRows, Operators
from paceline.ops.rotary import Rope
from paceline.ops.twins import TorchOperators

if isinstance(missing := library.load(), library.Missing):
    pytest.skip(f"native operators {missing.reason}", allow_module_level=True)
LEVELS = missing.levels
BF16, CPU = torch.bfloat16, torch.device("cpu")
TWINS = TorchOperators(BF16)
every_level = pytest.mark.parametrize("level", LEVELS)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(BF16)


def with_threads(count: int, run: object) -> torch.Tensor:
    torch.set_num_threads(count)
    try:
        return run()  # type: ignore[operator]
    finally:
        torch.set_num_threads(1)


# --- norm and activation ---


@every_level
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.booleans(), st.booleans(), st.sampled_from([1e-10, 1.0, 1e10]))
def test_norm(level: str, rows: int, width: int, gemma: bool, added: bool, scale: float) -> None:
    x, weight = random(rows, width, scale=scale), random(width, seed=1)
    weight, residual = (weight.float() * 1.001 if gemma else weight), (random(rows, width, seed=2) if added else None)
    got = NativeOperators.at(level).norm(x, weight, 1e-6, residual)
    normed = rms_norm(x.double(), weight.double(), 1e-6)
    expected = normed + (0 if residual is None else residual.double())
    assert got.shape == x.shape and got.dtype == BF16
    assert ((got - expected).abs() <= 2**-7 * (normed.abs() + expected.abs() / 2) + 1e-6).all()


@every_level
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.sampled_from(["silu", "gelu_tanh"]), st.sampled_from([0.1, 3, 60]))
def test_gated(level: str, rows: int, width: int, activation: str, scale: float) -> None:
    x = random(rows, 2 * width, scale=scale)
    got, expected = NativeOperators.at(level).gated(x, activation), gated(x.double(), activation)
    assert ((got - expected).abs() <= 2**-8 * expected.abs() + 1e-6 * scale).all()


@every_level
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_every_gate_that_there_is(level: str, activation: str) -> None:
    """All bf16 numbers, infinite ones and NaN included, at every place of a vector."""
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    for shift in (0, 1, 7):
        x = torch.cat((gate.roll(shift), torch.ones_like(gate)))[None]
        got, expected = NativeOperators.at(level).gated(x, activation)[0].double(), gated(x.double(), activation)[0]
        assert torch.equal(got.isnan(), expected.isnan() & ~gate.roll(shift).isinf() | gate.roll(shift).eq(-torch.inf))
        fine = expected.isfinite()
        assert ((got - expected)[fine].abs() <= 2**-8 * expected[fine].abs() + 1e-6).all()


@every_level
@pytest.mark.parametrize("width", [16, 42, 1002])
def test_rows_of_elementwise_operators_are_alone(level: str, width: int) -> None:
    native, x, weight = NativeOperators.at(level), random(97, 2 * width), random(2 * width, seed=1)
    operations = (
        lambda rows: native.norm(rows, weight, 1e-6),
        lambda rows: native.norm(rows, weight.float(), 1e-6, rows),
        lambda rows: native.gated(rows, "silu"),
        lambda rows: native.gated(rows, "gelu_tanh"),
    )
    for operation in operations:
        alone = torch.cat([operation(row[None]) for row in x])
        for count, threads in ((97, 1), (97, 2), (33, 3), (2, 2)):
            assert torch.equal(with_threads(threads, lambda: operation(x[:count])), alone[:count])  # noqa: B023
        spoilt = x.clone()
        spoilt[5], spoilt[40, 3] = torch.nan, torch.inf
        clean = [row for row in range(97) if row not in (5, 40)]
        assert torch.equal(operation(spoilt)[clean], alone[clean])


# --- attention ---


@dataclass(frozen=True)
class Case:
    """A layer and sequences of some committed lengths, their blocks scattered in one cache of random rows."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    norms: torch.dtype | None = None
    lengths: Sequence[int] = (70,)
    room: int = 200  # rows behind the committed ones
    scale: float = 1.0

    def layer(self) -> AttentionLayer:
        norm = None if self.norms is None else random(self.head_dim, seed=3).to(self.norms)
        frequencies = 10_000 ** -torch.linspace(0, 1, self.head_dim // 2)
        scale = self.scale * self.head_dim**-0.5
        return AttentionLayer(
            1, self.heads, self.kv_heads, self.head_dim, scale, 1e-6, norm, norm, self.window, Rope(frequencies, 1.1)
        )

    def qkv(self, rows: int, seed: int = 0) -> torch.Tensor:
        return random(rows, (self.heads + 2 * self.kv_heads) * self.head_dim, seed=seed)

    def caches(self, seed: int = 0) -> list[AttentionRows]:
        """Without rows yet. Committed rows have the same content whatever the seed; all else differs."""
        order, tables = torch.Generator().manual_seed(seed), []
        total = sum(-(-(length + self.room) // 64) for length in self.lengths)
        free = torch.randperm(total + 3, generator=order).tolist()
        keys, values = (random(2, total + 3, self.kv_heads, 64, self.head_dim, seed=seed + i) for i in (10, 20))
        for number, length in enumerate(self.lengths):
            blocks = [free.pop() for _ in range(-(-(length + self.room) // 64))]
            tables.append(AttentionRows(keys, values, blocks, length, 0))
            at = torch.arange(length)
            for kind, store in enumerate((keys, values)):
                content = random(length, self.kv_heads, self.head_dim, seed=100 + 2 * number + kind)
                store[1, torch.tensor(blocks)[at // 64], :, at % 64] = content
        return tables


def attend(operators: Operators, case: Case, rows: Sequence[AttentionRows], qkv: torch.Tensor) -> torch.Tensor:
    return operators.step(rows, case.heads).attention(qkv, case.layer())


def stored(rows: AttentionRows) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layer's cache holds at the slots of a step's rows: [n, kv_heads, head_dim] each."""
    slots = torch.arange(rows.count) + rows.length + rows.first
    at = torch.tensor(rows.blocks)[slots // 64], slots % 64
    return tuple(store[1, at[0], :, at[1]] for store in (rows.keys, rows.values))  # type: ignore[return-value]


def random_tree(count: int, seed: int) -> list[list[int]]:
    generator, paths = torch.Generator().manual_seed(seed), []
    for row in range(count):
        parent = int(torch.randint(-1, row, (1,), generator=generator)) if row else -1
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


shapes = st.sampled_from(
    [(4, 4, 16), (4, 1, 80), (7, 1, 16), (1, 1, 96), (9, 3, 64), (12, 2, 128), (2, 2, 2), (5, 5, 34), (10, 2, 6)]
)


@every_level
@settings(max_examples=40, deadline=None)
@given(
    shapes,
    st.sampled_from([None, 1, 20, 64, 130]),
    st.sampled_from([None, BF16, torch.float32]),
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40), st.booleans()), min_size=1, max_size=3),
    st.sampled_from([0.3, 8.0]),
)
def test_attention(
    level: str,
    shape: tuple[int, int, int],
    window: int | None,
    norms: torch.dtype | None,
    sequences: list[tuple[int, int, bool]],
    scale: float,
) -> None:
    case = Case(*shape, window, norms, [length for length, _, _ in sequences], scale=scale)

    def run(operators: Operators) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        rows = [
            replace(cache, count=count, paths=random_tree(count, number) if tree else None)
            for number, (cache, (_, count, tree)) in enumerate(zip(case.caches(), sequences, strict=True))
        ]
        out = attend(operators, case, rows, case.qkv(sum(own.count for own in rows)))
        return out, [stored(own) for own in rows]

    (ours, our_rows), (theirs, their_rows) = run(NativeOperators.at(level)), run(TWINS)
    # a key that rounds to the other side moves a score by 2^−8 of its terms, whose sum may cancel
    assert ((ours.double() - theirs.double()).abs() <= 0.02 * max(1, scale) + 2**-7 * theirs.abs()).all()
    assert (ours.double() - theirs.double()).abs().mean() <= 2e-3 * max(1, scale)
    for (keys, values), (their_keys, their_values) in zip(our_rows, their_rows, strict=True):
        assert torch.equal(values, their_values)
        assert ((keys.double() - their_keys.double()).abs() <= 2**-7 * their_keys.double().abs() + 1e-6).all()


@every_level
@pytest.mark.parametrize("shape", [(9, 3, 64), (12, 2, 128), (7, 1, 34)], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_a_row_attends_to_its_own_path_alone(level: str, shape: tuple[int, int, int], window: int | None) -> None:
    native = NativeOperators.at(level)
    for length in (0, 63, 130):
        case = Case(*shape, window, BF16, (length,))
        qkv = case.qkv(90)
        (cache,) = case.caches()
        chain = [replace(cache, first=i, count=1, paths=[range(i + 1)]) for i in range(90)]
        single = torch.cat([attend(native, case, [row], qkv[i : i + 1]) for i, row in enumerate(chain)])
        for sizes, threads in (([90], 1), ([90], 3), ([1, 7, 8, 9, 65], 2)):
            (cache,) = case.caches(seed=5)  # other blocks, other rubbish in them
            got, first = [], 0
            for size in sizes:
                rows = [replace(cache, length=length + first, count=size)]
                got.append(with_threads(threads, lambda: attend(native, case, rows, qkv[first : first + size])))  # noqa: B023
                first += size
            assert torch.equal(torch.cat(got), single)
        # a tree: every second node a stranger's
        paths = [[*range(1, 2 * (node // 2), 2), node] for node in range(180)]
        ids = [(node // 2 + 41 * (1 - node % 2)) % 90 for node in range(180)]
        (cache,) = case.caches(seed=6)
        got = with_threads(2, lambda: attend(native, case, [replace(cache, count=180, paths=paths)], qkv[ids]))  # noqa: B023
        assert torch.equal(got[1::2], single)
        # among other sequences
        many = replace(case, lengths=(33, length, 200))
        caches = many.caches(seed=7)
        (mine,) = case.caches(seed=7)
        for store, own in ((caches[1].keys, mine.keys), (caches[1].values, mine.values)):
            store[1, caches[1].blocks] = own[1, mine.blocks]
        rows = [replace(own, count=count) for own, count in zip(caches, (3, 90, 20), strict=True)]
        got = attend(native, many, rows, torch.cat((case.qkv(3, seed=1), qkv, case.qkv(20, seed=2))))
        assert torch.equal(got[3:93], single)


@every_level
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_a_row_may_not_see_does_not_reach_it(level: str, bad: float) -> None:
    native, case = NativeOperators.at(level), Case(window=40, lengths=(70,))
    paths = [[0], [1], [0, 2], [1, 3], [1, 3, 4]]
    qkv = case.qkv(5)
    (cache,) = case.caches()
    clean = attend(native, case, [replace(cache, count=5, paths=paths)], qkv)
    (cache,) = case.caches()
    for store in (cache.keys, cache.values):
        own = store[1, cache.blocks].transpose(1, 2).flatten(0, 1)  # [slots, kv_heads, head_dim]
        own[:31] = own[75:] = bad  # behind the window of all, and behind the rows
        store[1, cache.blocks] = own.view(-1, 64, *own.shape[1:]).transpose(1, 2)
        store[0] = bad
    spoilt = qkv.clone()
    spoilt[1] = bad  # a draft's row
    got = attend(native, case, [replace(cache, count=5, paths=paths)], spoilt)
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    assert got[[1, 3, 4]].isnan().all()


@every_level
def test_a_score_that_dwarfs_the_others_takes_all(level: str) -> None:
    """Scores of thousands: no overflow, and the value at the largest one comes out as it is."""
    case = Case(heads=1, kv_heads=1, head_dim=16, lengths=(100,), scale=1e4)
    (cache,) = case.caches()
    got = attend(NativeOperators.at(level), case, [replace(cache, count=8)], case.qkv(8))
    values = cache.values[1, cache.blocks].transpose(1, 2).flatten(0, 1)[:108, 0]
    assert all((row == values).all(1).any() for row in got)


def test_the_set_is_chosen_by_precision_device_and_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert operators_for(BF16, CPU).name == NativeOperators.at(library.level() or "").name
    for dtype in (torch.float32, torch.float64):
        assert operators_for(dtype, CPU) == TorchOperators(dtype)
    assert operators_for(BF16, torch.device("cuda")) == TWINS
    monkeypatch.setenv(library.VARIABLE, "portable")
    assert operators_for(BF16, CPU).name == NativeOperators.at("portable").name
    monkeypatch.setenv(library.VARIABLE, "torch")
    assert operators_for(BF16, CPU) == TWINS
    with pytest.raises(PacelineError, match="no native operators at level mmx"):
        NativeOperators.at("mmx")


# --- the largest of each 128 logits ---


@every_level
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 700), st.sampled_from([1e-30, 1.0, 1e30]), st.integers(0, 2**16))
def test_maxima(level: str, rows: int, width: int, scale: float, seed: int) -> None:
    x = random(rows, width, scale=scale, seed=seed)
    x[:, seed % width] = -torch.inf
    got = NativeOperators.at(level).maxima(x)
    assert got.dtype == torch.float32 and torch.equal(got, TWINS.maxima(x)) and torch.equal(got, chunk_maxima(x))


@every_level
def test_one_odd_number_is_seen_in_its_chunk_alone(level: str) -> None:
    x = random(3, 1000)
    for place in range(1000):
        for odd in (torch.nan, torch.inf, -torch.inf):
            spoilt = x.clone()
            spoilt[1, place] = odd
            got = with_threads(1 + place % 2, lambda: NativeOperators.at(level).maxima(spoilt))  # noqa: B023
            assert torch.equal(got.isnan(), TWINS.maxima(spoilt).isnan())
            assert torch.equal(got.nan_to_num(7, 8), TWINS.maxima(spoilt).nan_to_num(7, 8))
    assert (NativeOperators.at(level).maxima(torch.full((2, 130), -torch.inf).to(BF16)) == -torch.inf).all()
