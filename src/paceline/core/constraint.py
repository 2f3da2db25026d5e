"""The hook that grammars and schemas plug into: which tokens may come next, along each path of a tree."""

from typing import Any, Protocol

from torch import Tensor

# States belong to the constraint; nobody else looks inside one.
State = Any


class TokenConstraint(Protocol):
    """A constraint on token sequences whose states are immutable values.

    `advance` must leave the old state usable: siblings in a tree continue from the same one, and a state of a
    rejected path is simply forgotten. It is called only with tokens that `allowed` permits. An accepted block
    may run past an end-of-sequence token before the engine cuts it there, so a state after the end must exist
    and must allow something (None will do).
    """

    def start(self) -> State:
        """State before the first generated token."""

    def advance(self, state: State, token: int) -> State:
        """State after `token`."""

    def allowed(self, state: State) -> Tensor | None:
        """Boolean mask [V] of the tokens that may come next; None when all may."""


class Unconstrained:
    """Every token may follow every other."""

    def start(self) -> State:
        return None

    def advance(self, state: State, token: int) -> State:
        return None

    def allowed(self, state: State) -> Tensor | None:
        return None
