"""How much to draft in a step, for whom and by which method: the most expected tokens a second.

Pure arithmetic. A draft's k-th token comes with the chance that it and all before it are right, so the tokens expected
of a pass are its sequences plus the sum of these chances (2211.17192, §3.3), and every drafted token is a row more.
Rows are given in the order of their chances as long as tokens a second rise, beyond a dip as well: a pass costs in
steps. A method that stops where it is unsure seldom drafts all it may: rows and rounds of drafting count by the chance
that they come about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.engine.costs import DraftCosts

MARGIN = 0.02  # by so much drafting must be better than not to: figures are not that exact


@dataclass(frozen=True, slots=True)
class Option:
    """What a method could draft for a sequence.

    chances[k]: that token k and all before it are right; falling. drafting: None where it costs nothing.
    behind_s: what catching up costs this step, if it drafts at all. drawn[k]: chance that token k is drafted, and
    paid[k]: that its round of drafting is run; None: 1 for all.
    """

    method: str
    chances: Sequence[float]
    drafting: DraftCosts | None = None
    behind_s: float = 0.0
    drawn: Sequence[float] | None = None
    paid: Sequence[float] | None = None

    def rows(self, k: int) -> float:
        """Rows expected of token k."""
        return 1.0 if self.drawn is None else self.drawn[k]

    def takes_part(self, k: int) -> float:
        """Chance that round k of drafting is run for it."""
        return 1.0 if self.paid is None else self.paid[k]

    def seconds(self, k: int, count: int = 1, idle: float = 1.0) -> float:
        """What `count` sequences like this one add to round k of drafting, as expected.

        `idle`: chance that nobody else takes part; the first who does pays for the round.
        """
        if (costs := self.drafting) is None:
            return 0.0
        part = self.takes_part(k)
        first = idle * (1 - (1 - part) ** count)
        alone = costs.each if k else costs.first
        return alone * first + costs.per_sequence * (count * part - first) + (0.0 if k else self.behind_s * count)


@dataclass(frozen=True, slots=True)
class Pick:
    """What one sequence gets: nothing, or the first `count` tokens of an option."""

    option: Option | None = None
    count: int = 0


NOTHING = Pick()


@dataclass(frozen=True, slots=True)
class Plan:
    """A step: its picks, and the tokens and seconds expected of it."""

    picks: tuple[Pick, ...]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


PassSeconds = Callable[[float], float]
"""Seconds of the target's pass with so many drafted rows, as expected; never falling."""


def best_plan(options: Sequence[Sequence[Option]], pass_seconds: PassSeconds, others: int = 0) -> Plan:
    """The best plan for sequences with these options each; `others`: tokens that the pass yields besides.

    Exact for one sequence, and for several with one method in common that drafts all it may; else each keeps to the
    method that would be best if all did as it does.
    """
    plain = Plan((NOTHING,) * len(options), len(options) + others, pass_seconds(0))
    if not any(options):
        return plain
    least = plain.rate * (1 + MARGIN)
    if len(options) == 1:
        return _alone(options[0], others, pass_seconds, least) or plain
    liked = [_favourite(own, len(options), others, pass_seconds) for own in options]
    best = plain
    deepest = max((len(option.chances) for option in liked if option is not None and option.drafting), default=0)
    # A round of drafting is paid for by all who take part: so each number of rounds is tried.
    for rounds in range(deepest + 1):
        found = _filled(liked, rounds, plain, pass_seconds, least)
        if found is not None:
            best, least = found, found.rate
    return best


def _alone(options: Sequence[Option], others: int, pass_seconds: PassSeconds, least: float) -> Plan | None:
    """The best plan above `least` tokens a second for the one sequence that has these options."""
    best: Plan | None = None
    for option in options:
        tokens, rows, drafting = 1.0 + others, 0.0, 0.0
        ceiling = tokens + sum(option.chances)
        for k, chance in enumerate(option.chances):
            tokens += chance
            rows += option.rows(k)
            drafting += option.seconds(k)
            seconds = pass_seconds(rows) + drafting
            if ceiling < least * seconds:
                break  # even if all the others were free
            if tokens > least * seconds:
                best = Plan((Pick(option, k + 1),), tokens, seconds)
                least = best.rate
    return best


def _favourite(options: Sequence[Option], count: int, others: int, pass_seconds: PassSeconds) -> Option | None:
    """The option that would be best if all `count` sequences had it."""
    if len(options) < 2:
        return options[0] if options else None
    best, rate = None, 0.0
    for option in options:
        expected, rows, drafting = 1.0, 0.0, 0.0
        for k, chance in enumerate(option.chances):
            expected += chance
            rows += option.rows(k)
            drafting += option.seconds(k, count)
            own_rate = (count * expected + others) / (pass_seconds(count * rows) + drafting)
            if own_rate > rate:
                best, rate = option, own_rate
    return best


def _filled(
    liked: Sequence[Option | None], rounds: int, plain: Plan, pass_seconds: PassSeconds, least: float
) -> Plan | None:
    """The best plan above `least` tokens a second in which whoever's drafting costs drafts at most `rounds` tokens."""
    additions = [
        (-chance, k, i, option)
        for i, option in enumerate(liked)
        if option is not None
        for k, chance in enumerate(option.chances if option.drafting is None else option.chances[:rounds])
    ]
    additions.sort(key=lambda addition: addition[:3])
    tokens, rows, drafting = plain.tokens, 0.0, 0.0
    ceiling = tokens - sum(addition[0] for addition in additions)
    idle: dict[tuple[str, int], float] = {}  # chance that a round of a method is run for nobody so far
    best: tuple[int, float, float] | None = None
    for count, (minus, k, _, option) in enumerate(additions, 1):
        tokens -= minus
        rows += option.rows(k)
        others_idle = idle.get((option.method, k), 1.0)
        drafting += option.seconds(k, idle=others_idle)
        idle[option.method, k] = others_idle * (1 - option.takes_part(k))
        seconds = pass_seconds(rows) + drafting
        if ceiling < least * seconds:
            break  # even if all the others were free
        if tokens > least * seconds:
            best, least = (count, tokens, seconds), tokens / seconds
    if best is None:
        return None
    counts = [0] * len(liked)
    for _, _, i, _ in additions[: best[0]]:
        counts[i] += 1
    picks = tuple(Pick(option, n) if n else NOTHING for option, n in zip(liked, counts, strict=True))
    return Plan(picks, best[1], best[2])
