"""Training data written by the target itself: its answers, and if need be the questions too.

A head learns what the target says, so the target has to say it. Conversations run together in the batched engine; the
seed of each request follows from the run's seed and the prompt's id, so an interrupted run writes what it would have.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core.params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.outputs import CompletionOutput, RequestOutput, Update
from paceline.engine.request import RequestOptions
from paceline.errors import PacelineError
from paceline.train.conversation import Span, user_turn
from paceline.train.journal import Journal
from paceline.train.prompts import Exclusion, Prompt

Report = Callable[[int, int], None]
"""Called with (prompts done, tokens generated in this run)."""
TRIES = 10  # of a prompt that a target is to write: base models seldom end a user's turn
LONGEST_PROMPT = 128  # tokens of one: those that have not ended by then seldom do


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn; prompts take the temperatures in turn."""

    max_tokens: int = 256
    temperatures: tuple[float, ...] = (1.0,)
    top_p: float = 1.0
    seed: int = 0

    def params(self, index: int, *of: object, **more: Any) -> SamplingParams:
        """Of one request: of prompt number `index`, with a seed that follows from the run's and from `of`."""
        return SamplingParams(
            temperature=self.temperatures[index % len(self.temperatures)],
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=derived_seed(self.seed, *of),
            **more,
        )


def derived_seed(*of: object) -> int:
    """64 bits that follow from what is named."""
    return int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:8], "big")


@dataclass(slots=True)
class _Sample:
    """What the engine saw: token ids, and the spans in them that the target wrote."""

    token_ids: list[int]
    assistant: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class _Talk:
    """A conversation in the making. A new sample begins where the template rewrites what was said before."""

    prompt: Prompt
    index: int
    messages: list[dict[str, str]] = field(default_factory=list)
    samples: list[_Sample] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def ask(self, llm: LLM) -> list[int] | None:
        """The prompt's next turn, as token ids of the whole conversation so far; None if they are too many."""
        turn = self.prompt.turns[len(self.finish_reasons)]
        self.messages.append({"role": "user", "content": turn})
        ids = llm.chat_ids(self.messages)
        if len(ids) >= llm.engine.config.max_model_len:
            return None
        last = self.samples[-1].token_ids if self.samples else []
        if last and ids[: len(last)] == last:
            self.samples[-1].token_ids = list(ids)
        else:
            self.samples.append(_Sample(list(ids)))
        return ids

    def hear(self, answer: CompletionOutput) -> None:
        sample = self.samples[-1]
        start = len(sample.token_ids)
        sample.token_ids += answer.token_ids
        sample.assistant.append((start, len(sample.token_ids)))
        self.messages.append({"role": "assistant", "content": answer.text})
        self.finish_reasons.append(answer.finish_reason)

    @property
    def is_over(self) -> bool:
        return len(self.finish_reasons) == len(self.prompt.turns) or not self.messages[-1]["content"].strip()

    def record(self) -> dict[str, Any]:
        return {
            "id": self.prompt.id,
            "category": self.prompt.category,
            "finish_reasons": self.finish_reasons,
            "samples": [{"token_ids": s.token_ids, "assistant": s.assistant} for s in self.samples],
        }


def answer_prompts(llm: LLM, prompts: Sequence[Prompt], sampling: Sampling, journal: Journal, report: Report) -> int:
    """Have the target answer what the journal does not hold yet; how many prompts were too long for it."""
    done = {record["id"] for record in journal.records}
    talks = (_Talk(prompt, index) for index, prompt in enumerate(prompts) if prompt.id not in done)
    num_done, num_tokens, num_too_long = sum(prompt.id in done for prompt in prompts), 0, 0

    def begin(talk: _Talk) -> int | None:
        """Ask the next question; None if the context has no room for it."""
        ids = talk.ask(llm)
        params = sampling.params(talk.index, talk.prompt.id, len(talk.finish_reasons))
        return None if ids is None else llm.engine.add_request(ids, params, RequestOptions())

    running: dict[int, _Talk] = {}
    while True:
        while len(running) < 2 * llm.engine.config.max_num_seqs and (talk := next(talks, None)) is not None:
            if (number := begin(talk)) is None:
                num_too_long += 1
            else:
                running[number] = talk
        if not running:
            return num_too_long
        updates = llm.engine.step()
        num_tokens += sum(len(update.token_ids) for update in updates)
        for output in _finished(updates):
            talk = running.pop(output.request_id)
            talk.hear(_answer(output))
            number = None if talk.is_over else begin(talk)
            if number is not None:
                running[number] = talk
                continue
            journal.add(talk.record())
            num_done += 1
        report(num_done, num_tokens)


def write_prompts(
    llm: LLM, count: int, sampling: Sampling, excluded: Exclusion, journal: Journal, report: Report
) -> list[Prompt]:
    """`count` different prompts that the target writes: what it samples after the opening of a user's turn.

    Drawn at temperature 1, whatever the answers are (a greedy target has one prompt only). Attempt k is the same
    whenever it is made, and those that come to something are taken in order. Raises PacelineError if too few do.
    """
    opening = user_turn(llm.tokenizer)
    drawn = replace(sampling, temperatures=(1.0,), max_tokens=min(sampling.max_tokens, LONGEST_PROMPT))
    written: dict[int, Prompt | None] = {record["attempt"]: _written(record) for record in journal.records}
    running: dict[int, int] = {}
    chosen: list[Prompt] = []  # of the attempts before `first`, all of which are over
    taken = Exclusion(set(excluded.ids), set(excluded.keys))
    first = num_tokens = 0
    missing = (k for k in itertools.count() if k not in written)
    upcoming = next(missing)
    while True:
        while first in written:
            prompt = written[first]
            if prompt is not None and prompt.keys and taken.reason(prompt) is None:
                taken.add(prompt)
                chosen.append(prompt)
            first += 1
        if len(chosen) >= count or first >= TRIES * count:
            break
        while len(running) < 2 * llm.engine.config.max_num_seqs and upcoming < TRIES * count:
            params = drawn.params(upcoming, "user", upcoming, stop_token_ids=opening.stop_token_ids, stop=opening.stop)
            running[llm.engine.add_request(opening.prompt_ids, params, RequestOptions())] = upcoming
            upcoming = next(missing)
        updates = llm.engine.step()
        num_tokens += sum(len(update.token_ids) for update in updates)
        for output in _finished(updates):
            answer = _answer(output)
            k = running.pop(output.request_id)
            record = {"attempt": k, "finish": answer.finish_reason, "text": answer.text.strip()}
            journal.add(record)
            written[k] = _written(record)
        report(len(chosen), num_tokens)
    for number in running:
        llm.engine.cancel(number)
    if len(chosen) < count:
        raise PacelineError(
            f"of {first} prompts that {llm.model.name} wrote {len(chosen)} were of use, {count} were asked for",
            hint="is it a base model? Give prompts: --prompts FILE",
        )
    return chosen[:count]


def _written(record: dict[str, Any]) -> Prompt | None:
    """None for a turn that never ended, or is empty."""
    if record["finish"] != "stop" or not record["text"]:
        return None
    return Prompt(f"self/{record['attempt']}", (record["text"],), "self")


def _finished(updates: Sequence[Update]) -> list[RequestOutput]:
    return [update.output for update in updates if update.output is not None]


def _answer(output: RequestOutput) -> CompletionOutput:
    (answer,) = output.outputs
    if answer.error is not None:
        raise PacelineError(f"the target failed: {answer.error}", hint="try --dtype fp32")
    return answer
