"""The protocol's bookkeeping for drafters that hand nothing on from one request to another. Not a method of its own."""

from collections.abc import Sequence
from typing import Any

from paceline.drafters.base import Features, SequenceView


class Stateless:
    """Observes nothing, remembers nothing. A method that learns from the text drops it in `restore` and `release`."""

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        pass

    def snapshot(self, sequence: SequenceView) -> Any:
        return None

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        pass

    def discard(self, snapshot: Any) -> None:
        pass

    def mend(self, snapshots: Sequence[Any]) -> None:
        pass

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        pass

    def release(self, sequence: SequenceView) -> None:
        pass
