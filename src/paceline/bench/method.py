"""An arm of ours: an `LLM` with one drafting method, as its users have it."""

import time
from collections.abc import Sequence
from typing import Any

from paceline.bench.answers import Answer, Measured
from paceline.bench.clock import Shape, StepClock, drafts_of_depth
from paceline.core.params import SamplingParams
from paceline.drafters.config import SpeculativeConfig
from paceline.engine.engine import RequestOptions
from paceline.engine.llm import LLM
from paceline.engine.outputs import RequestOutput
from paceline.errors import PacelineError
from paceline.models.load import LoadedModel


class MethodArm:
    """Fresh: its drafter has seen nothing, and nothing of other arms is in its cache. The weights are shared."""

    most_at_once: int | None = None

    def __init__(self, label: str, model: LoadedModel, config: SpeculativeConfig, concurrency: int) -> None:
        self.label, self.config = label, config
        self.llm = LLM(model, config, max_num_seqs=concurrency)
        self._clock = StepClock(self.llm.engine)

    @property
    def max_model_len(self) -> int:
        return self.llm.engine.config.max_model_len

    @property
    def num_faults(self) -> int:
        """How often its drafter failed, and a request went on without it."""
        return sum(self.llm.engine.speculation.faults.values())

    @property
    def choices(self) -> dict[str, Any] | None:
        """What `auto` chose, and why, the warm-up's choices included; None for a method that chooses nothing."""
        return self.llm.policy_report()

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
        return self._answer(prompts, params, RequestOptions())

    def answer_privately(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
        """The same; a drafter that learns from answers learns nothing from these."""
        return self._answer(prompts, params, RequestOptions(private_drafts=True))

    def warm_up(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        """Answer; nothing is kept of it."""
        self.answer_privately(prompts, params)
        self.forget()

    def forget(self) -> None:
        self.llm.reset_prefix_cache()

    def _answer(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], options: RequestOptions
    ) -> Measured:
        engine, clock = self.llm.engine, self._clock
        first: dict[int, tuple[float, int]] = {}  # of each request: when, and how many tokens
        done: dict[int, tuple[float, RequestOutput]] = {}
        with clock.watching():
            start = time.perf_counter()
            numbers = [engine.add_request(ids, own, options) for ids, own in zip(prompts, params, strict=True)]
            while engine.has_unfinished:
                updates = clock.step()
                now = time.perf_counter() - start
                for update in updates:
                    if update.token_ids:
                        first.setdefault(update.request_id, (now, len(update.token_ids)))
                    if update.output is not None:
                        done[update.request_id] = (now, update.output)
            seconds = time.perf_counter() - start
        costs, drafted = clock.take()
        answers = tuple(self._collect(*done[number], first.get(number), drafted.get(number, [])) for number in numbers)
        return Measured(answers, seconds, costs)

    def _collect(
        self, seconds: float, output: RequestOutput, first: tuple[float, int] | None, shapes: Sequence[Shape]
    ) -> Answer:
        completion = output.outputs[0]
        if completion.error is not None:
            raise PacelineError(f"{self.label}: {completion.error}", hint="try --dtype fp32")
        first_s, num_first = first or (None, 0)
        return Answer(
            token_ids=completion.token_ids,
            seconds=seconds,
            first_s=first_s,
            num_first=num_first,
            text=completion.text,
            cached_tokens=output.usage.cached_tokens,
            speculation=completion.speculation,
            drafts_of_depth=drafts_of_depth(shapes),
        )
