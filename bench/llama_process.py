"""The other end of `llama_worker.py`."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

ARMS = ("plain", "plain, flash attention", "lookup", "lookup, flash attention")


@dataclass(frozen=True, slots=True)
class LlamaAnswer:
    """seconds: until all tokens were there; first_s: the first. memory: bytes, the most so far, imports left out."""

    ids: list[int]
    first_s: float
    seconds: float
    memory: int

    @property
    def ms_per_token(self) -> float:
        """Of those after the first."""
        return 1e3 * (self.seconds - self.first_s) / (len(self.ids) - 1)


class LlamaProcess:
    """python: an interpreter that can import llama_cpp. `facts`: its version and the flags that it was built with."""

    def __init__(self, python: str, model: Path, threads: int, context: int, arms: Sequence[str] = ARMS) -> None:
        settings = {"model": str(model), "threads": threads, "context": context, "arms": list(arms)}
        worker = Path(__file__).with_name("llama_worker.py")
        self._process = subprocess.Popen(
            [python, str(worker), json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts: dict[str, Any] = self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PacelineError("llama.cpp's process ended", hint="is llama-cpp-python there? --llama-python names it")
        found: dict[str, Any] = json.loads(line)
        return found

    def answer(self, arm: str, prompt: Sequence[int], tokens: int) -> LlamaAnswer:
        """Greedy, exactly `tokens` tokens, whatever ends a text."""
        assert self._process.stdin is not None
        print(json.dumps({"arm": arm, "prompt": list(prompt), "tokens": tokens}), file=self._process.stdin, flush=True)
        return LlamaAnswer(**self._line())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
