"""Measures what passes of the target and drafts of each method cost here and now, within a fixed time.

Every trial runs once a round, in turn, so that a slow moment strikes all alike; medians count. A model too slow for all
trials gets the first few, which matter most: the table interpolates. All of it happens in a pool of its own. Figures
taken while others wanted the processor, too, are better than none, and no good to keep.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

from paceline.core.drafting import DraftSampler, TopDrafts
from paceline.core.params import SamplingParams
from paceline.core.path import PathSampler
from paceline.core.rng import CounterNoise
from paceline.drafters.base import Drafter, Features, features
from paceline.engine.costs import CostTable, DraftCosts, TargetCosts, never_falling
from paceline.models.cache import SequenceCache
from paceline.models.decoder import Decoder, Segment
from paceline.models.home import Progress, silent
from paceline.ops.attention import BLOCK

logger = logging.getLogger("paceline.engine")
T = TypeVar("T")
Clock = Callable[[], float]
SECONDS = 1.2  # in all, but for a trial that has begun
ROUNDS = 5
ROWS = (1, 16, 4, 64, 32, 8, 17, 2)  # in order of importance: padding makes steps at multiples of 16
CONTEXT, FAR_CONTEXT = 64, 1024
DRAFT_CONTEXT = 32
DRAFTED = 4
CALM = 0.9  # share of the time that the measuring thread, which never waits, was on a processor (idle: 0.96 to 1.0)
WHAT = "measuring this machine"


@dataclass(frozen=True, slots=True)
class Trial:
    """Something to be timed, again and again: `run`, after `before`. `needed`: at least once, whatever it takes."""

    run: Callable[[], object]
    needed: bool = False
    before: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was found; `calm`: with the processor to itself, so that it will hold another time, too."""

    costs: CostTable
    calm: bool


def measured(
    target: Decoder,
    drafters: Mapping[str, Drafter],
    seconds: float = SECONDS,
    clock: Clock = time.perf_counter,
    busy: Clock = time.thread_time,
    progress: Progress = silent,
) -> Measurement:
    """Of the target and of `drafters`, which must not be in use. `busy`: seconds that this thread had a processor."""
    begin, begin_busy = clock(), busy()
    progress(WHAT, 0, 1 + len(drafters))
    share = seconds if not drafters else seconds / 2
    table = CostTable(measured_target(target, share, clock))
    for i, (name, drafter) in enumerate(drafters.items()):
        progress(WHAT, 1 + i, 1 + len(drafters))
        try:
            table.drafts[name] = measured_drafter(target, drafter, seconds / 2 / len(drafters), clock)
        except Exception:  # its costs will show when it is used, and its fault too
            logger.exception("method %s cannot be measured", name)
    progress(WHAT, 1 + len(drafters), 1 + len(drafters))
    calm = target.device.type != "cpu" or busy() - begin_busy >= CALM * (clock() - begin)
    return Measurement(table, calm)


