"""What a drafter of several methods and the policy that chooses among them know of each other. Not a method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.proposal import Proposal
from paceline.drafters.base import Drafter, SequenceView


@dataclass(frozen=True, slots=True)
class Choice:
    """Who drafts for a sequence, and how many nodes at most; nobody: None."""

    method: str | None = None
    budget: int = 0


class Policy(Protocol):
    """Chooses, in every step, for each sequence."""

    def choose(
        self, sequences: Sequence[SequenceView], budgets: Sequence[int], found: Mapping[str, Sequence[Proposal]],
        asked_at: float,
    ) -> Sequence[Choice]:  # fmt: skip
        """One choice a sequence, within its budget.

        found: what each lookup that was asked would draft for it; asked_at: by the clock, when asking began.
        """

    def asks_lookups(self, sequence: SequenceView) -> bool:
        """Whether its lookups are to be asked in this step; to be asked once a step."""

    def rested(self, sequences: Sequence[SequenceView]) -> None:
        """There is nothing to choose from: nobody was asked."""

    def clock(self) -> float:
        """Seconds since some moment."""

    def drafted(
        self,
        method: str,
        sequences: Sequence[SequenceView],
        budgets: Sequence[int],
        drafts: Sequence[Proposal],
        seconds: float,
    ) -> None:
        """A method that is no lookup has drafted, all of them in so many seconds."""

    def begin(self, sequence: SequenceView, num_tokens: int) -> None:
        """A sequence begins, or begins again; its first tokens are known to all members already."""

    def forget(self, sequence: SequenceView) -> None:
        """It has ended."""


class OneOf(Protocol):
    """A drafter, and how many nodes it drafts at most."""

    @property
    def drafter(self) -> Drafter: ...

    @property
    def num_draft_tokens(self) -> int: ...


class Choosing(Drafter, Protocol):
    """A drafter of several whose `policy`, once it has one, chooses among them."""

    policy: Policy | None

    @property
    def by_name(self) -> Mapping[str, OneOf]:
        """All of them."""

    @property
    def lookups(self) -> Sequence[str]:
        """Names of those that cost nothing, and are asked before the choice."""

    @property
    def on_trial(self) -> Mapping[str, Sequence[float]]:
        """Names of those that nobody asked for, and how often each position of their chains is accepted."""

    def leave_out(self, name: str) -> None:
        """Do without one, before anything is drafted."""
