"""No drafting: every proposal is empty, and decoding is plain."""

from collections.abc import Sequence

from paceline.core.proposal import Proposal
from paceline.drafters.base import Drafter, Needs, SequenceView
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.stateless import Stateless
from paceline.models.load import LoadedModel


class NoDrafter(Stateless):
    """Proposes nothing and keeps nothing."""

    name = "none"
    needs = Needs()

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [Proposal.empty() for _ in sequences]


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    return NoDrafter()
