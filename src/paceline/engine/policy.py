"""`auto`: which method drafts how much for whom, or that none does, decided anew in every step.

Costs come from the table, chances and lengths from running rates; `plan` weighs them. A choice depends on nothing but
what was known before the tokens it concerns were drawn: costs, earlier tokens, and what lookups found without chance.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.core.proposal import Proposal
from paceline.drafters.base import SequenceView
from paceline.drafters.config import MAX_DRAFT_TOKENS
from paceline.drafters.policy import Choice, Choosing
from paceline.engine.acceptance import FULL_LENGTH, Kind, PositionRates, score_class
from paceline.engine.costs import SHAPE, CostTable, DraftCosts
from paceline.engine.following import Followed, Standing, Watch
from paceline.engine.plan import NOTHING, Option, PassSeconds, Pick, Plan, best_plan
from paceline.engine.probes import Probes
from paceline.engine.profile import Profile
from paceline.engine.rests import Asking, Rest
from paceline.engine.timing import StepShape, StepTimes
from paceline.engine.usage import DRAFTS_COST, LOOKUPS_REST, NOTHING_FOUND, ROWS_COST, SELDOM_RIGHT, Usage

PLAIN = "none"
IN_STEP = 16  # rows that a method reads as it drafts: only a longer lag is a cost of its own
HORIZON = 64  # tokens that catching up is spread over at least; later, as many as were generated so far
MOST_DEPTH = 16  # levels of a tree that chances are kept for
STANDS = 8  # steps: what is chosen for a sequence that runs alone, with lookups alone, hardly changes sooner
LOOK_EVERY = 4  # steps of a kind that is known well: looking at what they took costs something, too
PLAIN_STEPS = 2  # before anything is drafted, at each number of sequences (by powers of two)
SAVE_EVERY = 30.0  # seconds


class StepPolicy(Protocol):
    """What the engine tells: the step that comes, and what it took."""

    def before(self, shape: StepShape) -> None:
        """A step is about to be drafted for."""

    def after(self, step: StepTimes) -> None:
        """It is done. Not called for a step that failed."""

    def report(self) -> dict[str, Any] | None:
        """What was decided so far, and why; None where nothing is to be decided."""


class FixedBudgets:
    """Every request drafts what it asked for."""

    def before(self, shape: StepShape) -> None:
        pass

    def after(self, step: StepTimes) -> None:
        pass

    def report(self) -> dict[str, Any] | None:
        return None


@dataclass(slots=True, eq=False)
class _Step:
    """A step in the making."""

    shape: StepShape
    pass_seconds: PassSeconds
    others: int
    drafting: dict[str, DraftCosts]


@dataclass(slots=True, eq=False)
class AutoPolicy:
    """Chooses for `drafter`. `save` is given what was learnt, now and then; `clock` gives seconds."""

    drafter: Choosing
    costs: CostTable
    acceptance: PositionRates = field(default_factory=PositionRates)
    lengths: PositionRates = field(default_factory=lambda: PositionRates(FULL_LENGTH))
    save: Callable[[Profile], None] = lambda profile: None
    clock: Callable[[], float] = time.perf_counter
    usage: Usage = field(default_factory=Usage)
    probes: Probes = field(default_factory=Probes)
    asking: Asking = field(default_factory=Asking)
    _watches: dict[int, Watch] = field(default_factory=dict)
    _shape: StepShape | None = None
    _num_running: int = 1  # sequences of the last step
    _saved: float | None = None
    _unseen: list[StepTimes] = field(default_factory=list)
    _resting: dict[int, tuple[int, int]] = field(default_factory=dict)  # by sequences that run: patience, longest rest

    # What the engine tells

    def before(self, shape: StepShape) -> None:
        self._shape, self._num_running = shape, max(1, shape.num_sequences)

    def after(self, step: StepTimes) -> None:
        shape, costs = step.shape, self.costs
        self._shape = None
        self.probes.spent(step.seconds)
        if shape.num_chunks or not shape.num_turns:
            return  # prompts: rows without an output layer, and no tokens
        rows, sequences = shape.num_rows + step.num_draft_rows, shape.num_sequences
        self._unseen.append(step)
        if len(self._unseen) < LOOK_EVERY and costs.num_seen(rows, sequences) >= SHAPE:
            return
        costs.saw_pass(step.target_s, rows, sequences, shape.context)
        costs.saw_rest(step.rest_s, step.num_tokens)
        plain = costs.pass_seconds(sequences, sequences, shape.context) / sequences + costs.per_token
        self.usage.seconds += sum(each.seconds for each in self._unseen)
        self.usage.plain_seconds += plain * sum(each.num_tokens for each in self._unseen)
        self._unseen.clear()

    def report(self) -> dict[str, Any] | None:
        return self.usage.as_json()

    # What the drafter asks and tells

    def asks_lookups(self, sequence: SequenceView) -> bool:
        return self._settled(sequence).rest.begins_step()

    def rested(self, sequences: Sequence[SequenceView]) -> None:
        self.usage.num_choices += len(sequences)
        self.usage.off[self._num_running, LOOKUPS_REST] += len(sequences)

    def choose(
        self, sequences: Sequence[SequenceView], budgets: Sequence[int], found: Mapping[str, Sequence[Proposal]],
        asked_at: float,
    ) -> Sequence[Choice]:  # fmt: skip
        watches = [self._settled(sequence) for sequence in sequences]
        if self._only_lookups and (choices := self._at_once(watches, budgets, found, asked_at)) is not None:
            return choices
        step = self._step(sequences)
        options = [
            self._options(sequence, watch, budget, {name: drafts[i] for name, drafts in found.items()}, step)
            for i, (sequence, watch, budget) in enumerate(zip(sequences, watches, budgets, strict=True))
        ]
        plan = self._plan(options, step)
        self._account(plan, options, watches, step)
        picks = self._probed(plan, options, watches, step)
        rows = sum(pick.count for pick in picks)
        price = (step.pass_seconds(rows) - step.pass_seconds(0)) / rows if rows else 0.0
        worth = 1 / plan.rate
        if self._only_lookups and len(found) == len(watches) == 1:
            self._let_stand(watches[0], plan.picks[0], next(iter(found.items())), step, worth)
        for i, (watch, pick) in enumerate(zip(watches, picks, strict=True)):
            for name, drafts in found.items():
                if len(drafts[i]):
                    used = pick.count if pick.option is not None and pick.option.method == name else 0
                    watch.add(Followed(_kind(name, drafts[i]), drafts[i], 0, used, used * price, worth))
        if found:
            longest = self.asking.longest_rest(step.pass_seconds(0), step.shape.num_sequences)
            self._resting[self._num_running] = (self.asking.patience(self._num_running), longest)
            self._end_asking(watches, self.clock() - asked_at)
        return [Choice() if pick.option is None else Choice(pick.option.method, pick.count) for pick in picks]

    def drafted(
        self,
        method: str,
        sequences: Sequence[SequenceView],
        budgets: Sequence[int],
        drafts: Sequence[Proposal],
        seconds: float,
    ) -> None:
        behind, depths = 0, []
        needs = self.drafter.by_name[method].drafter.needs
        for sequence, budget, draft in zip(sequences, budgets, drafts, strict=True):
            watch = self._watches[sequence.request_id]
            behind += _beyond_step(watch.behind(method))
            watch.known[method] = watch.num_seen
            depths.append(min(len(draft) + needs.looks_ahead, budget))
            watch.add(Followed((method, 0), draft, 0 if needs.trees else budget, len(draft)))
            if not needs.trees:
                self.lengths.add(sequence.request_id, (method, 0), len(draft), len(draft) < budget)
        self.costs.saw_draft(method, seconds, depths, behind)

    def begin(self, sequence: SequenceView, num_tokens: int) -> None:
        self._watches[sequence.request_id] = self._new_watch(sequence, num_tokens)

    def forget(self, sequence: SequenceView) -> None:
        watch = self._watches.pop(sequence.request_id, None)
        if watch is None:
            return
        self._learn(sequence, [*watch.settle(sequence.token_ids), *watch.following], watch.rest)
        self.acceptance.forget(sequence.request_id)
        self.lengths.forget(sequence.request_id)
        now = self.clock()
        if self._saved is None or now - self._saved >= SAVE_EVERY:
            self._saved = now
            self.save(Profile(self.costs, self.acceptance, self.lengths))

    # A step, part by part

    def _settled(self, sequence: SequenceView) -> Watch:
        watch = self._watches.get(sequence.request_id)
        if watch is None:
            watch = self._watches[sequence.request_id] = self._new_watch(sequence)
        self._learn(sequence, watch.settle(sequence.token_ids), watch.rest)
        return watch

    def _new_watch(self, sequence: SequenceView, num_known: int = 0) -> Watch:
        return Watch(len(sequence.token_ids), num_known=num_known, rest=self.asking.new_rest(self._num_running))

    def _learn(self, sequence: SequenceView, settled: Sequence[Followed], rest: Rest) -> None:
        for followed in settled:
            if followed.num_right or followed.wrong:
                self.acceptance.add(sequence.request_id, followed.kind, followed.num_right, followed.wrong)
            if followed.num_used:
                use = self.usage.of(followed.kind[0])
                use.num_drafts += 1
                use.num_draft_tokens += followed.num_used
                accepted = min(followed.num_right, followed.num_used)
                use.num_accepted_tokens += accepted
                if followed.kind[0] in self.drafter.lookups:
                    saved = accepted * followed.worth - followed.price
                    self.asking.returned(saved, self._num_running)
                    if saved > 0:
                        rest.paid()

    def _end_asking(self, watches: Sequence[Watch], seconds: float) -> None:
        self.asking.saw(seconds, sum(watch.rest.over for watch in watches), self._num_running)
        patience, longest = self._resting[self._num_running]
        for watch in watches:
            watch.rest.ends_step(patience, longest)

    # Choices that take no thought

    @property
    def _only_lookups(self) -> bool:
        return len(self.drafter.lookups) == len(self.drafter.by_name)

    def _at_once(
        self, watches: Sequence[Watch], budgets: Sequence[int], found: Mapping[str, Sequence[Proposal]], asked_at: float
    ) -> Sequence[Choice] | None:
        """Nothing, if nothing was found; or, for one sequence, what was chosen of late. None: think."""
        if self._num_running not in self._resting:
            return None
        drafts = [(name, draft) for name, own in found.items() for draft in own if len(draft)]
        if not drafts:
            for watch in watches:
                self.usage.off[len(watches), NOTHING_FOUND if watch.rest.over else LOOKUPS_REST] += 1
            choices = [Choice()] * len(watches)
        elif len(drafts) == len(watches) == 1:
            choice = self._stands(watches[0], budgets[0], *drafts[0])
            choices = [] if choice is None else [choice]
        else:
            choices = []
        if not choices:
            return None
        self.usage.num_choices += len(watches)
        self._end_asking(watches, self.clock() - asked_at)
        return choices

    def _stands(self, watch: Watch, budget: int, name: str, draft: Proposal) -> Choice | None:
        standing, kind = watch.standing, _kind(name, draft)
        if standing is None or standing.left <= 0 or (count := standing.counts.get(kind)) is None:
            return None
        standing.left -= 1
        used = min(count, budget, len(draft))
        watch.add(Followed(kind, draft, 0, used, used * standing.price, standing.worth))
        return Choice(name, used)

    def _let_stand(
        self, watch: Watch, pick: Pick, found: tuple[str, Sequence[Proposal]], step: _Step, worth: float
    ) -> None:
        """Of a draft that was taken to its end, as much as there is."""
        name, (draft,) = found
        if pick.count == 0 or self.costs.num_seen(step.shape.num_rows + pick.count, 1) < STANDS:
            return
        if watch.standing is None or watch.standing.left <= 0:
            watch.standing = Standing(STANDS, step.pass_seconds(1) - step.pass_seconds(0), worth)
        watch.standing.counts[_kind(name, draft)] = MAX_DRAFT_TOKENS if pick.count == len(draft) else pick.count

    def _step(self, sequences: Sequence[SequenceView]) -> _Step:
        count = len(sequences)
        context = sum(len(sequence.token_ids) for sequence in sequences) / count
        shape = self._shape or StepShape(count, context=context)
        known: list[float] = []

        def pass_seconds(drafted: float) -> float:
            whole = int(drafted)
            more = whole + (drafted > whole)
            while len(known) <= more:
                seconds = self.costs.pass_seconds(shape.num_rows + len(known), shape.num_sequences, shape.context)
                known.append(max(seconds, known[-1]) if known else seconds)
            return known[whole] + (drafted - whole) * (known[more] - known[whole])

        drafting = {name: self.costs.draft_costs(name) for name in self._drafting_methods()}
        return _Step(shape, pass_seconds, max(0, shape.num_turns - count), drafting)

    def _drafting_methods(self) -> list[str]:
        return [name for name in self.drafter.by_name if name not in self.drafter.lookups]

    def _options(
        self, sequence: SequenceView, watch: Watch, budget: int, found: Mapping[str, Proposal], step: _Step
    ) -> list[Option]:
        options, number = [], sequence.request_id
        for name, draft in found.items():
            if len(draft):
                count = min(len(draft), budget)
                options.append(Option(name, self.acceptance.chances(number, _kind(name, draft), count)))
        for name, costs in step.drafting.items():
            member = self.drafter.by_name[name]
            count = min(budget, member.num_draft_tokens)
            drawn = paid = None
            if member.drafter.needs.trees:
                levels = self.acceptance.chances(number, (name, 0), min(count, MOST_DEPTH))
                chances = [sum(levels) / count] * count  # each node of a tree is worth as much as any
            else:
                chances = self.acceptance.chances(number, (name, 0), count)
                drawn = self.lengths.chances(number, (name, 0), count)
                paid = [1.0, *drawn[:-1]] if member.drafter.needs.looks_ahead else drawn
                chances = chances[: len(drawn)]
            generated = len(sequence.token_ids) - sequence.num_prompt_tokens
            behind_s = costs.per_token_behind * _beyond_step(watch.behind(name))
            # It will probably go on for as long as it has, and longer passes are fewer.
            share = (1 + sum(chances)) / max(HORIZON, generated)
            options.append(Option(name, chances, costs, behind_s * share, drawn, paid))
        return [option for option in options if option.chances]

    def _plan(self, options: Sequence[Sequence[Option]], step: _Step) -> Plan:
        """The best plan; but what everything is compared with must have been seen here, and not only in a profile."""
        if self.costs.num_seen(step.shape.num_rows, step.shape.num_sequences) < PLAIN_STEPS:
            options = [[] for _ in options]
        return best_plan(options, step.pass_seconds, step.others)

    def _account(self, plan: Plan, options: Sequence[Sequence[Option]], watches: Sequence[Watch], step: _Step) -> None:
        self.usage.num_choices += len(plan.picks)
        running = len(plan.picks) + step.others
        for pick, own, watch in zip(plan.picks, options, watches, strict=True):
            if pick.option is None:
                rests = not own and not watch.rest.over
                reason = LOOKUPS_REST if rests else _why_not(own, len(plan.picks), step.pass_seconds)
                self.usage.off[running, reason] += 1

    def _probed(
        self, plan: Plan, options: Sequence[Sequence[Option]], watches: Sequence[Watch], step: _Step
    ) -> list[Pick]:
        """The picks, one of them replaced by a probe if one is due and can be afforded."""
        picks = list(plan.picks)
        used = {pick.option.method for pick in picks if pick.option is not None}
        offered = {option.method for own in options for option in own}
        method = self.probes.next_due({*offered, PLAIN}, used or {PLAIN})
        if method is None:
            return picks
        if method == PLAIN:
            return self._plainly(plan, step)
        rows = sum(pick.count for pick in picks)
        ways = [(watches[i].behind(method), i, option) for i, own in enumerate(options) for option in own
                if option.method == method]  # fmt: skip
        behind, i, option = min(ways, key=lambda way: way[:2])
        count = min(self.probes.num_tokens, len(option.chances))
        seconds = step.pass_seconds(rows + count) - step.pass_seconds(rows)
        if option.drafting is not None:
            seconds += option.drafting.at([count], _beyond_step(behind))
        given_up = picks[i]
        if given_up.option is not None:
            seconds += sum(given_up.option.chances[: given_up.count]) / plan.rate
        if self.probes.afford(method, seconds):
            picks[i] = Pick(option, count)
            self.usage.num_probes += 1
        return picks

    def _plainly(self, plan: Plan, step: _Step) -> list[Pick]:
        """No picks, if that can be afforded: what plain decoding costs now is what the others are measured by."""
        without = len(plan.picks) + step.others
        lost = step.pass_seconds(0) - without / plan.rate
        if not self.probes.afford(PLAIN, max(0.0, lost)):
            return list(plan.picks)
        self.usage.num_probes += 1
        return [NOTHING] * len(plan.picks)


def _kind(method: str, draft: Proposal) -> Kind:
    return method, score_class(draft.score)


def _beyond_step(behind: int) -> int:
    return behind if behind > IN_STEP else 0


def _why_not(options: Sequence[Option], count: int, pass_seconds: PassSeconds) -> str:
    """Of a sequence that gets no draft: what was the best option's fault."""
    if not options:
        return NOTHING_FOUND
    option = max(options, key=lambda option: sum(option.chances))
    if option.chances[0] < 0.3:
        return SELDOM_RIGHT
    depth = len(option.chances)
    rows = (pass_seconds(count * sum(option.rows(k) for k in range(depth))) - pass_seconds(0)) / count
    drafting = sum(option.seconds(k, count) for k in range(depth)) / count
    return ROWS_COST if rows >= drafting else DRAFTS_COST
