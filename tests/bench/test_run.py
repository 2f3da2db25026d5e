"""The run with arms that answer by script: order, turns, what is counted, and what is left out."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.bench import run as module
from paceline.bench.answers import Answer, Measured
from paceline.bench.prompts import Conversation
from paceline.bench.run import Run, Settings
from paceline.bench.specs import PLAIN, ArmSpec
from paceline.core.params import SamplingParams
from paceline.drafters.config import SpeculativeConfig

LOG: list[tuple[str, Any]] = []


class Tokenizer:
    """A token a character."""

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [ord(char) for message in messages for char in f"<{message['role'][0]}>{message['content']}"]

    def encode(self, text: str, add_special: bool) -> list[int]:
        return [ord(char) for char in text]


class ScriptedArm:
    """Answers with its own initial, as often as it is asked to; it runs as fast as its label is long."""

    most_at_once: int | None = None
    max_model_len = 200
    num_faults = 0
    choices: Any = None
    fails = False

    def __init__(self, label: str, *rest: object) -> None:
        self.label = label
        LOG.append(("build", label))

    def warm_up(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        LOG.append(("warm up", (self.label, len(prompts))))

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
        if self.fails:
            raise RuntimeError("out of\norder")
        LOG.append((self.label, ["".join(map(chr, ids)) for ids in prompts]))
        answers = []
        for own in params:
            assert own.max_tokens is not None
            text = self.label[0] * own.max_tokens
            answers.append(Answer(tuple(map(ord, text)), 1.0, 0.25, 1, text))
        return Measured(tuple(answers), float(len(self.label)))

    def forget(self) -> None:
        LOG.append(("forget", self.label))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    LOG.clear()
    monkeypatch.setattr(module, "MethodArm", ScriptedArm)

    def make(*conversations: Conversation, peers: Sequence[ScriptedArm] = (), labels: str = "ab", **params: Any) -> Run:
        specs = [ArmSpec(label, SpeculativeConfig()) for label in (PLAIN, *labels)]
        model: Any = SimpleNamespace(tokenizer=Tokenizer(), decoder=SimpleNamespace(device=torch.device("cpu")))
        given = {"temperature": 0, "seed": 5, "max_tokens": 4} | params
        return Run(model, specs, peers, conversations, Settings(SamplingParams(**given)))

    return make


def conversation(number: int, *turns: str, category: str = "c") -> Conversation:
    return Conversation(f"{number}", category, turns or (f"q{number}",))


def asked(*names: str) -> list[tuple[str, Any]]:
    return [entry for entry in LOG if entry[0] in names]


def test_arms_take_turns_prompt_by_prompt(run: Any) -> None:
    one = run(*(conversation(i) for i in range(4)))
    list(one.steps([1]))
    order = " ".join(name for name, _ in asked("plain", "a", "b"))
    assert order == "plain a b a b plain b plain a plain a b"
    assert [entry[1] for entry in asked("a")] == [[f"<u>q{i}"] for i in range(4)]


def test_warm_up_is_before_and_apart(run: Any) -> None:
    one = run(conversation(0), conversation(1))
    list(one.steps([2]))
    kinds = [kind for kind, _ in LOG]
    assert kinds == ["build"] * 3 + ["warm up"] * 3 + ["plain", "a", "b"] + ["forget"] * 3
    assert dict(asked("warm up"))["warm up"] == ("b", 2)
    assert len(one.units) == 1 and set(one.units[0].measured) == {"plain", "a", "b"}


def test_every_concurrency_begins_with_fresh_arms(run: Any) -> None:
    one = run(*(conversation(i) for i in range(4)))
    steps = list(one.steps([1, 4]))
    assert [step.total for step in steps] == [5] * 5
    assert [unit.concurrency for unit in one.units] == [1, 1, 1, 1, 4]
    assert len(asked("build")) == 6
    assert asked("a")[-1][1] == [f"<u>q{i}" for i in range(4)]


def test_turns_follow_plain_decodings_answers(run: Any) -> None:
    """Also for arms that answered otherwise: all are asked the same."""
    one = run(conversation(0, "one", "two", "three"), conversation(1, "eins"))
    list(one.steps([2]))
    for label in ("plain", "a", "b"):
        prompts = [entry[1] for entry in asked(label)]
        assert prompts[0] == ["<u>one", "<u>eins"]
        assert prompts[1] == ["<u>one<a>pppp<u>two"]
        assert prompts[2] == ["<u>one<a>pppp<u>two<a>pppp<u>three"]
    assert [(unit.turn, unit.members) for unit in one.units] == [(0, (0, 1)), (1, (0,)), (2, (0,))]
    assert len(asked("forget")) == 3


def test_what_does_not_fit_ends_its_conversation_and_is_named(run: Any) -> None:
    one = run(conversation(0, "x" * 150, "y" * 60, "z"), conversation(1, "short"), max_tokens=100)
    list(one.steps([1]))
    lengths = [len(unit.measured["plain"].answers[0].token_ids) for unit in one.units]
    assert lengths == [200 - 153, 100]  # the first answer as far as there is room
    assert one.notes == ["conversation 0 ends before turn 2: its 266 tokens do not fit a context of 200"]


def test_raw_prompts_go_without_the_template(run: Any) -> None:
    one = run(conversation(0))
    one.settings = Settings(one.settings.params, raw=True)
    list(one.steps([1]))
    assert asked("a") == [("a", ["q0"])]


def test_each_conversation_has_its_own_seed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[str, list[int | None]] = {}
    answer = ScriptedArm.answer

    def noting(self: ScriptedArm, prompts: Any, params: Sequence[SamplingParams]) -> Measured:
        seeds.setdefault(self.label, []).extend(own.seed for own in params)
        return answer(self, prompts, params)

    monkeypatch.setattr(ScriptedArm, "answer", noting)
    one = run(*(conversation(i, "a", "b") for i in range(3)), seed=2**64 - 1)
    list(one.steps([1]))
    assert len(set(seeds["plain"])) == 6 and seeds["plain"] == seeds["a"] == seeds["b"]


def test_a_peer_that_takes_one_prompt_is_not_asked_for_more(run: Any) -> None:
    peer = ScriptedArm("peer")
    peer.most_at_once = 1
    one = run(conversation(0), conversation(1), peers=[peer])
    list(one.steps([1, 2]))
    assert [set(unit.measured) for unit in one.units] == [{"plain", "a", "b", "peer"}] * 2 + [{"plain", "a", "b"}]
    assert one.notes == ["peer answers 1 prompt at a time: not measured at 2"]
    assert one.labels == ["plain", "a", "b", "peer"]


def test_a_peer_that_fails_is_left_out_and_the_run_goes_on(run: Any) -> None:
    peer = ScriptedArm("peer")
    peer.fails = True
    one = run(conversation(0), conversation(1), peers=[peer])
    list(one.steps([1]))
    assert [set(unit.measured) for unit in one.units] == [{"plain", "a", "b"}] * 2
    assert [(each.name, each.why) for each in one.left_out] == [("peer", "it failed: RuntimeError: out of order")]


def test_a_method_of_ours_that_fails_is_not_passed_over(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedArm, "fails", True)
    with pytest.raises(RuntimeError):
        list(run(conversation(0)).steps([1]))


def test_an_interrupt_leaves_whole_units(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = run(*(conversation(i) for i in range(4)))
    answer, calls = ScriptedArm.answer, iter(range(100))

    def interrupted(self: ScriptedArm, prompts: Any, params: Any) -> Measured:
        if next(calls) == 7:
            raise KeyboardInterrupt
        return answer(self, prompts, params)

    monkeypatch.setattr(ScriptedArm, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(one.steps([1]))
    assert [set(unit.measured) for unit in one.units] == [{"plain", "a", "b"}] * 2


def test_what_an_arm_chose_is_kept_by_concurrency(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedArm, "choices", property(lambda self: {"a": "why"} if self.label == "a" else None))
    made = run(conversation(1))
    for _ in made.steps([1, 2]):
        pass
    assert made.choices == {"a": {1: {"a": "why"}, 2: {"a": "why"}}}
