"""How often each method's drafts are right, and how long they get: by request, method, its own score, and position.

Running rates, in which the newest trials count most. A request's own rates are drawn towards those of all requests
while it has few trials, theirs towards a first guess, and a position's towards the one before it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Kind: TypeAlias = tuple[str, int]
"""A method, and a class of drafts that it scores alike."""

OWN_DECAY, POOLED_DECAY = 0.9, 0.99  # about the last 10 trials of a request, the last 100 of all
OWN_WEIGHT, POOLED_WEIGHT = 10.0, 4.0  # trials that what they are drawn towards stands for: requests are much alike
MOST_KEPT = 24.0  # trials that a kept rate stands for, at most: an old profile must not outweigh what is seen now
# Scores are tokens that the method expects to be right, or that it matched: a class each up to these.
SCORES = (0.0, 0.75, 1.5, 3.0, 6.0, 12.0)
FIRST_GUESS = (0.6, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # class 0: a method that does not score
FULL_LENGTH = (1.0,)  # a first guess for lengths: whoever was never seen to stop early does not
LEAST = 0.01  # chances below this are not worth a row


def score_class(score: float) -> int:
    """0: no score; higher for better drafts."""
    return sum(score > bound for bound in SCORES)


@dataclass(slots=True)
class Rates:
    """Decaying counts by position: tokens tried (those before them were right), and of them the right ones."""

    decay: float
    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def add(self, num_right: int, wrong: bool) -> None:
        """The first so many tokens of a draft were right, and the next, if `wrong`, was not."""
        count = num_right + wrong
        missing = count - len(self.tried)
        if missing > 0:
            self.tried.extend([0.0] * missing)
            self.right.extend([0.0] * missing)
        for position in range(count):
            self.tried[position] = self.tried[position] * self.decay + 1
            self.right[position] = self.right[position] * self.decay + (position < num_right)

    def rate(self, position: int, guess: float, weight: float) -> float:
        """Drawn towards `guess`, which stands for `weight` trials."""
        if position >= len(self.tried):
            return guess
        return (self.right[position] + weight * guess) / (self.tried[position] + weight)


class PositionRates:
    """All running rates of an engine, of one thing that ends at a first failure; `first_guess`: by class of drafts."""

    def __init__(self, first_guess: Sequence[float] = FIRST_GUESS) -> None:
        self.first_guess = first_guess
        self._pooled: dict[Kind, Rates] = {}
        self._own: dict[int, dict[Kind, Rates]] = {}

    def add(self, request_id: int, kind: Kind, num_right: int, wrong: bool) -> None:
        """A draft was tried: `num_right` of its tokens held, and the next, if `wrong`, did not."""
        pooled = self._pooled.get(kind)
        if pooled is None:
            pooled = self._pooled[kind] = Rates(POOLED_DECAY)
        pooled.add(num_right, wrong)
        rates = self._own.setdefault(request_id, {})
        own = rates.get(kind)
        if own is None:
            own = rates[kind] = Rates(OWN_DECAY)
        own.add(num_right, wrong)

    def chances(self, request_id: int, kind: Kind, count: int) -> list[float]:
        """For each of a draft's first tokens the chance that it and all before it hold; falling."""
        pooled = self._pooled.get(kind)
        own = self._own.get(request_id, {}).get(kind)
        of_all = of_own = self.first_guess[min(kind[1], len(self.first_guess) - 1)]
        chances, chance = [], 1.0
        for position in range(count):
            better = (of_own - of_all) / 2  # a request better than most is so further on as well
            if pooled is not None:
                of_all = pooled.rate(position, of_all, POOLED_WEIGHT)
            of_own = min(max(of_all + better, 0.0), 1.0)
            if own is not None:
                of_own = own.rate(position, of_own, OWN_WEIGHT)
            chance *= of_own
            if chance < LEAST:
                break
            chances.append(chance)
        return chances

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._own.pop(request_id, None)

    def to_json(self) -> list[dict[str, Any]]:
        """The rates of all requests together."""
        return [
            {"method": method, "score": score, "tried": rates.tried, "right": rates.right}
            for (method, score), rates in self._pooled.items()
        ]

    @classmethod
    def from_json(
        cls, values: Iterable[Mapping[str, Any]], first_guess: Sequence[float] = FIRST_GUESS
    ) -> "PositionRates":
        """Raises ValueError, TypeError or KeyError for anything that `to_json` did not write."""
        found = cls(first_guess)
        for value in values:
            tried, right = ([float(count) for count in value[name]] for name in ("tried", "right"))
            pairs = list(zip(tried, right, strict=True))
            if not all(0 <= hits <= count < float("inf") for count, hits in pairs):
                raise ValueError(f"{right} right of {tried}")
            factors = [min(1.0, MOST_KEPT / count) if count else 1.0 for count in tried]
            rates = Rates(POOLED_DECAY, [n * f for n, f in zip(tried, factors, strict=True)],
                          [n * f for n, f in zip(right, factors, strict=True)])  # fmt: skip
            found._pooled[str(value["method"]), int(value["score"])] = rates
        return found
