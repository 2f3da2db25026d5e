"""Where Paceline keeps what it downloads and prepares, and the file habits that every writer there shares."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, units done, units in all), often: the receiver decides what to show."""

_CHUNK = 1 << 22


def silent(what: str, done: int, total: int) -> None:
    """The progress receiver that shows nothing."""


def home() -> Path:
    """The folder that holds everything Paceline stores: `PACELINE_HOME`, else `~/.cache/paceline`."""
    return Path(os.environ.get("PACELINE_HOME") or "~/.cache/paceline").expanduser().absolute()


def models_folder() -> Path:
    return home() / "models"


def prepared_folder() -> Path:
    return home() / "prepared"


def megabytes(size: int) -> str:
    """A size for people: `98 MB`, `1.12 GB` (powers of ten, as in model listings)."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents; a refusal becomes a user's error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(path: Path, error: OSError) -> PacelineError:
    """The user's error for a failed write under `home()` (no space, no permission, a file in the way)."""
    return PacelineError(
        f"cannot write {path}: {error.strerror or error}",
        hint="free disk space, or set PACELINE_HOME to a folder with room that you may write to",
    )


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise unless the disk under `folder` (which need not exist yet) has `needed` bytes free."""
    place = folder
    while not place.exists():
        place = place.parent
    available = shutil.disk_usage(place).free
    if available < needed:
        raise PacelineError(
            f"no space for {what}: {megabytes(needed)} needed, {megabytes(available)} available in {place}",
            hint="free some (`paceline models` lists what is stored) or set PACELINE_HOME to another disk",
        )


@contextmanager
def locked(path: Path, whose: str, progress: Progress) -> Iterator[None]:
    """Hold the lock file `path`, which ends with the process; says so when it must wait for `whose` work."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for {whose}", 0, 1)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Nobody else who asks may write `path` meanwhile; ends with the process. Raises PacelineError if somebody does."""
    from filelock import FileLock, Timeout

    make_folder(path.parent)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise PacelineError(f"another process is writing {path}", hint="let it finish, or name another") from None
    try:
        yield
    finally:
        lock.release()


def folder_size(folder: Path) -> int:
    """Bytes of all files under `folder`; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that a reader sees the old file or the new one, never a part of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value, indent=1) + "\n")
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _hash_record(path: Path) -> Path:
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    return home() / "hashes" / f"{name}.json"


def remember_hash(path: Path, sha256: str) -> None:
    """Record the SHA-256 of `path` as it now stands, so that `file_sha256` need not read it again."""
    stat = path.stat()
    record = _hash_record(path)
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json(
            record,
            {
                "path": str(path.resolve()),
                "size": stat.st_size,
                "mtime_ns": stat.st_mtime_ns,
                "sha256": sha256,
            },
        )
    except OSError:
        pass  # only a cache: without it the file is read again next time


def forget_hash(path: Path) -> None:
    with suppress(OSError):  # a record that stays is checked against the file before it is believed
        _hash_record(path).unlink(missing_ok=True)


def known_sha256(path: Path) -> str | None:
    """The file's SHA-256 if it has been computed since the file last changed; the file is not opened."""
    stat = path.stat()
    try:
        record = json.loads(_hash_record(path).read_text())
        if (record["size"], record["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns):
            return str(record["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or damaged
    return None


def file_sha256(path: Path, progress: Progress = silent) -> str:
    """SHA-256 of a file, in hex. Read once: afterwards known by (path, size, modification time)."""
    known = known_sha256(path)
    if known is not None:
        return known
    size = path.stat().st_size
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {path.name}", done, size)
    remember_hash(path, digest.hexdigest())
    return digest.hexdigest()
