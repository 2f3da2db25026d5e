"""What is asked: conversations by category, from JSON lines or from the small set that ships with the package."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from paceline.errors import PacelineError
from paceline.values import shown

SHIPPED = "shipped"
NO_CATEGORY = "prompts"


@dataclass(frozen=True, slots=True)
class Conversation:
    """User messages that are answered one after the other, each with all before it in sight."""

    id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Conversations, and where they are from."""

    source: str  # a file's path, or "shipped"
    sha256: str  # of the conversations themselves
    conversations: tuple[Conversation, ...]

    @property
    def categories(self) -> dict[str, int]:
        """Conversations of each category, in order of appearance."""
        return dict(Counter(conversation.category for conversation in self.conversations))


def read_prompts(path: str | None, limit: int | None = None) -> PromptSet:
    """The prompts of a JSONL file, or those shipped; of each category the first `limit`.

    A line is {"turns": [text, …]} or {"prompt": text}, with "category" and "id" if you like. Raises PacelineError
    naming the line that is none.
    """
    where = "the shipped prompts" if path is None else path
    text = _shipped() if path is None else _read(Path(path))
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    conversations = [_conversation(line, f"{where}, line {number}", f"{number}") for number, line in lines]
    kept, taken = [], Counter[str]()
    for conversation in conversations:
        if limit is None or taken[conversation.category] < limit:
            taken[conversation.category] += 1
            kept.append(conversation)
    if not kept:
        raise PacelineError(f"{where} holds no prompts", hint='a line is {"turns": ["…"], "category": "chat"}')
    digest = hashlib.sha256(json.dumps([[c.category, c.turns] for c in kept]).encode()).hexdigest()
    return PromptSet(SHIPPED if path is None else path, digest, tuple(kept))


def _shipped() -> str:
    return resources.files("paceline.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise PacelineError(f"{path} is not UTF-8", hint="convert it first, for instance with iconv") from error
    except OSError as error:
        raise PacelineError(f"{path}: {error.strerror or error}", hint="name a JSONL file of prompts") from error


def _conversation(line: str, where: str, number: str) -> Conversation:
    hint = 'a line is {"turns": ["first message", …], "category": "chat"}'
    try:
        values = json.loads(line)
        turns = values["turns"] if "turns" in values else [values["prompt"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PacelineError(f"{where}: no prompt in it", hint=hint) from error
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise PacelineError(f"{where}: turns is {shown(turns)}; it must be a list of texts", hint=hint)
    category, own_id = values.get("category") or NO_CATEGORY, values.get("id") or number
    if not isinstance(category, str):
        raise PacelineError(f"{where}: category is {shown(category)}; it must be a text", hint=hint)
    return Conversation(str(own_id), category, tuple(turns))
