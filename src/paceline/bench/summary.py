"""From units to figures: one row an arm, for each category, for all of them, and for what loops."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any

from paceline.bench.answers import Answer, Measured, StepCosts
from paceline.bench.bootstrap import Paired, ratio
from paceline.bench.loops import find_loop
from paceline.bench.prompts import Conversation
from paceline.bench.run import Unit
from paceline.bench.specs import PLAIN
from paceline.engine.statistics import SpeculationStatistics

ALL, LOOPING = "all", "looping"


@dataclass(frozen=True)
class Judged:
    """A unit, and which of its answers loop. Plain decoding's decide, for all arms alike."""

    unit: Unit

    @cached_property
    def loops(self) -> tuple[bool, ...]:
        """One a conversation."""
        return tuple(find_loop(answer.token_ids) is not None for answer in self.plain.answers)

    @cached_property
    def mostly_loops(self) -> bool:
        """Whether at least half of the unit's tokens are in looping answers: time cannot be told apart by answer."""
        looping = sum(len(a.token_ids) for a, loops in zip(self.plain.answers, self.loops, strict=True) if loops)
        return bool(looping) and 2 * looping >= self.plain.num_tokens

    @property
    def plain(self) -> Measured:
        return self.unit.measured[PLAIN]


@dataclass(frozen=True, slots=True)
class Group:
    """Units and answers that make up some rows. At concurrency above 1 a unit may hold answers of several groups."""

    concurrency: int
    category: str
    units: tuple[Judged, ...]
    answers: tuple[tuple[Judged, int], ...]  # a unit, and which of its answers


def summarise(
    units: Sequence[Unit], conversations: Sequence[Conversation], labels: Sequence[str], seed: int = 0
) -> list[dict[str, Any]]:
    """Rows as JSON has them, plain decoding first in each group."""
    judged = [Judged(unit) for unit in units]
    return [
        _row(group, label, seed)
        for group in _groups(judged, conversations)
        for label in labels
        if any(label in each.unit.measured for each, _ in group.answers)
    ]


def differences(units: Sequence[Unit], conversations: Sequence[Conversation]) -> list[dict[str, Any]]:
    """Answers that are not plain decoding's: where they part, and with which tokens (None: one has ended)."""
    found = []
    for unit in units:
        for label, measured in unit.measured.items():
            pairs = zip(unit.members, measured.answers, unit.measured[PLAIN].answers, strict=True)
            for member, answer, plain in pairs:
                if answer.token_ids != plain.token_ids:
                    at = _first_difference(answer.token_ids, plain.token_ids)
                    found.append(
                        {
                            "arm": label,
                            "concurrency": unit.concurrency,
                            "conversation": conversations[member].id,
                            "turn": unit.turn,
                            "position": at,
                            "token": _at(answer.token_ids, at),
                            "plain_token": _at(plain.token_ids, at),
                        }
                    )
    return found


def _groups(judged: Sequence[Judged], conversations: Sequence[Conversation]) -> Iterator[Group]:
    categories = list(dict.fromkeys(conversation.category for conversation in conversations))
    for concurrency in dict.fromkeys(each.unit.concurrency for each in judged):
        units = [each for each in judged if each.unit.concurrency == concurrency]
        sound = [each for each in units if not each.mostly_loops]
        answers = [(each, i) for each in units for i in range(len(each.unit.members))]
        straight = [(each, i) for each, i in answers if not each.loops[i]]
        for category in categories:
            own = [(each, i) for each, i in straight if conversations[each.unit.members[i]].category == category]
            yield _group(concurrency, category, [each for each in sound if each.unit.category == category], own)
        yield _group(concurrency, ALL, sound, straight)
        loops = [(each, i) for each, i in answers if each.loops[i]]
        yield _group(concurrency, LOOPING, [each for each in units if each.mostly_loops], loops)


def _group(concurrency: int, category: str, units: Sequence[Judged], answers: Sequence[tuple[Judged, int]]) -> Group:
    return Group(concurrency, category, tuple(units), tuple(answers))


