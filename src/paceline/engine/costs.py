"""What a step costs, in seconds: the target's pass by rows, sequences and context, and each method's drafting.

`CostTable` predicts. Its figures were measured on this machine (`engine.measure`); the engine's own steps are compared
with the prediction and correct it: the machine's speed as it now is, and group by group how steps compare.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

DRIFTED = math.log(1.25)  # a table further off than this is scaled
STEPS_TO_TELL = 32  # so many steps must say so
# Windows: the machine's speed changes from one moment to the next, how steps compare with each other hardly does.
SPEED, SHAPE = 9, 31
SETTLED = 2  # steps of a kind after which the next ones tell the speed


@dataclass(frozen=True, slots=True)
class TargetCosts:
    """The target's pass, output layer included.

    seconds[i]: over rows[i] rows of one sequence with `context` tokens before them; slopes[i]: what one more token of
    context adds to slope_rows[i] rows; per_sequence: what each further sequence adds, its rows apart.
    Raises ValueError for figures that cannot be.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    context: int = 0
    slope_rows: tuple[int, ...] = (1,)
    slopes: tuple[float, ...] = (0.0,)
    per_sequence: float = 0.0

    def __post_init__(self) -> None:
        for xs, ys in ((self.rows, self.seconds), (self.slope_rows, self.slopes)):
            if not xs or len(xs) != len(ys) or sorted(set(xs)) != list(xs):
                raise ValueError(f"rows {xs} with {len(ys)} figures")
        figures = (*self.seconds, *self.slopes, self.per_sequence)
        if not all(math.isfinite(figure) and figure >= 0 for figure in figures) or not self.seconds[0] > 0:
            raise ValueError("a figure is negative or not finite")

    def at(self, rows: int, sequences: int = 1, context: float = 0.0) -> float:
        """Seconds of a pass over `rows` rows in all; `context`: tokens before them, on average."""
        seconds = interpolated(self.rows, self.seconds, rows) + self.per_sequence * (sequences - 1)
        beyond = (context - self.context) * interpolated(self.slope_rows, self.slopes, rows)
        return max(seconds + beyond, self.seconds[0] / 2)

    def scaled(self, factor: float) -> "TargetCosts":
        """The same shape, on a machine that takes `factor` times as long."""
        seconds, slopes = (tuple(figure * factor for figure in each) for each in (self.seconds, self.slopes))
        return replace(self, seconds=seconds, slopes=slopes, per_sequence=self.per_sequence * factor)


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """One method's drafting: of the first node, of each further one, and what another sequence adds to either.

    per_token_behind: reading a token that was committed while the method sat out. Raises ValueError as above.
    """

    first: float
    each: float
    per_sequence: float = 0.0
    per_token_behind: float = 0.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(figure) and figure >= 0 for figure in asdict(self).values()):
            raise ValueError("a figure is negative or not finite")

    def scaled(self, factor: float) -> "DraftCosts":
        """The same method, on a machine that takes `factor` times as long."""
        return DraftCosts(
            self.first * factor, self.each * factor, self.per_sequence * factor, self.per_token_behind * factor
        )

    def at(self, depths: Sequence[int], behind: int = 0) -> float:
        """Seconds to draft so many nodes for each of several sequences together."""
        deepest = max(depths, default=0)
        if not deepest:
            return 0.0
        rounds = self.first + self.each * (deepest - 1)
        return rounds + self.per_sequence * (sum(depths) - deepest) + self.per_token_behind * behind


class Drift:
    """How far measured lies from predicted: the median of the last logarithms, which a few slow steps do not move."""

    def __init__(self, window: int) -> None:
        self.log_ratio = 0.0
        self._last: deque[float] = deque(maxlen=window)

    @property
    def count(self) -> int:
        return len(self._last)

    @property
    def believed(self) -> float:
        """The same, but a few may have been outliers: one is half believed, two are by two thirds."""
        return self.log_ratio * self.count / (self.count + 1)

    def add(self, log_ratio: float) -> None:
        self._last.append(log_ratio)
        self.log_ratio = _middle(self._last)

    def shift(self, by: float) -> None:
        """What is predicted has changed."""
        self._last = deque((each + by for each in self._last), self._last.maxlen)
        self.log_ratio += by


