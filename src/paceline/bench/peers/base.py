"""What another engine is told, and where its arms come from. Nothing here imports an engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from paceline.errors import PacelineError

if TYPE_CHECKING:  # a command line that only reads its arguments does without torch
    from paceline.bench.answers import Answer, Arm, Measured
    from paceline.core.params import SamplingParams
    from paceline.models.load import LoadedModel


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be run, as an engine may want it."""

    model: "LoadedModel"  # its `name` is the model argument
    draft: Callable[[], "LoadedModel"] | None  # loads the draft model, where one is named
    num_draft_tokens: int | None  # None: the engine's own default
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that may be installed. adapter: a module here with `arms(subject) -> list[Arm]`, which raises
    PacelineError where it cannot run the subject; distribution: whose version is told."""

    module: str
    adapter: str
    distribution: str


PEERS = {
    "transformers": Peer("transformers", "paceline.bench.peers.of_transformers", "transformers"),
    "llama.cpp": Peer("llama_cpp", "paceline.bench.peers.of_llama_cpp", "llama-cpp-python"),
    "vllm": Peer("vllm", "paceline.bench.peers.of_vllm", "vllm"),
}


def find_peer(name: str) -> Peer:
    """Raises PacelineError for one that there is no adapter for."""
    if name not in PEERS:
        raise PacelineError(f"--peer {name} is unknown", hint=f"one of: {', '.join(PEERS)}")
    return PEERS[name]


def is_installed(peer: Peer) -> bool:
    return find_spec(peer.module) is not None


def open_arms(peer: Peer, subject: Subject) -> list["Arm"]:
    """Plain decoding, and what speculation the engine has of its own. Raises whatever the engine does."""
    arms: list[Arm] = import_module(peer.adapter).arms(subject)
    return arms


class OneAtATime:
    """An engine that is handed a prompt at a time, and no other while it answers."""

    most_at_once: int | None = 1

    def __init__(self, label: str, answer_one: Callable[[Sequence[int], int], "Answer"]) -> None:
        self.label, self._answer_one = label, answer_one

    def warm_up(self, prompts: Sequence[Sequence[int]], params: Sequence["SamplingParams"]) -> None:
        self.answer(prompts, params)
        self.forget()

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence["SamplingParams"]) -> "Measured":
        from paceline.bench.answers import Measured

        start, answers = time.perf_counter(), []
        for ids, own in zip(prompts, params, strict=True):
            assert own.max_tokens is not None
            answers.append(self._answer_one(ids, own.max_tokens))
        return Measured(tuple(answers), time.perf_counter() - start)

    def forget(self) -> None:
        """Nothing is kept from prompt to prompt, or what is kept is the engine's own affair."""
