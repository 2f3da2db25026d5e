"""What the searches of `paceline tune` share: the user's prompts, and a log that a re-run goes on from."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from paceline.errors import PacelineError
from paceline.models.tokenizer import Tokenizer
from paceline.values import shown


class Entry(Protocol):
    """A dataclass, any."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=Entry)


class Log(Generic[T]):
    """JSON lines: what the search is of, then its trials, dataclasses that `parse` reads again.

    Raises PacelineError for another search's log.
    """

    def __init__(self, path: Path, about: dict[str, Any], parse: Callable[[dict[str, Any]], T]) -> None:
        self.path = path
        self.trials: list[T] = []
        self._parse = parse
        if path.exists() and path.stat().st_size:
            self._read(about)
        else:
            path.write_text(json.dumps(about) + "\n", encoding="utf-8")

    def _read(self, about: dict[str, Any]) -> None:
        try:
            text = self.path.read_text(encoding="utf-8")
            lines = text.split("\n")
            first, *rest = (json.loads(line) for line in lines[:-1])
            self.trials = [self._parse(values) for values in rest]
        except (ValueError, KeyError, TypeError) as error:
            raise PacelineError(f"{self.path} is no log of this search: {error}", hint="name another --log") from error
        for name, value in about.items():
            there = first.get(name) if isinstance(first, dict) else None
            if there != value:
                raise PacelineError(
                    f"{self.path} is the log of another search: {name} is {there} there and {value} here",
                    hint="name another --log, or ask for the same",
                )
        if lines[-1]:  # an interruption cut the last line off
            self.path.write_text(text[: -len(lines[-1])], encoding="utf-8")

    def keep(self, trial: T) -> None:
        self.trials.append(trial)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trial)) + "\n")


def read_prompts(path: Path, count: int) -> list[str]:
    """The first `count` prompts of a file. Raises PacelineError naming the line that is none."""
    prompts: list[str] = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PacelineError(f"{path} is not text in UTF-8: {error}", hint="write one prompt a line") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or len(prompts) == count:
            continue
        prompts.append(_prompt(path, number, line) if path.suffix == ".jsonl" else line)
    if not prompts:
        raise PacelineError(f"{path} holds no prompts", hint="write one a line")
    return prompts


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        values = json.loads(line)
        prompt = values["prompt"] if "prompt" in values else values["turns"][0]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise PacelineError(f"{path}, line {number}: no prompt", hint='{"prompt": "…"} a line') from error
    if not isinstance(prompt, str):
        raise PacelineError(f"{path}, line {number}: the prompt is {shown(prompt)}; it must be text")
    return prompt


def encode(tokenizer: Tokenizer, prompt: str, raw: bool) -> list[int]:
    if raw or not tokenizer.has_chat_template:
        return tokenizer.encode(prompt, add_special=True)
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
