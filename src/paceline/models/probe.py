"""Does a row's result depend on its neighbours? Measured on the loaded model, not assumed.

The arithmetic of `ops.linear` and `ops.attention` fixes call shapes and the order of sums. The probe checks what that
leaves to the library: that a row's bits do not depend on its place in a call or on what the other rows hold. It also
finds where the padding may be dropped because calls of any size agree. The verdict is kept on disk for the same model
shape, precision, torch, instruction set and number of threads.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from paceline.models.cache import SequenceCache
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, Segment
from paceline.models.home import Progress, home, silent, write_json
from paceline.ops.attention import BLOCK
from paceline.ops.linear import Linear
from paceline.ops.operators import AttentionRows, Operators

TRIAL_ROWS = 40  # of the attention's own trial
FULL_TRIAL = (BLOCK - 4, 10)  # context and rows, across a block border
ARITHMETIC_VERSION = 7  # of `ops`: a change of it voids kept verdicts


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`bitwise`: rows were independent bit for bit in every trial. `culprit`: the first trial that was not.

    `unpadded`: weight shapes ("out x in") whose calls of 1 … R rows all agree. `flexible`: so do attention calls.
    """

    bitwise: bool
    culprit: str | None
    flexible: bool
    unpadded: tuple[str, ...] = field(default=())

    @property
    def exact(self) -> str:
        return "bitwise" if self.bitwise else "up to ties"


def probe(decoder: Decoder, progress: Progress = silent) -> ProbeResult:
    """The kept verdict for this model on this machine, else a fresh one; the decoder is set up by it either way."""
    path = home() / "probes" / f"{_key(decoder)}.json"
    result = _kept(path)
    if result is None:
        result = measure(decoder, progress)
        # Only a full trial's good verdict is worth keeping: a bad one may be this checkpoint's own (a NaN weight).
        if result.bitwise and _lengths(decoder.config) == FULL_TRIAL:
            with suppress(OSError):  # a full or read-only disk costs the next start a second, no more
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, asdict(result))
    apply(decoder, result)
    return result


def apply(decoder: Decoder, result: ProbeResult) -> None:
    """Drop padding where it was shown to change nothing."""
    for linear in _of_torch(decoder):
        linear.padded = _shape(linear) not in result.unpadded
    decoder.operators = decoder.operators.trusting(result.flexible)


def measure(decoder: Decoder, progress: Progress = silent) -> ProbeResult:
    """Run every trial. The decoder is left in the fixed-shape setting that the verdict on the whole model needs."""
    by_shape: dict[str, list[Linear]] = {}
    for linear in _of_torch(decoder):
        by_shape.setdefault(_shape(linear), []).append(linear)
    steps, done = len(by_shape) + 2, 0
    unpadded, culprit = [], None
    for shape, linears in by_shape.items():
        progress("checking exactness", done, steps)
        done += 1
        twin, x = _revealing_twin(linears[0])
        if not _rows_are_independent(twin, x):
            culprit = culprit or f"linear {shape}"
        elif _any_row_count_agrees(twin, x):
            unpadded.append(shape)
    progress("checking exactness", done, steps)
    flexible = _attention_is_flexible(decoder)
    # The whole model, as it will run: with padding dropped where that looked harmless.
    tentative = ProbeResult(True, None, flexible, tuple(unpadded))
    apply(decoder, tentative)
    progress("checking exactness", done + 1, steps)
    failed = _first_difference(decoder)
    if failed is not None and (flexible or unpadded):
        tentative = ProbeResult(True, None, False)
        apply(decoder, tentative)
        failed = _first_difference(decoder)
    progress("checking exactness", steps, steps)
    culprit = culprit or failed
    return ProbeResult(culprit is None, culprit, tentative.flexible, tentative.unpadded)


def _of_torch(decoder: Decoder) -> Iterable[Linear]:
    """The linear layers whose arithmetic is a library's, which has to be looked at."""
    return (linear for linear in decoder.linears() if isinstance(linear, Linear))


