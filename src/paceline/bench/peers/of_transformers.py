"""transformers: `generate` plain, with prompt lookup, and assisted by the draft model if there is one.

It runs our own weights, the very tensors, so that precision is the same.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from paceline.bench.answers import Answer, Arm
from paceline.bench.peers.base import OneAtATime, Subject
from paceline.bench.peers.hf_twin import hf_twin

LOOKUP_TOKENS = 10  # as its documentation has it


def arms(subject: Subject) -> list[Arm]:
    """Raises PacelineError for a model that transformers has no equal of."""
    model = hf_twin(subject.model)
    lookup = {"prompt_lookup_num_tokens": subject.num_draft_tokens or LOOKUP_TOKENS}
    found: list[Arm] = [
        OneAtATime("transformers", partial(answer, model, {}, {})),
        OneAtATime("transformers+lookup", partial(answer, model, lookup, {})),
    ]
    if subject.draft is not None:
        draft = hf_twin(subject.draft())
        if subject.num_draft_tokens is not None:
            draft.generation_config.num_assistant_tokens = subject.num_draft_tokens
        found.append(OneAtATime("transformers+draft", partial(answer, model, {}, {"assistant_model": draft})))
    return found


class Arrivals:
    """A streamer that notes when the first tokens come."""

    def __init__(self) -> None:
        self.seen_prompt = False
        self.first: tuple[float, int] | None = None  # when, and how many

    def put(self, tokens: torch.Tensor) -> None:
        if self.seen_prompt and self.first is None:
            self.first = time.perf_counter(), tokens.numel()
        self.seen_prompt = True

    def end(self) -> None:
        pass


def answer(
    model: Any, options: dict[str, Any], helpers: dict[str, Any], prompt_ids: Sequence[int], max_tokens: int
) -> Answer:
    """Greedy, `max_tokens` tokens, whatever ends a text."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
    arrivals = Arrivals()
    start = time.perf_counter()
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=arrivals, **helpers
        )
    seconds = time.perf_counter() - start
    tokens = tuple(out[0, len(prompt_ids) :].tolist())[:max_tokens]
    first, count = arrivals.first or (start + seconds, len(tokens))
    return Answer(tokens, seconds, first - start, count)
