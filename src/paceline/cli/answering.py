"""One answer of a model, as it comes, until its end or until Ctrl-C; and how it went."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine, RequestOptions
from paceline.engine.outputs import CompletionOutput, RequestOutput
from paceline.engine.statistics import SpeculationStatistics
from paceline.errors import PacelineError


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished or interrupted answer, cut at its stop string if it met one."""

    output: RequestOutput
    seconds: float  # from the request to its end

    @property
    def completion(self) -> CompletionOutput:
        return self.output.outputs[0]

    @property
    def num_tokens(self) -> int:
        return len(self.completion.token_ids)

    @property
    def interrupted(self) -> bool:
        return self.completion.finish_reason == "abort"

    @property
    def finish_reason(self) -> str:
        """ "stop", "length" or "interrupted"."""
        return "interrupted" if self.interrupted else self.completion.finish_reason

    @property
    def prefill_s(self) -> float:
        prefill = self.output.metrics.prefill_s
        return self.seconds if prefill is None else prefill  # interrupted before its end

    @property
    def decode_s(self) -> float:
        return self.output.metrics.decode_s or 0.0


class Interrupts:
    """Ctrl-C while it is entered is noted, and seen between two passes: none is torn. A second one ends the program."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # as a background job has it
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def answer(
    engine: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    options: RequestOptions,
    show: Callable[[str], None],
    interrupts: Interrupts,
) -> Answer:
    """Answer one prompt, showing the text as it settles, until its end or until an interrupt is asked for."""
    start = time.perf_counter()
    number = engine.add_request(prompt_ids, params, options)
    progress, shown = PromptProgress(len(prompt_ids)), 0
    output: RequestOutput | None = None
    try:
        while output is None and not interrupts.asked:
            for update in engine.step():
                progress.end()
                show(update.text)
                shown += len(update.text)
                output = update.output
            if not shown:
                progress(sum(sequence.num_to_prefill for sequence in engine.scheduler.running))
    finally:
        output = engine.cancel(number) or output
        progress.end()
    assert output is not None
    show(output.outputs[0].text[shown:])  # what was held back, if it was interrupted
    if (error := output.outputs[0].error) is not None:
        show("\n")  # the text so far stands
        raise PacelineError(error, hint="the weights or their precision are at fault: try --dtype fp32")
    return Answer(output, time.perf_counter() - start)


class PromptProgress:
    """Tells a person at a terminal, after a second, how far a long prompt is."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._start = time.perf_counter()
        self._line_open = False

    def __call__(self, left: int) -> None:
        if left and time.perf_counter() - self._start > 1 and sys.stderr.isatty():
            print(f"\rprompt: {self._total - left} of {self._total} tokens", end="", file=sys.stderr, flush=True)
            self._line_open = True

    def end(self) -> None:
        if self._line_open:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._line_open = False


def write(text: str) -> None:
    print(text, end="", flush=True)


def hide(text: str) -> None:
    pass


def statistics_parts(num_tokens: int, seconds: float, speculation: SpeculationStatistics, drafting: bool) -> list[str]:
    """Tokens, speed, passes, and how drafting went where there was any."""
    parts = [plural(num_tokens, "token"), f"{rate(num_tokens, seconds):.1f} tokens/s"]
    if speculation.num_draft_tokens:
        parts += [
            f"acceptance length {speculation.mean_acceptance_length:.2f}",
            f"acceptance rate {100 * speculation.draft_acceptance_rate:.0f} % "
            f"({speculation.num_accepted_tokens} of {speculation.num_draft_tokens})",
        ]
    elif drafting:
        parts.append("nothing drafted")
    return [*parts, plural(speculation.num_steps, "pass", "passes")]


def rate(num_tokens: int, seconds: float) -> float:
    return num_tokens / seconds if seconds else 0.0


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
