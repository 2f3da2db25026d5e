"""Logs of long runs, one JSON object a line: a run takes up what the same code has written, and drops the rest."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def sources(*packages: str) -> list[Path]:
    """Paceline's own, native ones too, of some packages with all that lies in them."""
    home = Path(__file__).resolve().parent.parent / "src" / "paceline"
    found = (file for package in packages for file in home.glob(f"{package}/**/*"))
    return sorted(file for file in found if file.suffix in (".py", ".h", ".cpp"))


def fingerprint(files: Iterable[Path]) -> str:
    """Of all that a result depends on: what other code has found says nothing about this one."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def read(log: Path, code: str) -> list[dict[str, Any]]:
    """The log's results by this code, without their `code`; provenance aside. Others are taken out of the file."""
    if not log.exists():
        return []
    lines = []
    for text in log.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:  # the run was killed in the middle of it
            lines.append({})
    ours = [line for line in lines if line.get("code") == code]
    if len(ours) < len(lines):
        print(f"{log}: {len(lines) - len(ours)} lines were written by other code and are dropped")
        partial = log.with_name(log.name + ".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in ours))
        partial.replace(log)
    return [{key: value for key, value in line.items() if key != "code"} for line in ours if "provenance" not in line]
