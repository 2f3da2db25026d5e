"""Cells of `acceptance.py`: one method on one set of prompts, all of them in one batch, greedy, EOS ignored."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from timed import TimedDrafter

from paceline.core.params import SamplingParams
from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.outputs import RequestOutput
from paceline.models.load import LoadedModel
from paceline.ops.attention import BLOCK

NGRAM = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """What one prompt's answer took. digest: of its token ids; repeats, copied: `repetition` and `copying` of them."""

    tokens: int
    passes: int
    drafted: int
    accepted: int
    digest: str
    repeats: float
    copied: float


@dataclass(frozen=True, slots=True)
class Cell:
    """`config`: what `SpeculativeConfig.from_dict` takes; one answer a prompt.

    seconds, draft_seconds: CPU time of the steps in which every request that was left decoded (none was at its prompt),
    and the drafter's part of it.
    """

    prompts: str
    config: dict[str, Any]
    num_draft_tokens: int
    answers: tuple[Answer, ...]
    seconds: float
    draft_seconds: float

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> "Cell":
        """From the JSON of `asdict`."""
        return cls(**{**line, "answers": tuple(Answer(**answer) for answer in line["answers"])})


def repetition(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Of a text's n-grams, the share that stood in it before; 0 for a text of fewer tokens."""
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def copying(prompt: Sequence[int], tokens: Sequence[int], n: int = NGRAM) -> float:
    """Of an answer's n-grams, the share that stands in its prompt; 0 for an answer of fewer tokens."""
    there = {tuple(prompt[i : i + n]) for i in range(len(prompt) - n + 1)}
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return sum(ngram in there for ngram in ngrams) / len(ngrams) if ngrams else 0.0


def measure(
    model: LoadedModel, name: str, prompts: Sequence[Sequence[int]], config: Mapping[str, Any], tokens: int
) -> Cell:
    """Run all prompts of the set called `name` together. Raises RuntimeError if the drafter fails anywhere."""
    own = SpeculativeConfig.from_dict(config)
    k = own.num_speculative_tokens
    drafter = TimedDrafter(create_drafter(own, model), time.process_time)
    longest = max(map(len, prompts)) + tokens
    room = EngineConfig(
        max_model_len=longest,
        num_kv_blocks=len(prompts) * (-(-(longest + k) // BLOCK) + 1),
        max_num_seqs=len(prompts),
        max_num_batched_tokens=len(prompts) * longest,
    )
    engine = Engine(model.decoder, room, {"it": drafter}, "it", k)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    numbers = [engine.add_request(prompt, params) for prompt in prompts]
    done: dict[int, RequestOutput] = {}
    seconds = draft_seconds = 0.0
    while engine.has_unfinished:
        left, start, before = len(prompts) - len(done), time.process_time(), drafter.seconds
        updates = engine.step()
        if len(updates) == left:
            seconds += time.process_time() - start
            draft_seconds += drafter.seconds - before
        done |= {update.request_id: update.output for update in updates if update.output is not None}
    if engine.speculation.faults:
        raise RuntimeError(f"{config} failed on {engine.speculation.faults.total()} requests: see the log above")
    answers = tuple(_answer(prompt, done[number]) for prompt, number in zip(prompts, numbers, strict=True))
    return Cell(name, dict(config), k, answers, seconds, draft_seconds)


def _answer(prompt: Sequence[int], output: RequestOutput) -> Answer:
    (choice,) = output.outputs
    counts = choice.speculation
    return Answer(
        tokens=len(choice.token_ids),
        passes=counts.num_steps,
        drafted=counts.num_draft_tokens,
        accepted=counts.num_accepted_tokens,
        digest=hashlib.sha256(repr(list(choice.token_ids)).encode()).hexdigest()[:16],
        repeats=repetition(choice.token_ids),
        copied=copying(prompt, choice.token_ids),
    )
