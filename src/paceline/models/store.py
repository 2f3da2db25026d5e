"""Prepared weights on disk: a second start maps them instead of reading and converting the source again.

One folder a (source, precision): `weights.bin` (tensors at multiples of 64 bytes), `tokenizer/` and
`manifest.json`. It appears under its name only when it is whole; a damaged one, or one of another layout, is
prepared again.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.errors import PacelineError
from paceline.models.config import ModelConfig
from paceline.models.home import (
    Progress,
    file_sha256,
    locked,
    make_folder,
    prepared_folder,
    remember_hash,
    require_space,
    silent,
    unwritable,
    write_json,
)
from paceline.models.inventory import delete_folder
from paceline.models.layout import LAYOUT_VERSION

STORE_VERSION = 1
# a release may mend how tokenizers and configurations are converted, so its number counts too
_MAKER = f"paceline {__version__}, store {STORE_VERSION}, layout {LAYOUT_VERSION}"
ALIGNMENT = 64  # bytes: a cache line, and what vector loads like
_SLACK = 64 << 20  # tokenizer, manifest, padding
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.uint8)
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedKey:
    """What prepared weights are made from, and in which precision.

    The versions that made a copy stand in the manifest rather than in the folder's name, so that a new one
    replaces the old copy and leaves no gigabytes behind.
    """

    source_sha256: str
    precision: str

    @property
    def folder(self) -> Path:
        return prepared_folder() / f"{self.source_sha256[:24]}-{self.precision}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to prepare a model: asked for only when there is no good copy on disk."""

    config: ModelConfig
    tensors: Iterator[tuple[str, torch.Tensor]]  # prepared layout
    size: int  # bytes of all tensors, for the disk check and the progress bar
    notes: tuple[str, ...]
    save_tokenizer: Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Weights mapped from disk (copy on write), and what goes with them."""

    folder: Path
    config: ModelConfig
    weights: dict[str, torch.Tensor]
    notes: tuple[str, ...]

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"


def get(key: PreparedKey, label: str, build: Callable[[], Recipe], progress: Progress = silent) -> PreparedModel:
    """The prepared model of `key`: mapped from disk, and prepared first if there is no good copy."""
    prepared = _open(key, label, progress)
    if prepared is not None:
        return prepared
    make_folder(prepared_folder())
    try:
        lock = prepared_folder() / f".{key.folder.name}.lock"
        with locked(lock, f"another process that prepares {label}", progress):
            prepared = _open(key, label, progress, log.warning)  # it may have prepared this one
            if prepared is None:
                _write(key, label, build(), progress)
    except OSError as error:
        raise unwritable(prepared_folder(), error) from error
    prepared = prepared or _open(key, label, progress)
    if prepared is None:
        raise PacelineError(f"prepared weights of {label} in {key.folder} were changed while they were written")
    return prepared


def _open(
    key: PreparedKey, label: str, progress: Progress, notice: Callable[..., None] = log.debug
) -> PreparedModel | None:
    """None if there is no good copy; why, goes to `notice`."""
    folder = key.folder
    if not folder.is_dir():
        return None
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["made_by"] != _MAKER:
            notice("prepared weights of %s are of another version of Paceline: preparing them again", label)
            return None
        if (manifest["source_sha256"], manifest["precision"]) != (key.source_sha256, key.precision):
            raise ValueError("manifest of another model")
        for name, sha256 in manifest["files"].items():
            # known by size and modification time, so that the gigabytes are read again only after a change
            if file_sha256(folder / name, progress) != sha256:
                raise ValueError(f"{name} has changed")
        return PreparedModel(
            folder,
            ModelConfig.from_json(json.dumps(manifest["config"])),
            _map(folder / "weights.bin", manifest["tensors"]),
            tuple(manifest["notes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, PacelineError) as error:
        notice("prepared weights of %s are damaged (%s): preparing them again", label, error)
        return None


def _map(path: Path, index: dict[str, Any]) -> dict[str, torch.Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):  # start reading ahead: the first pass needs all of it
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    weights = {}
    for name, entry in index.items():
        dtype, shape, offset = _DTYPES[entry["dtype"]], entry["shape"], entry["offset"]
        end = offset + prod(shape) * dtype.itemsize
        if end > size:
            raise ValueError(f"weights.bin ends before {name}")
        weights[name] = data[offset:end].view(dtype).view(shape)
    return weights


def _write(key: PreparedKey, label: str, recipe: Recipe, progress: Progress) -> None:
    final = key.folder
    for leftover in prepared_folder().glob(f".{final.name}.tmp*"):  # of a killed process; the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    if final.exists():
        delete_folder(final)
    require_space(prepared_folder(), recipe.size + _SLACK, f"the prepared weights of {label}")
    work = prepared_folder() / f".{final.name}.tmp"
    try:
        (work / "tokenizer").mkdir(parents=True)
        recipe.save_tokenizer(work / "tokenizer")
        index, weights_sha256 = _write_tensors(work / "weights.bin", recipe, label, progress)
        files = {"weights.bin": weights_sha256}
        for path in sorted((work / "tokenizer").rglob("*")):
            if path.is_file():
                files[str(path.relative_to(work))] = hashlib.sha256(path.read_bytes()).hexdigest()
        write_json(
            work / "manifest.json",
            {
                "made_by": _MAKER,
                "label": label,
                "source_sha256": key.source_sha256,
                "precision": key.precision,
                "notes": list(recipe.notes),
                "config": json.loads(recipe.config.to_json()),
                "files": files,
                "tensors": index,
            },
        )
        work.rename(final)
        for name, sha256 in files.items():
            remember_hash(final / name, sha256)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_tensors(path: Path, recipe: Recipe, label: str, progress: Progress) -> tuple[dict[str, Any], str]:
    """The index (name to dtype, shape, offset) and the file's SHA-256."""
    index: dict[str, Any] = {}
    digest = hashlib.sha256()
    offset = done = 0
    with path.open("wb") as file:

        def write(data: Any) -> int:
            file.write(data)
            digest.update(data)
            return len(data)

        for name, tensor in recipe.tensors:
            offset += write(bytes(-offset % ALIGNMENT))
            index[name] = {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset": offset,
            }
            size = write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            offset, done = offset + size, done + size
            progress(f"preparing {label}", min(done, recipe.size), recipe.size)
        file.flush()
        os.fsync(file.fileno())
    return index, digest.hexdigest()
