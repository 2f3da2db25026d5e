"""What goes out: an update of each sequence that a step moved, and with a request's last one its output.

All of it can be made again from where an interruption left it (`mend`): what must change together does so in one
assignment, and all else follows from what the sequences say of themselves.
"""

from dataclasses import replace

from paceline.engine.outputs import RequestOutput, Update
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.results import LiveRequest
from paceline.engine.sequence import Sequence
from paceline.engine.speculation import Speculation
from paceline.engine.statistics import SpeculationStatistics


class Handover:
    """Of the `live` requests, which leave that mapping as they end."""

    def __init__(self, live: dict[int, LiveRequest], prefix_cache: PrefixCache, speculation: Speculation) -> None:
        self.statistics = SpeculationStatistics()  # of all requests that have ended
        self._live = live
        self._prefix_cache = prefix_cache
        self._speculation = speculation
        self._batches: list[list[Update]] = [[]]  # the one in the making

    @property
    def has_updates(self) -> bool:
        """Whether something waits to be taken: of a step that was interrupted, it goes out with the next."""
        return any(self._batches)

    def take(self) -> list[Update]:
        """All updates since the last time."""
        self._batches[:0] = [[]]
        return self._batches.pop()

    def show(self, sequence: Sequence) -> None:
        """A sequence's update. One that has ended leaves, and its request with the last of them."""
        if not sequence.end_shown:
            sequence.show(self._batches[-1])
        if sequence.ended:
            live = self._live[sequence.request.request_id]
            self._leave(sequence)
            live.finish(sequence)
            self._close_if_done(live)

    def cancel(self, live: LiveRequest) -> RequestOutput:
        """End a request where it stands; what it had so far."""
        live.cancelled = True
        for sequence in live.sequences:
            sequence.finish("abort")
            self._leave(sequence)
        output = live.output()
        self._count(live, output)
        return (output, self._live.pop(output.request_id))[0]  # at once: an interruption in between would lose it

    def mend(self) -> None:
        """Go on where an interruption came between."""
        for live in list(self._live.values()):
            for sequence in list(live.sequences):
                if live.cancelled and not sequence.ended:
                    sequence.finish("abort")
                if sequence.ended:
                    sequence.reread()
                    self.show(sequence)
            self._close_if_done(live)

    def keep(self, sequence: Sequence) -> None:
        """Its rows, for the next request."""
        cache = sequence.cache
        self._prefix_cache.insert(sequence.token_ids[: cache.length], cache.blocks)

    def _leave(self, sequence: Sequence) -> None:
        """Keep its rows and what its drafter knows, tell the drafter, give back its blocks."""
        cache, drafter = sequence.cache, sequence.drafter
        cache.truncate(min(cache.length, len(sequence.token_ids) - 1))
        if sequence.end.error is None and sequence.num_to_prefill == 0:
            self.keep(sequence)
            if drafter is not None:
                known = sequence.token_ids[: cache.length]
                self._prefix_cache.attach(known, drafter, lambda: self._speculation.snapshot(sequence))
        self._speculation.release(sequence)
        cache.release()

    def _close_if_done(self, live: LiveRequest) -> None:
        """The output of a request whose sequences have all ended goes with the last update."""
        if live.sequences or live.request.request_id not in self._live:
            return
        output, updates = live.output(), self._batches[-1]
        last = max(i for i, update in enumerate(updates) if update.request_id == output.request_id)
        updates[last] = replace(updates[last], output=output)
        self._count(live, output)
        del self._live[output.request_id]

    def _count(self, live: LiveRequest, output: RequestOutput) -> None:
        if not live.counted:
            total = SpeculationStatistics()
            total.merge(self.statistics)
            total.merge(output.metrics.speculation)
            self.statistics, live.counted = total, True
