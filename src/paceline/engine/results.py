"""A request in flight, from its arrival to the output that it comes to."""

import time
from dataclasses import dataclass, field, replace

from paceline.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, Usage
from paceline.engine.request import Request
from paceline.engine.sequence import Sequence
from paceline.engine.statistics import SpeculationStatistics


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request's unfinished sequences, and what the others came to. `cancelled`: none of them goes on.

    `counted`: it is among the engine's statistics.
    """

    request: Request
    sequences: list[Sequence]
    cancelled: bool = False
    counted: bool = False
    _done: dict[int, tuple[CompletionOutput, int]] = field(default_factory=dict)  # with how often it was put back
    _cached_tokens: int = 0
    _arrived: float = field(default_factory=time.perf_counter)
    _scheduled: float | None = None
    _prefilled: float | None = None

    def begin(self, cached_tokens: int) -> None:
        """One of its sequences is scheduled; the first that is counts, with what it found in the prefix cache."""
        if self._scheduled is None:
            self._scheduled, self._cached_tokens = time.perf_counter(), cached_tokens

    def decodes(self) -> None:
        """A first token comes: the prompt is done."""
        self._prefilled = self._prefilled or time.perf_counter()

    def finish(self, sequence: Sequence) -> None:
        """One of its sequences has ended."""
        self._done[sequence.choice] = sequence.output(), sequence.num_put_back
        self.sequences.remove(sequence)

    def begun(self) -> set[int]:
        """The choices that there are already, or were."""
        return {*self._done, *(sequence.choice for sequence in self.sequences)}

    def output(self) -> RequestOutput:
        """What it has come to; choices that never began are empty."""
        request = self.request
        done = {**self._done, **{one.choice: (one.output(), one.num_put_back) for one in self.sequences}}
        never = CompletionOutput(0, "", (), None, "abort", None, None, SpeculationStatistics())
        outputs = tuple(done[i][0] if i in done else replace(never, index=i) for i in range(request.params.n))
        statistics = SpeculationStatistics()
        for output in outputs:
            statistics.merge(output.speculation)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_ids,
            outputs=outputs,
            seed=request.seed,
            usage=Usage(
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=sum(len(output.token_ids) for output in outputs),
                cached_tokens=self._cached_tokens,
            ),
            metrics=RequestMetrics(
                queued_s=_span(self._arrived, self._scheduled),
                prefill_s=_span(self._scheduled, self._prefilled),
                decode_s=_span(self._prefilled, time.perf_counter()),
                num_put_back=sum(put_back for _, put_back in done.values()),
                speculation=statistics,
            ),
            lossless=request.rule.lossless,
        )


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
