"""The run: every arm answers the same prompts, in turn, block by block."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from paceline.bench import memory
from paceline.bench.answers import Arm, Measured
from paceline.bench.blocks import Block, blocks, rotated
from paceline.bench.method import MethodArm
from paceline.bench.prompts import Conversation
from paceline.bench.specs import PLAIN, ArmSpec, LeftOut
from paceline.core.params import SamplingParams
from paceline.models.load import LoadedModel

T = TypeVar("T")
Message = Mapping[str, str]
WARM_UP = "Hello! Please count from {} to a hundred."
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """What every arm is asked alike."""

    params: SamplingParams  # with a seed, from which each conversation has its own
    raw: bool = False  # without the chat template


@dataclass(frozen=True, slots=True)
class Unit:
    """One turn of a block of conversations, answered by each arm in turn."""

    concurrency: int
    block: int
    category: str | None  # None: of several
    members: tuple[int, ...]  # conversations, by number
    turn: int
    measured: Mapping[str, Measured]  # by arm


@dataclass(frozen=True, slots=True)
class Step:
    """Where a run is."""

    done: int
    total: int
    unit: Unit


class Run:
    """Arms × conversations × concurrencies. `units` holds what is measured, at any time: a unit is whole or absent.

    The model has a tokenizer, and unless the prompts are raw a chat template.
    """

    def __init__(
        self,
        model: LoadedModel,
        specs: Sequence[ArmSpec],
        peers: Sequence[Arm],
        conversations: Sequence[Conversation],
        settings: Settings,
    ) -> None:
        self.units: list[Unit] = []
        self.left_out: list[LeftOut] = []
        self.notes: list[str] = []
        self.faults: Counter[str] = Counter()  # of drafters, by arm
        self.choices: dict[str, dict[int, Any]] = {}  # of arms that choose: by arm and concurrency
        self.build_memory: dict[str, int] = {}  # bytes that an arm took before it began, at most
        self.model, self.specs, self.settings = model, specs, settings
        self._own: list[MethodArm] = []  # of the concurrency at hand, plain decoding first
        self.peers = list(peers)
        self.conversations = conversations

    @property
    def labels(self) -> list[str]:
        """Arms that have measured anything, ours first."""
        seen = dict.fromkeys(label for unit in self.units for label in unit.measured)
        own = [spec.label for spec in self.specs]
        return [*(label for label in own if label in seen), *(label for label in seen if label not in own)]

    def steps(self, concurrencies: Sequence[int]) -> Iterator[Step]:
        """Measure, yielding after each unit."""
        plans = {concurrency: blocks(self.conversations, concurrency) for concurrency in concurrencies}
        total = sum(self._num_turns(block) for plan in plans.values() for block in plan)
        for concurrency, plan in plans.items():
            self._own = []  # gives the last ones' memory back first
            self._own = [self._build(spec, concurrency) for spec in self.specs]
            self._warm_up(concurrency)
            for number, block in enumerate(plan):
                for unit in self._block(concurrency, number, block):
                    self.units.append(unit)
                    yield Step(len(self.units), total, unit)
            self.faults.update({arm.label: arm.num_faults for arm in self._own if arm.num_faults})
            for arm in self._own:
                if (chosen := arm.choices) is not None:
                    self.choices.setdefault(arm.label, {})[concurrency] = chosen

    def _num_turns(self, block: Block) -> int:
        return max(len(self.conversations[member].turns) for member in block.members)

    def _build(self, spec: ArmSpec, concurrency: int) -> MethodArm:
        before = memory.resident()
        arm = MethodArm(spec.label, self.model, spec.config, concurrency)
        after = memory.resident()
        if before is not None and after is not None:
            self.build_memory[spec.label] = max(self.build_memory.get(spec.label, 0), after - before)
        return arm

    def _arms(self, concurrency: int) -> list[Arm]:
        """Ours, and the peers that take so many prompts at once."""
        arms: list[Arm] = [*self._own]
        for peer in self.peers:
            if peer.most_at_once is None or concurrency <= peer.most_at_once:
                arms.append(peer)
            else:
                self._note(f"{peer.label} answers {peer.most_at_once} prompt at a time: not measured at {concurrency}")
        return arms

    def _warm_up(self, concurrency: int) -> None:
        prompts = [self._encode([], WARM_UP.format(number)) for number in range(1, concurrency + 1)]
        params = [replace(self.settings.params, max_tokens=WARM_UP_TOKENS, ignore_eos=True)] * concurrency
        for arm in self._arms(concurrency):
            self._try(arm, lambda arm: arm.warm_up(prompts, params))

    def _block(self, concurrency: int, number: int, block: Block) -> Iterator[Unit]:
        """Turn by turn; plain decoding's answers are what the next turn's prompts repeat."""
        said: dict[int, list[Message]] = {member: [] for member in block.members}
        for turn in range(self._num_turns(block)):
            asked = self._asked(said, turn)
            if not asked.members:
                break
            measured: dict[str, Measured] = {}
            for arm in rotated(self._arms(concurrency), len(self.units)):
                result = self._try(arm, lambda arm: self._measure(arm, asked))  # noqa: B023 - called at once
                if result is not None:
                    measured[arm.label] = result
            for member, answer in zip(asked.members, measured[PLAIN].answers, strict=True):
                user = {"role": "user", "content": self.conversations[member].turns[turn]}
                said[member] += [user, {"role": "assistant", "content": answer.text}]
            yield Unit(concurrency, number, block.category, asked.members, turn, measured)
        for arm in self._arms(concurrency):
            arm.forget()

    def _asked(self, said: Mapping[int, list[Message]], turn: int) -> "Asked":
        """Who has this turn, with what prompt and for how many tokens."""
        room = min(arm.max_model_len for arm in self._own)
        params = self.settings.params
        assert params.max_tokens is not None and params.seed is not None
        members, prompts, chosen = [], [], []
        for member, messages in said.items():
            conversation = self.conversations[member]
            if turn >= len(conversation.turns) or len(messages) != 2 * turn:
                continue
            ids = self._encode(messages, conversation.turns[turn])
            if len(ids) >= room:
                self._note(
                    f"conversation {conversation.id} ends before turn {turn + 1}: its {len(ids)} tokens "
                    f"do not fit a context of {room}"
                )
                continue
            members.append(member)
            prompts.append(ids)
            limit, seed = min(params.max_tokens, room - len(ids)), (params.seed + 1000 * member + turn) % 2**64
            chosen.append(replace(params, max_tokens=limit, seed=seed))
        return Asked(tuple(members), prompts, chosen)

    def _encode(self, messages: Sequence[Message], text: str) -> list[int]:
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        if self.settings.raw:
            return tokenizer.encode(text, add_special=True)
        return tokenizer.apply_chat_template([*messages, {"role": "user", "content": text}])

    def _measure(self, arm: Arm, asked: "Asked") -> Measured:
        device = self.model.decoder.device
        watched = memory.reset_peak(device)
        result = arm.answer(asked.prompts, asked.params)
        return replace(result, peak_memory=memory.peak(device)) if watched else result

    def _try(self, arm: Arm, act: Callable[[Arm], T]) -> T | None:
        """Another engine that fails is left out from then on: the run is worth more than it."""
        try:
            return act(arm)
        except Exception as error:
            if arm not in self.peers:
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.left_out.append(LeftOut(arm.label, f"it failed: {reason}"))
            self.peers.remove(arm)
            return None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True, slots=True)
class Asked:
    """What every arm is asked in a unit."""

    members: tuple[int, ...]
    prompts: list[list[int]]
    params: list[SamplingParams]
