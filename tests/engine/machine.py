"""A machine whose clock the tests turn: passes and drafts take as long as a script says, and drafts are as right."""

from collections.abc import Callable, Sequence

import pytest
from drafters.scripted import ScriptedDrafter
from engine.running import make_engine, plain

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.drafters.auto import AutoDrafter
from paceline.drafters.base import Drafter, SequenceView
from paceline.drafters.composite import Member
from paceline.engine.costs import CostTable, DraftCosts, TargetCosts
from paceline.engine.engine import Engine
from paceline.engine.policy import AutoPolicy
from paceline.models.decoder import Decoder

FLAT = TargetCosts((1, 64), (1.0, 1.0))


class Machine:
    """pass_seconds(rows) is what a pass of the target takes."""

    def __init__(self, pass_seconds: Callable[[int], float]) -> None:
        self.now = 0.0
        self.pass_seconds = pass_seconds

    def __call__(self) -> float:
        return self.now

    def run(self, target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        """Passes of the target take their time from now on."""
        forward = target.forward

        def slow(segments, **options):  # type: ignore[no-untyped-def]
            self.now += self.pass_seconds(sum(len(segment.token_ids) for segment in segments))
            return forward(segments, **options)

        monkeypatch.setattr(target, "forward", slow)


class Scripted(ScriptedDrafter):
    """Right where `right(position)` says, for as many tokens; drafts nothing where that is None.

    Each call takes `seconds` a round on `machine`; `drafted` notes where it drafted how much.
    """

    def __init__(
        self, name: str, text: Sequence[int], right: Callable[[int], int | None], machine: Machine,
        seconds: float = 0.0, score: float = 0.0, vocab_size: int = 256,
    ) -> None:  # fmt: skip
        super().__init__(text, lambda truth, budget: Proposal.empty())
        self.name = name
        self.right, self.machine, self.seconds, self.score, self.vocab_size = right, machine, seconds, score, vocab_size
        self.drafted: dict[int, int] = {}

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        super().propose(sequences, budgets)  # nothing may have gone unobserved
        proposals = [self._draft(len(s.token_ids), budget) for s, budget in zip(sequences, budgets, strict=True)]
        self.machine.now += self.seconds * max(map(len, proposals), default=0)
        return proposals

    def _draft(self, position: int, budget: int) -> Proposal:
        right = self.right(position)
        if right is None:
            return Proposal.empty()
        truth = [*self.text[position : position + budget], *[0] * budget][:budget]
        tokens = [token if i < right else (token + 1) % self.vocab_size for i, token in enumerate(truth)]
        self.drafted[position] = len(tokens)
        return Proposal.chain(tokens, score=self.score)


def auto_engine(
    target: Decoder, members: Sequence[Drafter], lookups: Sequence[str], machine: Machine,
    costs: TargetCosts = FLAT, drafts: dict[str, DraftCosts] | None = None, budget: int = 16, seats: int = 8,
) -> tuple[Engine, AutoPolicy]:  # fmt: skip
    """An engine with `auto` over the members, and its policy."""
    drafter = AutoDrafter([Member(member, 16) for member in members], lookups)
    engine = make_engine(target, {"auto": drafter}, num_draft_tokens=budget, max_num_seqs=seats)
    engine._clock = machine
    policy = AutoPolicy(drafter, CostTable(costs, dict(drafts or {})), clock=machine)
    engine.policy = drafter.policy = policy
    return engine, policy


def text_of(target: Decoder, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Prompt and answer, as plain decoding has them."""
    return [*prompt, *plain(target, prompt, params)]
