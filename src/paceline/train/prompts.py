"""Prompts to train on: read from files, each once, and none that an evaluation asks too."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.values import shown


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user says, turn by turn; the answers between are the target's."""

    id: str
    turns: tuple[str, ...]
    category: str | None = None

    @property
    def keys(self) -> frozenset[str]:
        """Its turns without case, punctuation and spacing: what two prompts that ask the same have in common."""
        return frozenset(key for turn in self.turns if (key := _key(turn)))


@dataclass(slots=True)
class Exclusion:
    """Prompts that may not be trained on, known by id and by the text of their turns: one turn in common is enough."""

    ids: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, prompts: Iterable[Prompt]) -> "Exclusion":
        found = cls()
        for prompt in prompts:
            found.add(prompt)
        return found

    def add(self, prompt: Prompt) -> None:
        self.ids.add(prompt.id)
        self.keys |= prompt.keys

    def reason(self, prompt: Prompt) -> str | None:
        """Why a prompt is excluded, "id" or "text"; None if it is not."""
        if prompt.id in self.ids:
            return "id"
        return None if self.keys.isdisjoint(prompt.keys) else "text"


def select(prompts: Iterable[Prompt], excluded: Exclusion) -> tuple[list[Prompt], dict[str, int]]:
    """Prompts that are neither excluded, nor empty, nor there already; how many were left out, by reason."""
    kept: list[Prompt] = []
    left: Counter[str] = Counter()
    ids: set[str] = set()
    said: set[str] = set()
    for prompt in prompts:
        whole = _key(" ".join(prompt.turns))
        if not whole:
            left["empty"] += 1
        elif (reason := excluded.reason(prompt)) is not None:
            left[f"excluded by {reason}"] += 1
        elif prompt.id in ids or whole in said:
            left["repeated"] += 1
        else:
            ids.add(prompt.id)
            said.add(whole)
            kept.append(prompt)
    return kept, dict(left)


def read_prompts(path: Path) -> list[Prompt]:
    """JSON lines of {"turns": [user message, …]} or {"prompt": text}, with "id" and "category" if there are; or text.

    Raises PacelineError naming the line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold other separators (U+2028)
    except (OSError, UnicodeError) as error:
        raise PacelineError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    parse = _parsed if path.suffix == ".jsonl" else _plain
    prompts = [parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PacelineError(f"{path} holds no prompts", hint='one a line: text, or in .jsonl {"turns": ["…"]}')
    return prompts


def digest(prompts: Sequence[Prompt]) -> str:
    """A short hash of what is asked, in order."""
    text = json.dumps([[prompt.id, prompt.turns] for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(path: Path, number: int, line: str) -> Prompt:
    return Prompt(f"{path.stem}/{number}", (line,))


def _parsed(path: Path, number: int, line: str) -> Prompt:
    try:
        values: Any = json.loads(line)
        turns = values["turns"] if "turns" in values else [values["prompt"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise PacelineError(f"{path}, line {number}: no prompt", hint='{"turns": ["…"]} or {"prompt": "…"}') from error
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise PacelineError(f"{path}, line {number}: turns is {shown(turns)}; it must be a list of texts")
    return Prompt(str(values.get("id", f"{path.stem}/{number}")), tuple(turns), values.get("category"))


def _key(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
