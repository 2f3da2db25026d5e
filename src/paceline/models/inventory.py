"""What is stored on disk (downloads of catalog models, prepared weights), its size and its removal."""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.models.catalog import CATALOG, CatalogEntry, closest_alias
from paceline.models.home import folder_size, forget_hash, prepared_folder
from paceline.values import shown


@dataclass(frozen=True, slots=True)
class PreparedCopy:
    """One folder of prepared weights (see `store`); a damaged one is labelled with its folder's name."""

    folder: Path
    label: str
    source_sha256: str
    precision: str
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """What is on disk under one name; `delete` removes it."""

    name: str
    download: Path | None
    prepared: list[PreparedCopy]

    @property
    def download_size(self) -> int:
        return folder_size(self.download) if self.download else 0

    @property
    def prepared_size(self) -> int:
        return sum(copy.size for copy in self.prepared)

    def delete(self) -> None:
        if self.download:
            delete_folder(self.download)
        for copy in self.prepared:
            delete_folder(copy.folder)


def prepared_copies() -> list[PreparedCopy]:
    """All prepared weights on disk."""
    found = []
    for folder in sorted(prepared_folder().glob("[!.]*-*")):
        manifest: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            manifest = dict(json.loads((folder / "manifest.json").read_text()))
        found.append(
            PreparedCopy(
                folder,
                str(manifest.get("label", folder.name)),
                str(manifest.get("source_sha256", "")),
                str(manifest.get("precision", "?")),
                folder_size(folder),
            )
        )
    return found


def prepared_from(entry: CatalogEntry) -> list[PreparedCopy]:
    """The prepared weights that were made from a catalog model's file."""
    return [copy for copy in prepared_copies() if copy.source_sha256 == entry.sha256]


def downloaded_size(entry: CatalogEntry) -> int:
    """Bytes on disk of a catalog model's file, or of its unfinished download."""
    return folder_size(entry.path.parent)


def stored_as(name: str) -> Stored:
    """What is on disk of a catalog model (its file, unfinished downloads, prepared weights), or the prepared
    weights with that label. Raises PacelineError if `name` is neither.
    """
    if name in CATALOG:
        return Stored(name, CATALOG[name].path.parent, prepared_from(CATALOG[name]))
    copies = [copy for copy in prepared_copies() if name in (copy.label, copy.folder.name)]
    if not copies:
        closest = closest_alias(name)
        raise PacelineError(
            f"nothing is stored under the name {shown(name, 200)}",
            hint=f"did you mean {closest}?" if closest else "`paceline models` lists the names",
        )
    return Stored(name, None, copies)


def delete_folder(folder: Path) -> None:
    """Delete `folder`, if there is one, and what is remembered of its files. Raises PacelineError if it cannot."""
    for path in folder.rglob("*"):
        forget_hash(path)
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise PacelineError(
            f"cannot delete {error.filename or folder}: {error.strerror or error}",
            hint="you need the right to write to it, and no other process may be using it",
        ) from error