def _row(group: Group, label: str, seed: int) -> dict[str, Any]:
    units = [each for each in group.units if label in each.unit.measured]
    told = [(each, i) for each, i in group.answers if label in each.unit.measured]
    answers = [each.unit.measured[label].answers[i] for each, i in told]
    plain = [each.plain.answers[i] for each, i in told]
    measured = [each.unit.measured[label] for each in units]
    tokens, seconds = sum(m.num_tokens for m in measured), sum(m.seconds for m in measured)
    return {
        "concurrency": group.concurrency,
        "category": group.category,
        "arm": label,
        "units": len(units),
        "answers": len(answers),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "ratio": _whole_ratio(units, label, seed),
        "decode_ratio": _decode_ratio([each.unit.members[i] for each, i in told], answers, plain, seed),
        "acceptance": _acceptance(answers),
        **_costs([m.costs for m in measured]),
        "first_token_s": _spread([answer.first_s for answer in answers]),
        "token_s": _spread([_token_s(answer) for answer in answers]),
        "cached_prompt_tokens": sum(answer.cached_tokens for answer in answers),
        "peak_memory_bytes": max((m.peak_memory for m in measured if m.peak_memory is not None), default=None),
        "differing": sum(a.token_ids != p.token_ids for a, p in zip(answers, plain, strict=True)),
    }


def _whole_ratio(units: Sequence[Judged], label: str, seed: int) -> dict[str, Any] | None:
    """Of all tokens over all time, prompts included. A sample is a block with all its turns."""
    blocks: dict[int, list[Paired]] = {}
    for each in units:
        own, plain = each.unit.measured[label], each.plain
        pair = Paired(own.num_tokens, own.seconds, plain.num_tokens, plain.seconds)
        blocks.setdefault(each.unit.block, []).append(pair)
    return _interval(blocks, seed)


def _decode_ratio(
    members: Sequence[int], answers: Sequence[Answer], plain: Sequence[Answer], seed: int
) -> dict[str, Any] | None:
    """Of the tokens after the first, as each request saw them come. A sample is a conversation with all its turns."""
    conversations: dict[int, list[Paired]] = {}
    for member, own, other in zip(members, answers, plain, strict=True):
        if own.decode_s is None or other.decode_s is None:
            continue
        pair = Paired(own.decode_tokens, own.decode_s, other.decode_tokens, other.decode_s)
        conversations.setdefault(member, []).append(pair)
    return _interval(conversations, seed)


def _interval(samples: Mapping[int, Sequence[Paired]], seed: int) -> dict[str, Any] | None:
    found = ratio([Paired.total(pairs) for pairs in samples.values()], seed)
    return None if found is None else asdict(found)


def _acceptance(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """None where an engine does not tell."""
    total, deep = SpeculationStatistics(), [0] * max((len(a.drafts_of_depth) for a in answers), default=0)
    for answer in answers:
        if answer.speculation is None:
            return None
        total.merge(answer.speculation)
        for i, count in enumerate(answer.drafts_of_depth):
            deep[i] += count
    histogram = total.acceptance_histogram
    reached = [sum(histogram[i + 1 :]) for i in range(len(deep))]  # passes that accepted more than i tokens
    return {
        "length": total.mean_acceptance_length if total.num_steps else None,
        "rate": total.draft_acceptance_rate if total.num_draft_tokens else None,
        "drafted": total.num_draft_tokens,
        "accepted": total.num_accepted_tokens,
        "by_position": [accepted / drafts for accepted, drafts in zip(reached, deep, strict=True)],
        "histogram": histogram,
    }


def _costs(costs: Sequence[StepCosts | None]) -> dict[str, Any]:
    total = StepCosts()
    for each in costs:
        if each is not None:
            total.add(each)
    parts = {"draft": total.draft_s, "target": total.target_s, "overhead": total.rest_s}
    whole = sum(parts.values())
    return {
        "time_share": {name: part / whole for name, part in parts.items()} if whole else None,
        "target_passes": total.passes if whole else None,
    }


def _token_s(answer: Answer) -> float | None:
    seconds = answer.decode_s
    return seconds / answer.decode_tokens if seconds is not None and answer.decode_tokens else None


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    told = sorted(value for value in values if value is not None)
    return {"mean": sum(told) / len(told), "median": median(told), "most": told[-1]} if told else None


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
