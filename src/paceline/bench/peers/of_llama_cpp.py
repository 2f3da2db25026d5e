"""llama.cpp through its Python package: plain, and with its prompt lookup.

It runs the GGUF file's own quantised weights, rounding activations in a way of its own: answers may differ.
"""

import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from paceline.bench.answers import Answer, Arm
from paceline.bench.peers.base import OneAtATime, Subject
from paceline.errors import PacelineError
from paceline.models.load import resolve
from paceline.models.sources import GGUFSource


def arms(subject: Subject) -> list[Arm]:
    """Raises PacelineError for a model that is no GGUF file."""
    source = resolve(subject.model.name)
    if not isinstance(source, GGUFSource):
        raise PacelineError(f"llama.cpp reads GGUF files, and {subject.model.name} is none")
    llama_cpp: Any = import_module("llama_cpp")
    threads = torch.get_num_threads()
    options = {
        "model_path": str(source.path),
        "n_ctx": subject.max_model_len,
        "n_threads": threads,
        "n_threads_batch": threads,
        "n_gpu_layers": -1 if subject.model.decoder.device.type == "cuda" else 0,
        "verbose": False,
    }
    found: list[Arm] = [LlamaArm("llama.cpp", llama_cpp.Llama(**options))]
    draft = _prompt_lookup(subject.num_draft_tokens)
    if draft is not None:
        found.append(LlamaArm("llama.cpp+lookup", llama_cpp.Llama(**options, draft_model=draft)))
    return found


def _prompt_lookup(num_draft_tokens: int | None) -> Any | None:
    """The package's own drafter; None in a release without it."""
    try:
        kind: Any = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
    except (ImportError, AttributeError):
        return None
    return kind() if num_draft_tokens is None else kind(num_pred_tokens=num_draft_tokens)


class LlamaArm(OneAtATime):
    """Rows of a prompt's beginning are used again, as the package does; those of another conversation are not."""

    def __init__(self, label: str, llama: Any) -> None:
        super().__init__(label, partial(answer, llama))
        self._llama = llama

    def forget(self) -> None:
        self._llama.reset()


def answer(llama: Any, prompt_ids: Sequence[int], max_tokens: int) -> Answer:
    """Greedy, `max_tokens` tokens, whatever ends a text."""
    start = time.perf_counter()
    first_s = 0.0
    tokens: list[int] = []
    for token in llama.generate(list(prompt_ids), temp=0.0, repeat_penalty=1.0):
        if not tokens:
            first_s = time.perf_counter() - start
        tokens.append(int(token))
        if len(tokens) == max_tokens:
            break
    return Answer(tuple(tokens), time.perf_counter() - start, first_s)