def _shape(linear: Linear) -> str:
    out, inner = linear.weight.shape
    return f"{out} x {inner}"


def _random(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(like.dtype).to(like.device)


def _revealing_twin(linear: Linear) -> tuple[Linear, torch.Tensor]:
    """A linear of the same shape and a full call's input [R, in] whose products cancel: only rounding is left.

    A sum taken in another order then differs in nearly every output; with ordinary numbers bf16 would round most of
    that away, and a fault would show once in thousands of calls. Which kernel runs depends on the shape alone.
    """
    out, inner = linear.weight.shape
    half = inner // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(3)).to(linear.weight.device)
    pattern = _random(min(out, 2048), half, like=linear.weight)
    weight = torch.cat((pattern, -pattern[:, order]), dim=1)
    x = _random(linear.rows, half, like=linear.weight, seed=1)
    x = torch.cat((x, x[:, order]), dim=1)
    if inner % 2:
        weight, x = (torch.nn.functional.pad(matrix, (0, 1)) for matrix in (weight, x))
    weight = weight.repeat(-(-out // len(pattern)), 1)[:out]
    bias = None if linear.bias is None else torch.zeros_like(linear.bias)
    return Linear(weight, bias, linear.product), x


def _rows_are_independent(twin: Linear, x: torch.Tensor) -> bool:
    """Full calls: a row's bits must not change with its place in the call, nor with the rows beside it."""
    whole = twin(x)
    for shift in (1, 3, 16):
        if not torch.equal(twin(x.roll(shift, 0)).roll(-shift, 0), whole):
            return False
    mixed = x.clone()
    mixed[1::2] = _random(*mixed[1::2].shape, like=mixed, seed=2)
    return torch.equal(twin(mixed)[0::2], whole[0::2])


def _any_row_count_agrees(twin: Linear, x: torch.Tensor) -> bool:
    whole = twin.product(x, twin.weight, twin.bias)
    wide = twin.weight.shape[0] > 32_768  # an output head: each call reads it all, so try fewer
    counts = (1, 2, 3, 4, 5, 8, 9, 16, twin.rows - 1) if wide else range(1, twin.rows)
    return all(
        torch.equal(twin.product(x[start : start + count], twin.weight, twin.bias), whole[start : start + count])
        for count in counts
        for start in (0, (twin.rows - count) // 2)
    )


def _attention_is_flexible(decoder: Decoder) -> bool:
    """Rows one at a time, in calls of fixed size, against many in calls of any, as chains and as trees."""
    operators = decoder.operators
    for length in (1, 40, 64, 200, 500, 2040):
        trial = _AttentionTrial(decoder, length)
        single = torch.cat([trial.chain(operators.trusting(False), row, 1) for row in range(TRIAL_ROWS)])
        for count in (2, 5, 16, 32, 33, TRIAL_ROWS):
            for many in (trial.chain, trial.tree):
                if not torch.equal(many(operators.trusting(True), 0, count), single[:count]):
                    return False
    return True


class _AttentionTrial:
    """The first layer's attention over `length` committed rows, and rows behind them, all random."""

    def __init__(self, decoder: Decoder, length: int) -> None:
        c, self.layer = decoder.config, decoder.layers[0].attention
        room = length + 2 * TRIAL_ROWS
        self.cache = decoder.first_layers(1).new_pool(room).new_sequence()
        self.cache.reserve(room)
        for seed, store in enumerate((self.cache.pool.keys, self.cache.pool.values)):
            store.copy_(_random(*store.shape, like=store, seed=seed + 1))
        self.cache.length = length
        self.qkv = _random(TRIAL_ROWS, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, like=self.cache.pool.keys)

    def chain(self, operators: Operators, first: int, count: int) -> torch.Tensor:
        """Some rows in a chain, those before them in place already: [count, heads · head_dim]."""
        return self._attend(operators, self.cache.beyond(first).rows(count), range(first, first + count))

    def tree(self, operators: Operators, first: int, count: int) -> torch.Tensor:
        """The same from row `first` on, a stranger before each row."""
        nodes = range(2 * count)
        paths = [[*range(1, 2 * (node // 2), 2), node] for node in nodes]
        ids = [first + (node // 2 + 1 - node % 2) % count for node in nodes]
        return self._attend(operators, self.cache.beyond(first).rows(2 * count, paths), ids)[1::2]

    def _attend(self, operators: Operators, rows: AttentionRows, ids: Sequence[int]) -> torch.Tensor:
        step = operators.step([rows], self.layer.num_heads)
        return step.attention(self.qkv[torch.tensor(ids)], self.layer)


def _first_difference(decoder: Decoder) -> str | None:
    """Logits of the same tokens by many ways of running them; the name of the first that differs in a bit."""
    context, rows = _lengths(decoder.config)
    if rows < 2:
        return None
    tokens = torch.randint(
        decoder.config.vocab_size, (context + rows,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    pool = decoder.new_pool(4 * (context + rows + 4 * BLOCK))
    prefix = pool.new_sequence()
    _run(decoder, prefix, tokens[:context])

    def after_prefix(sizes: list[int]) -> torch.Tensor:
        cache, logits, start = prefix.fork(), [], context
        for size in sizes:
            logits.append(_run(decoder, cache, tokens[start : start + size]))
            start += size
        cache.release()
        return torch.cat(logits)

    single = after_prefix([1] * rows)  # [rows, V]
    for size in sorted({2, 3, 5, rows}):
        if not torch.equal(after_prefix([size] * (rows // size)), single[: rows // size * size]):
            return f"chains of {size} rows"
    cold = pool.new_sequence()
    if not torch.equal(_run(decoder, cold, tokens)[context:], single):
        return "prefill in one pass"
    if not torch.equal(_tree(decoder, prefix, tokens[context:]), single):
        return "a tree"
    other = pool.new_sequence()
    pair = decoder.forward([Segment(other, tokens[3:20]), Segment(prefix, tokens[context:])])
    if not torch.equal(decoder.logits(pair.hidden[17:]), single):
        return "two sequences in one pass"
    return None


def _lengths(config: ModelConfig) -> tuple[int, int]:
    """Context and rows of the trial: across a block border where the model reaches that far."""
    rows = min(10, config.max_context // 2)
    return min(BLOCK - 4, config.max_context - rows), rows


def _run(decoder: Decoder, cache: SequenceCache, tokens: list[int]) -> torch.Tensor:
    out = decoder.forward([Segment(cache, tokens)])
    cache.commit(range(len(tokens)))
    return decoder.logits(out.hidden)


def _tree(decoder: Decoder, prefix: SequenceCache, tokens: list[int]) -> torch.Tensor:
    """The tokens as one path of a tree, a stranger before each of them; the path's logits."""
    ids, parents, path = [], [], []
    parent = -1
    for token in tokens:
        ids += [(token + 1) % decoder.config.vocab_size, token]
        parents += [parent, parent]
        parent = len(ids) - 1
        path.append(parent)
    out = decoder.forward([Segment(prefix, ids, parents)])
    return decoder.logits(out.hidden)[path]


def _key(decoder: Decoder) -> str:
    shape = replace(decoder.config, max_context=0, bos_token_id=None, eos_token_ids=())
    facts = {
        "arithmetic": ARITHMETIC_VERSION,
        "config": shape.to_json(),
        "dtype": str(decoder.dtype),
        "device": device_name(decoder.device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "operators": decoder.operators.name,
        "products": [linear.arithmetic for linear in decoder.linears()],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    flags = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass  # not Linux: the capability alone must do
    return f"{torch.backends.cpu.get_cpu_capability()} {hashlib.sha256(flags.encode()).hexdigest()[:16]}"


def _kept(path: Path) -> ProbeResult | None:
    try:
        fields = json.loads(path.read_text())
        return ProbeResult(**{**fields, "unpadded": tuple(fields["unpadded"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
