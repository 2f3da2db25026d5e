"""JSON lines that say first what they are of: work that was interrupted goes on with what is there."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError


class Journal:
    """A file of records under a first line `about`. Raises PacelineError for a file that is of something else."""

    def __init__(self, path: Path, kind: str, about: Mapping[str, Any]) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        about = json.loads(json.dumps({"paceline": kind, **about}))
        if self._holds_lines():
            first, *records = read_journal(path, kind)
            for name, value in about.items():
                if first.get(name) != value:
                    raise PacelineError(
                        f"{path} was begun otherwise: {name} is {first.get(name)} there and {value} here",
                        hint="name another file, or ask for the same",
                    )
            self.records = records
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(about) + "\n", encoding="utf-8")

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record at once: whatever ends the process, what is written stays."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _holds_lines(self) -> bool:
        """A last line that an interruption cut off is removed."""
        if not self.path.exists():
            return False
        with self.path.open("rb+") as file:
            text = file.read()
            whole = text.rfind(b"\n") + 1
            file.truncate(whole)
        return whole > 0


def read_journal(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """What the file is of, then its records; an unfinished last line is left out. Raises PacelineError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        values = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise PacelineError(f"{path} cannot be read as JSON lines: {error}") from error
    if not values or not isinstance(values[0], dict) or values[0].get("paceline") != kind:
        raise PacelineError(f"{path} is no {kind} file of Paceline", hint="`paceline data generate` writes one")
    yield from values
