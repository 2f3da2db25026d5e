"""`auto` on scripted machines: it does what pays, stops what doesn't, asks again seldom, and changes no token."""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from drafters.scripted import ScriptedDrafter, bush
from engine.machine import FLAT, Machine, Scripted, auto_engine, text_of
from engine.running import make_engine, plain, run, seeded
from tiny import prompt, tiny_decoder

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.drafters.auto import AutoDrafter
from paceline.drafters.base import Needs, SequenceView
from paceline.drafters.composite import Member
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.policy import Choice
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.costs import CostTable, DraftCosts, TargetCosts
from paceline.engine.engine import RequestOptions
from paceline.engine.policy import AutoPolicy
from paceline.engine.probes import Probes
from paceline.engine.rests import LONGEST, SOONEST, Asking, Rest
from paceline.engine.timing import StepShape, StepTimes
from paceline.models.decoder import Decoder

PROMPT = prompt(20)
LONG = SamplingParams(temperature=0, max_tokens=400)
CHEAP = DraftCosts(0.1, 0.1, 0.05, 0.001)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_decoder("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def text(target: Decoder) -> list[int]:
    return text_of(target, PROMPT, LONG)


def passes(count: int = 1) -> float:
    """Free rows."""
    return 1.0


def test_free_rows_and_right_drafts_are_taken(
    target: Decoder, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(passes)
    found = Scripted("found", text, lambda position: 99, machine, score=4.0)
    engine, policy = auto_engine(target, [found], ["found"], machine)
    machine.run(target, monkeypatch)
    number = engine.add_request(PROMPT, LONG)
    result = run(engine)
    assert result.ids(number) == text[20:]
    assert result.num_steps < 40  # 400 tokens
    assert policy.usage.of("found").acceptance_rate > 0.95
    assert policy.usage.speedup is not None and policy.usage.speedup > 8


def test_rows_that_cost_stop_it(target: Decoder, text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says that rows are free; the steps tell otherwise."""
    machine = Machine(lambda rows: float(rows))
    found = Scripted("found", text, lambda position: 1, machine, score=4.0)  # one token right, the others wrong
    engine, policy = auto_engine(target, [found], ["found"], machine)
    machine.run(target, monkeypatch)
    number = engine.add_request(PROMPT, LONG)
    result = run(engine)
    assert result.ids(number) == text[20:]
    assert machine.now < 20 + 400 * 1.1  # the prompt's rows, and a second a token in plain decoding
    assert policy.usage.off


def test_drafts_that_are_never_right_are_hardly_tried(
    target: Decoder, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that costs half a pass a token: a few tries, then probes for 1 % of the time."""
    machine = Machine(passes)
    model = Scripted("model", text, lambda position: 0, machine, seconds=0.5)
    engine, policy = auto_engine(target, [model], [], machine, drafts={"model": DraftCosts(0.5, 0.5)})
    machine.run(target, monkeypatch)
    number = engine.add_request(PROMPT, LONG)
    assert run(engine).ids(number) == text[20:]
    late = [position for position in model.drafted if position > 100]
    assert machine.now < 1.05 * 401
    assert policy.probes.seconds_probing <= 0.01 * policy.probes.seconds
    assert len(late) <= 4


def test_probes_are_further_and_further_apart() -> None:
    """And never dearer than their share; a method that is used begins anew."""
    probes, asked = Probes(share=0.01), []
    for step in range(5000):
        probes.spent(1.0)
        method = probes.next_due({"a"}, set())
        if method is not None and probes.afford(method, 0.01):
            asked.append(step)
    gaps = [later - sooner for sooner, later in pairwise(asked)]
    assert gaps == [32, 64, 128, 256, 512, 1024, 1024, 1024]
    assert not probes.afford("a", 50.0)
    assert probes.next_due({"a"}, {"a"}) is None
    assert [probes.next_due({"a"}, set()) for _ in range(16)] == [None] * 15 + ["a"]


def test_a_method_that_knows_when_to_stop_is_charged_for_what_it_drafts(
    target: Decoder, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sure of all that follows at every second place, elsewhere it ends after a token."""
    machine = Machine(passes)

    class Stopping(Scripted):
        def _draft(self, position: int, budget: int) -> Proposal:
            draft = super()._draft(position, budget)
            return draft if position % 2 else draft.prune(range(1))

    model = Stopping("model", text, lambda position: 99 if position % 2 else 0, machine, seconds=0.15)
    engine, policy = auto_engine(target, [model], [], machine, drafts={"model": DraftCosts(0.15, 0.15)}, budget=8)
    machine.run(target, monkeypatch)
    number = engine.add_request(PROMPT, LONG)
    assert run(engine).ids(number) == text[20:]
    lengths = policy.lengths.chances(-1, ("model", 0), 8)
    assert lengths[0] > 0.99 and 0.3 < lengths[7] < 0.7
    assert machine.now < 401 / 1.8


def test_a_method_that_gets_better_is_found_again(
    target: Decoder, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong for 120 tokens, right from then on: a probe finds out, and its acceptance is back at once."""
    machine = Machine(passes)
    model = Scripted("model", text, lambda position: 99 if position > 140 else 0, machine, seconds=0.05)
    engine, _ = auto_engine(target, [model], [], machine, drafts={"model": DraftCosts(0.05, 0.05)})
    machine.run(target, monkeypatch)
    number = engine.add_request(PROMPT, LONG)
    result = run(engine)
    assert result.ids(number) == text[20:]
    early = [position for position in model.drafted if 60 < position <= 140]
    late = [position for position in model.drafted if position > 260]
    assert len(early) <= 4
    assert sum(model.drafted[position] for position in late) > 100
    assert result.num_steps < 250


def test_a_conversation_switches(target: Decoder, text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying and free prose alternate every 50 tokens: the lookup drafts the one, the model the other."""
    machine = Machine(passes)

    def copies(position: int) -> bool:
        return position // 50 % 2 == 0

    suffix = Scripted("suffix", text, lambda position: 99 if copies(position) else None, machine, score=8.0)
    model = Scripted("model", text, lambda position: 2, machine, seconds=0.1)
    engine, policy = auto_engine(target, [suffix, model], ["suffix"], machine, drafts={"model": CHEAP})
    machine.run(target, monkeypatch)
    used: dict[int, str | None] = {}
    choose = policy.choose

    def noting(sequences, budgets, found):  # type: ignore[no-untyped-def]
        choices = choose(sequences, budgets, found)
        used[len(sequences[0].token_ids)] = choices[0].method
        return choices

    monkeypatch.setattr(engine.speculation.drafters["auto"].policy.__class__, "choose",
                        lambda self, *rest: noting(*rest))  # fmt: skip
    number = engine.add_request(PROMPT, LONG)
    assert run(engine).ids(number) == text[20:]
    settled = {position: method for position, method in used.items() if position > 80 and position < 415}
    copied = [method for position, method in settled.items() if copies(position)]
    prose = [method for position, method in settled.items() if not copies(position)]
    assert copied.count("suffix") >= 0.9 * len(copied)
    assert prose.count("model") >= 0.9 * len(prose)


def test_a_lookup_that_is_not_used_is_followed(
    target: Decoder, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are dear and its first drafts are wrong; that they have become right is seen without a probe."""
    machine = Machine(lambda rows: 1.0 + 0.3 * (rows - 1))
    found = Scripted("found", text, lambda position: 99 if position > 150 else 0, machine, score=1.0)
    dear = TargetCosts((1, 64), (1.0, 1.0 + 0.3 * 63))
    engine, policy = auto_engine(target, [found], ["found"], machine, costs=dear)
    policy.probes.share = 0.0
    machine.run(target, monkeypatch)
    number = engine.add_request(PROMPT, LONG)
    result = run(engine)
    assert result.ids(number) == text[20:]
    assert policy.usage.num_probes == 0
    assert policy.usage.of("found").num_accepted_tokens > 150


def test_more_requests_leave_less_room(target: Decoder, text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rows are free: one request drafts, sixteen don't."""
    machine = Machine(lambda rows: 1.0 if rows <= 16 else rows / 16)
    costs = TargetCosts((1, 16, 32), (1.0, 1.0, 2.0))
    found = Scripted("found", text, lambda position: 1, machine, score=1.0)
    params = SamplingParams(temperature=0, max_tokens=60)
    drafted = {}
    for count in (1, 16):
        engine, policy = auto_engine(target, [found], ["found"], machine, costs=costs, seats=16)
        numbers = [engine.add_request(PROMPT, params) for _ in range(count)]
        with monkeypatch.context() as patch:
            machine.run(target, patch)
            result = run(engine)
        assert all(result.ids(number) == text[20:80] for number in numbers)
        drafted[count] = result.outputs[numbers[0]].metrics.speculation.num_draft_tokens
        if count == 16:
            assert "off at 16 running requests: rows cost more than they return" in policy.usage.line()
    assert drafted[1] > 20 > 5 > drafted[16]


class RandomPolicy:
    """Does anything."""

    def __init__(self, drafter: AutoDrafter, seed: int) -> None:
        self.names = [None, *drafter.by_name]
        self.source = random.Random(seed)

    def choose(
        self, sequences: Sequence[SequenceView], budgets: Sequence[int], found: Mapping[str, Sequence[Proposal]],
        asked_at: float,
    ) -> Sequence[Choice]:  # fmt: skip
        return [Choice(self.source.choice(self.names), self.source.randint(0, budget)) for budget in budgets]

    def asks_lookups(self, sequence: SequenceView) -> bool:
        return self.source.random() < 0.7

    def clock(self) -> float:
        return 0.0

    def drafted(self, *what: object) -> None:
        pass

    begin = forget = rested = drafted


def test_lookups_of_no_use_rest_where_asking_costs_something(
    target: Decoder, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong for 200 tokens, right from then on. Asking takes a fortieth of a pass, or nothing."""
    asked, done, rest = {}, {}, 4
    for seconds in (0.0, 0.026):
        machine = Machine(lambda rows: 1.0 + 0.1 * rows)
        found = Scripted("found", text, lambda position: 99 if position > 220 else 0, machine, score=1.0)
        found.seconds = seconds / 16  # a round: it finds that many tokens
        engine, _ = auto_engine(target, [found], ["found"], machine)
        with monkeypatch.context() as patch:
            machine.run(target, patch)
            number = engine.add_request(PROMPT, LONG)
            result = run(engine)
        assert result.ids(number) == text[20:]
        asked[seconds], done[seconds] = [at for at in found.drafted if 60 <= at <= 220], result.num_steps
    assert len(asked[0.0]) > 150
    assert len(asked[0.026]) < 50
    assert max(later - sooner for sooner, later in pairwise(asked[0.026])) == 1 + rest  # 0.5 % of a pass a step
    assert done[0.026] <= done[0.0] + 3 * rest  # it is believed after three that were right


def test_a_rest_is_over_once_a_draft_is_used() -> None:
    """What they found pays the first time that they are asked from step 58 on."""
    rest, asked, paid_at, patience = Rest(), [], None, 8
    for step in range(100):
        if rest.begins_step():
            asked.append(step)
        rest.ends_step(patience, longest=4)
        if paid_at is None and step >= 58 and rest.over:
            paid_at = step
            rest.paid()
    assert paid_at is not None
    gaps = [later - sooner for sooner, later in pairwise(asked)]
    before, after = gaps[: asked.index(paid_at)], gaps[asked.index(paid_at) :]
    assert before == [1] * patience + [2, 3, 4] + [5] * (len(before) - patience - 3)
    assert after[: patience + 2] == [1] * (patience + 1) + [2]


def test_lookups_are_asked_in_vain_for_as_long_as_a_draft_makes_good() -> None:
    """By how many run: what pays for one sequence may not for sixteen. Wrong drafts count as what they cost."""
    asking = Asking()
    for _ in range(12):
        asking.saw(0.016, sequences=16, num_running=16)
    assert asking.seconds == pytest.approx(0.001)
    assert asking.patience(16) == asking.patience(1) == SOONEST
    for _ in range(400):
        asking.returned(0.020, num_running=1)
        for saved in (0.012, -0.004):
            asking.returned(saved, num_running=16)
        asking.returned(-0.001, num_running=4)
    assert asking.patience(1) == SOONEST + 20
    assert asking.patience(16) == asking.patience(31) == SOONEST + 4
    assert asking.patience(4) == SOONEST
    assert [asking.longest_rest(1.0, running) for running in (1, 10, 16, 1000)] == [0, 1, 3, LONGEST]


def test_where_asking_costs_more_than_it_returns_a_sequence_begins_with_rests() -> None:
    asking = Asking()
    asking.saw(0.016, sequences=16, num_running=16)
    assert asking.new_rest(16) == Rest()  # nothing is known yet
    asking.returned(0.004, num_running=16)
    for _ in range(12):
        asking.saw(0.016, sequences=16, num_running=16)
    assert asking.new_rest(16) == asking.new_rest(31) == Rest(SOONEST + 4)
    assert asking.new_rest(1) == Rest()
    for _ in range(30):
        asking.returned(0.004, num_running=16)
    assert asking.new_rest(16) == Rest()


def test_what_was_chosen_stands_for_some_steps_and_no_longer(
    target: Decoder, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one request with lookups alone: most steps take no thought, and what turns wrong is given up all the same."""
    machine, thought = Machine(lambda rows: 1.0 + 0.4 * rows), []
    found = Scripted("found", text, lambda position: 1 if position <= 220 else 0, machine, score=1.0)
    engine, policy = auto_engine(target, [found], ["found"], machine)
    plan = AutoPolicy._plan
    monkeypatch.setattr(
        AutoPolicy, "_plan", lambda self, *rest: thought.append(len(found.drafted)) or plan(self, *rest)
    )
    machine.run(target, monkeypatch)
    number = engine.add_request(PROMPT, LONG)
    result = run(engine)
    assert result.ids(number) == text[20:]
    while_right = sum(position <= 220 for position in found.drafted)
    assert sum(count <= while_right for count in thought) < 0.6 * while_right
    use = policy.usage.of("found")
    assert use.num_accepted_tokens > 80
    assert use.num_drafts < while_right + 80  # 63 of 160: its rates are drawn towards all, which are its own here


def test_looking_at_every_fourth_step_loses_no_time_and_no_token() -> None:
    """Once steps of a kind are known."""
    costs = CostTable(TargetCosts((1, 16), (1.0, 2.0)))
    policy = AutoPolicy(AutoDrafter([Member(SuffixDrafter())]), costs)
    for step in range(200):
        policy.after(StepTimes(StepShape(1), 0, 1, 0.0, 1.0, 0.0))
        assert abs(policy.usage.seconds - (step + 1)) <= 3
    assert policy.usage.plain_seconds == pytest.approx(policy.usage.seconds)


@pytest.mark.parametrize("seed", range(3))
def test_no_choice_changes_a_token(target: Decoder, seed: int) -> None:
    """Lookups, a model, and trees, drafted in turn at random, for three requests of which two share a prefix."""
    shared = prompt(70, seed=3)
    bushy = ScriptedDrafter([*shared, *plain(target, shared, SamplingParams(temperature=0, max_tokens=60))], bush(256))
    bushy.needs = Needs(trees=True)
    members = [SuffixDrafter(), NgramDrafter(), DraftModelDrafter(tiny_decoder("llama", seed=0)), bushy]
    bushy.propose = lambda s, b: [bushy.script(bushy.text[len(x.token_ids) :], n) for x, n in zip(s, b, strict=True)]  # type: ignore[method-assign]
    drafter = AutoDrafter([Member(member) for member in members])
    drafter.policy = RandomPolicy(drafter, seed)
    engine = make_engine(target, {"auto": drafter}, num_draft_tokens=12, prefix_cache_blocks=8)
    asked = {}
    for own, params in (
        (shared, SamplingParams(temperature=0, max_tokens=60)),
        (PROMPT, seeded(seed=4)),
        ([*shared, 5, 6], seeded(seed=9)),
    ):
        asked[engine.add_request(own, params)] = own, params
    late = engine.add_request(shared, seeded(seed=2), RequestOptions(rule="standard"))
    result = run(engine)
    for number, (own, params) in asked.items():
        assert result.ids(number) == plain(target, own, params)
    assert len(result.ids(late)) == 30
    assert not engine.speculation.faults and engine.pool.blocks_in_use == engine.prefix_cache.num_blocks


def test_nothing_stays_with_the_policy(target: Decoder) -> None:
    """Of a request that ends, is cut, or is put back; and its acceptance is kept for the next."""
    saved = []
    drafter = AutoDrafter([Member(SuffixDrafter()), Member(NgramDrafter())])
    engine = make_engine(target, {"auto": drafter}, num_kv_blocks=4, max_model_len=200, prefix_cache_blocks=2)
    policy = AutoPolicy(drafter, CostTable(FLAT), save=saved.append)
    engine.policy = drafter.policy = policy
    asked = (LONG_ENOUGH, seeded(seed=1, max_tokens=50), seeded(seed=2, n=2))
    numbers = {engine.add_request(prompt(60, seed=i), params): (i, params) for i, params in enumerate(asked)}
    result = run(engine)
    for number, (i, params) in numbers.items():
        assert result.ids(number) == plain(target, prompt(60, seed=i), params)
    assert sum(output.metrics.num_put_back for output in result.outputs.values()) > 0
    assert not policy._watches and not policy.acceptance._own
    assert len(saved) == 1  # the others ended within half a minute
    assert not engine.speculation.faults


LONG_ENOUGH = SamplingParams(temperature=0, max_tokens=80)


def test_a_policy_that_fails_costs_speculation_alone(target: Decoder) -> None:
    drafter = AutoDrafter([Member(NgramDrafter())])
    engine = make_engine(target, {"auto": drafter})
    policy = AutoPolicy(drafter, CostTable(FLAT))
    engine.policy = drafter.policy = policy
    policy.acceptance.chances = lambda *what: 1 / 0  # type: ignore[method-assign,assignment]
    params = SamplingParams(temperature=0, max_tokens=120)
    number = engine.add_request(PROMPT, params)
    assert run(engine).ids(number) == plain(target, PROMPT, params)
