"""No drafting: every proposal is empty, and decoding is plain."""

from collections.abc import Sequence
from typing import Any

from paceline.core.proposal import Proposal
from paceline.drafters.base import Drafter, Features, Needs, SequenceView
from paceline.drafters.config import SpeculativeConfig
from paceline.models.load import LoadedModel


class NoDrafter:
    """Proposes nothing and keeps nothing."""

    name = "none"
    needs = Needs()

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        pass

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [Proposal.empty() for _ in sequences]

    def snapshot(self, sequence: SequenceView) -> Any:
        return None

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        pass

    def discard(self, snapshot: Any) -> None:
        pass

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        pass

    def release(self, sequence: SequenceView) -> None:
        pass


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    return NoDrafter()