@dataclass(slots=True)
class CostTable:
    """Predicts, and learns from what the engine's steps took."""

    target: TargetCosts
    drafts: dict[str, DraftCosts] = field(default_factory=dict)
    per_token: float = 0.0  # verification, text and bookkeeping, of each token that comes out
    _speed: Drift = field(default_factory=lambda: Drift(SPEED), compare=False)
    _num_steps: int = field(default=0, compare=False)
    _groups: dict[tuple[int, int], Drift] = field(default_factory=dict, compare=False)
    _drafts: dict[str, Drift] = field(default_factory=dict, compare=False)

    def pass_seconds(self, rows: int, sequences: int = 1, context: float = 0.0) -> float:
        """Of a target pass over `rows` rows of so many sequences."""
        own = self._groups.get(_group(rows, sequences))
        shape = 0.0 if own is None else own.believed
        return self.target.at(rows, sequences, context) * math.exp(self._speed.log_ratio + shape)

    def num_seen(self, rows: int, sequences: int) -> int:
        """Of the last steps that were alike."""
        own = self._groups.get(_group(rows, sequences))
        return 0 if own is None else own.count

    def draft_costs(self, method: str) -> DraftCosts:
        """Of a method, as it now seems; of one never measured, a pass of the target a node."""
        known = self.drafts.get(method)
        if known is None:
            alone = self.pass_seconds(1)
            return DraftCosts(alone, alone, alone, alone)
        drift = self._drafts.get(method)
        return known.scaled(math.exp(self._machine + (0.0 if drift is None else drift.believed)))

    @property
    def _machine(self) -> float:
        """How far the machine's speed is from the table's, as the logarithm of a ratio.

        What steps of all kinds have in common may have gone into the groups: the middle one of them tells.
        """
        return self._speed.log_ratio + self._common

    @property
    def _common(self) -> float:
        return _middle([group.believed for group in self._groups.values()]) if self._groups else 0.0

    def saw_pass(self, seconds: float, rows: int, sequences: int, context: float) -> None:
        """A pass took so long."""
        if not seconds > 0:
            return
        log_ratio = math.log(seconds / self.target.at(rows, sequences, context))
        own = self._groups.setdefault(_group(rows, sequences), Drift(SHAPE))
        if own.count >= SETTLED or not self._speed.count:  # how other steps compare is yet to be told from the speed
            self._speed.add(log_ratio - own.log_ratio)
        own.add(log_ratio - self._speed.log_ratio)
        self._num_steps += 1
        if self._num_steps >= STEPS_TO_TELL and abs(self._machine) > DRIFTED:
            self._rescale()

    def saw_draft(self, method: str, seconds: float, depths: Sequence[int], behind: int) -> None:
        """A method took so long to draft."""
        known = self.drafts.get(method)
        if known is None:
            deepest = max(1, max(depths, default=1))
            each = seconds / deepest / math.exp(self._machine)
            known = self.drafts[method] = DraftCosts(each, each)
        predicted = known.at(depths, behind)
        if seconds > 0 and predicted > 0:
            drift = self._drafts.setdefault(method, Drift(SHAPE))
            drift.add(math.log(seconds / predicted) - self._machine)

    def saw_rest(self, seconds: float, tokens: int) -> None:
        """What a step took besides, for the tokens that came out."""
        if tokens > 0:
            self.per_token += 0.05 * (seconds / tokens - self.per_token) if self.per_token else seconds / tokens

    def speedup(self, method: str, acceptance: Sequence[float], context: float = 0.0) -> float:
        """Predicted, against plain decoding, of one sequence that drafts a token for each figure of `acceptance`.

        acceptance[k]: chance that token k is accepted if those before it were (2211.17192, with measured costs).
        """
        expected, chance = 1.0, 1.0
        for rate in acceptance:
            chance *= rate
            expected += chance
        count = len(acceptance)
        plain = self.pass_seconds(1, 1, context) + self.per_token
        drafting = self.draft_costs(method).at([count]) if count and method in self.drafts else 0.0
        return plain / ((self.pass_seconds(1 + count, 1, context) + drafting) / expected + self.per_token)

    def _rescale(self) -> None:
        """The whole machine is slower or faster than it was: the table says so from now on, and in the profile."""
        factor, common = math.exp(self._machine), self._common
        self.target = self.target.scaled(factor)
        self.drafts = {method: costs.scaled(factor) for method, costs in self.drafts.items()}
        self._speed.shift(-self._speed.log_ratio)
        for group in self._groups.values():
            group.shift(-common)
        self._num_steps = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "target": asdict(self.target.scaled(math.exp(self._machine))),
            "drafts": {method: asdict(self.draft_costs(method)) for method in self.drafts},
            "per_token": self.per_token,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "CostTable":
        """Raises ValueError, TypeError or KeyError for anything that `to_json` did not write."""
        target: dict[str, Any] = {
            name: tuple(part) if isinstance(part, list) else part for name, part in value["target"].items()
        }
        per_token = float(value["per_token"])
        if not 0 <= per_token < math.inf:
            raise ValueError(f"per_token is {per_token}")
        drafts = {str(method): DraftCosts(**figures) for method, figures in value["drafts"].items()}
        return cls(TargetCosts(**target), drafts, per_token)


def _middle(values: Collection[float]) -> float:
    """The median. Twice in every step: `statistics` takes several times as long."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _group(rows: int, sequences: int) -> tuple[int, int]:
    """Steps that are alike: sequences and rows by powers of two."""
    return sequences.bit_length(), (rows - 1).bit_length()


def interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Between the points a straight line; before the first its value; beyond the last the last line goes on."""
    i = min(bisect_right(xs, x), len(xs) - 1)
    if i == 0:
        return ys[0]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


def never_falling(values: Sequence[float]) -> list[float]:
    """The nearest values (least squares) none of which is below the one before: more rows never cost less."""
    groups: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while groups and groups[-1][0] > mean:
            last, size = groups.pop()
            mean, count = (mean * count + last * size) / (count + size), count + size
        groups.append((mean, count))
    return [mean for mean, count in groups for _ in range(count)]