def measured_target(target: Decoder, seconds: float, clock: Clock) -> TargetCosts:
    """Passes over several numbers of rows, of sequences, and at two contexts."""
    most = target.config.max_context
    context = min(CONTEXT, most // 2)
    far = max(context, min(FAR_CONTEXT, most - max(ROWS)))
    pool = target.new_pool(far + 5 * context + 8 * max(ROWS) + 512)

    def sequence(length: int) -> SequenceCache:
        """Zeros take as long as any other rows."""
        cache = pool.new_sequence()
        cache.reserve(length)
        cache.commit(range(length))
        return cache

    def trial(caches: Sequence[SequenceCache], count: int, needed: bool = False) -> Trial:
        segments = [Segment(cache, [0] * count) for cache in caches]

        def run() -> None:
            run_pass(target, segments)

        # Decoding repeats passes of a kind; one right behind a pass with matrix units is up to a quarter slower.
        return Trial(run, needed, before=run)

    near, wide, several = [sequence(context)], [sequence(far)], [sequence(context) for _ in range(4)]
    rows = [count for count in ROWS if count <= context]
    trials = {("near", count): trial(near, count, needed=count in ROWS[:2]) for count in rows[:3]}
    trials["together", 4] = trial(several, 1)
    trials |= {("far", count): trial(wide, count) for count in ROWS[:2] if far > context}
    trials |= {("near", count): trial(near, count) for count in rows[3:]}
    run_pass(target, [Segment(near[0], [0])])  # the first pass of all is slow
    found = timed(trials, seconds, clock)
    return assembled(
        {count: figure for (which, count), figure in found.items() if which == "near"},
        {count: figure for (which, count), figure in found.items() if which == "far"},
        found.get(("together", 4)),
        context,
        far,
    )


def assembled(
    near: Mapping[int, float], distant: Mapping[int, float], four_together: float | None, context: int, far: int
) -> TargetCosts:
    """The table from seconds by rows, of one sequence at two contexts, and of four sequences of a row each."""
    rows, seconds = sorted(near), never_falling([near[count] for count in sorted(near)])
    base = TargetCosts(tuple(rows), tuple(seconds))
    far_rows = sorted(distant) or [1]
    slopes = [max(0.0, distant[count] - base.at(count)) / (far - context) for count in sorted(distant)] or [0.0]
    extra = 0.0 if four_together is None else max(0.0, four_together - base.at(4)) / 3
    return TargetCosts(base.rows, base.seconds, context, tuple(far_rows), tuple(never_falling(slopes)), extra)


def run_pass(target: Decoder, segments: Sequence[Segment]) -> None:
    """What a step does on the target, to its end."""
    target.logits(target.forward(segments).hidden)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def timed(trials: Mapping[T, Trial], seconds: float, clock: Clock) -> dict[T, float]:
    """Median seconds of each trial, one behind the other; one that had no turn in time is left out."""
    samples: dict[T, list[float]] = {name: [] for name in trials}
    start = clock()
    for number in range(ROUNDS):
        for name, trial in trials.items():
            if clock() - start < seconds or (trial.needed and number == 0):
                trial.before()
                begin = clock()
                trial.run()
                samples[name].append(clock() - begin)
    return {name: median(own) for name, own in samples.items() if own}


@dataclass(slots=True, eq=False)
class Stranger:
    """A request that nobody sent, for a drafter to draft for. Its text must not reach others."""

    request_id: int
    token_ids: list[int]
    cache: SequenceCache
    draft_sampler: DraftSampler
    private_drafts: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)


def measured_drafter(target: Decoder, drafter: Drafter, seconds: float, clock: Clock) -> DraftCosts:
    """Drafts for one and for two strangers, after it has read their text."""
    length = min(DRAFT_CONTEXT, target.config.max_context // 2)
    pool = target.new_pool(2 * (length + 2 * BLOCK))
    strangers = [_stranger(target, drafter, pool.new_sequence(), number, length) for number in (-2, -3)]
    try:
        first, second = strangers
        begin = clock()
        drafter.propose([first], [1])  # reads all of the text
        reading = clock() - begin
        drafter.propose([second], [1])
        drafted: list[int] = []

        def deep() -> None:
            drafted.append(len(drafter.propose([first], [DRAFTED])[0]))

        def plain() -> None:
            run_pass(target, [Segment(first.cache, [0])])

        # As in use: each drives the other's weights from the caches, and what the pass loses by it the draft costs.
        found = timed(
            {
                "plain": Trial(plain, needed=True, before=plain),
                "one": Trial(lambda: drafter.propose([first], [1]), needed=True),
                "behind": Trial(plain, needed=True),
                "deep": Trial(deep, needed=True),
                "both": Trial(lambda: drafter.propose(strangers, [1, 1]), before=plain),
            },
            seconds,
            clock,
        )
        one = found["one"]
        # One that stops where it is unsure may draft little for a strange text; a round more than it kept was run then.
        depth = min(DRAFTED, max(drafted) + drafter.needs.looks_ahead)
        each = max(0.0, found["deep"] - one) / (depth - 1) if depth > 1 else one
        extra = max(0.0, found["both"] - one) if "both" in found else one / 2
        displaced = max(0.0, found["behind"] - found["plain"])
        return DraftCosts(one + displaced, each, extra, max(0.0, reading - one) / length)
    finally:
        for stranger in strangers:
            drafter.release(stranger)
            stranger.cache.release()


def _stranger(target: Decoder, drafter: Drafter, cache: SequenceCache, number: int, length: int) -> Stranger:
    """One whose text but for the last token was processed and observed."""
    tokens = [position % target.config.vocab_size for position in range(length)]
    sampler = PathSampler.start(SamplingParams(temperature=0), tokens, target.config.vocab_size, CounterNoise(0))
    stranger = Stranger(number, tokens, cache, TopDrafts(sampler))
    seen = Features()
    if drafter.needs.hidden_layers:
        taps = tuple(layer for layer in drafter.needs.hidden_layers if layer >= 0)
        out = target.forward([Segment(cache, tokens[:-1])], taps=taps)
        seen = features(target, drafter.needs, out, range(length - 1))
    else:
        cache.reserve(length - 1)
    cache.commit(range(length - 1))
    drafter.observe(stranger, tokens[:-1], seen)
    return stranger
