"""A draft head's folder: its configuration and its tensors, whatever kind of file they lie in."""

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.errors import PacelineError
from paceline.models.checkpoint import INDEX
from paceline.models.hub import HEAD_PATTERNS, HubId
from paceline.values import shown

T = TypeVar("T")
_SAVED = (b"PK", b"\x80")  # how files of torch.save begin: archives, and pickles before them
_PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")  # of several pickled files, the one with the weights


@dataclass(slots=True)
class HeadFiles:
    """What a head's folder holds. `tensors` are taken out one by one, so that what is left over shows."""

    where: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of that shape. Raises PacelineError, naming both shapes, if it has another or is missing."""
        tensor = self.find(name, *shape)
        if tensor is None:
            raise PacelineError(f"{self.where}: tensor {name} is missing", hint="the file is incomplete")
        return tensor

    def find(self, name: str, *shape: int) -> torch.Tensor | None:
        """The same, or None."""
        tensor = self.tensors.pop(name, None)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise PacelineError(f"{self.where}: {name} has shape {list(tensor.shape)}, {list(shape)} is expected")
        if tensor is not None and name.endswith((".weight", ".bias")) and not tensor.is_floating_point():
            raise PacelineError(f"{self.where}: {name} is of type {tensor.dtype}: quantised heads are not supported")
        return tensor

    def drop(self, *names: str) -> None:
        """Leave out tensors that change nothing."""
        for name in names:
            self.tensors.pop(name, None)

    def rows(self, name: str) -> int:
        """Length of a tensor's first dimension, 0 if it has none or is not there."""
        return first_dimension(self.tensors[name].shape) if name in self.tensors else 0

    def check_empty(self, what: str) -> None:
        """Raises PacelineError if a tensor was not taken: unused, it would change the drafts."""
        if self.tensors:
            left = sorted(self.tensors)
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise PacelineError(f"{self.where}: tensor {left[0]} has no place in {what}{more}")


def first_dimension(shape: Sequence[int]) -> int:
    """Rows; 0 of a lone number."""
    return shape[0] if shape else 0


def last_dimension(shape: Sequence[int]) -> int:
    """Columns; 0 of a lone number."""
    return shape[-1] if shape else 0


def open_head(name: str) -> HeadFiles:
    """A folder or a Hub id. Raises PacelineError, one line, for what is missing, damaged or more than tensors."""
    folder = _folder(name)
    return HeadFiles(str(folder), config_of(folder), without_prefix(_tensors(folder)))


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    hub_id = None if name.startswith((".", "/", "~")) or path.exists() else HubId.parse(name)
    if hub_id is None or hub_id.file is not None:
        raise PacelineError(
            f"no draft head {shown(name, 200)}: no such folder, not a Hub id",
            hint="a head is a folder with config.json",
        )
    return hub_id.fetch(HEAD_PATTERNS)


def config_of(folder: Path) -> dict[str, Any]:
    """Its config.json. Raises PacelineError if there is none."""
    path = folder / "config.json"
    if not path.exists():
        raise PacelineError(f"{folder} has no config.json", hint="a head is a folder with config.json")
    return _json(path)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PacelineError(f"{path} cannot be read as JSON: {error}", hint="fetch the file again") from error
    if not isinstance(value, dict):
        raise PacelineError(f"{path} does not hold a JSON object", hint="fetch the file again")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The files with a head's weights: those of the index, all safetensors, or a pickled one. May be empty."""
    index = folder / INDEX
    if index.is_file():
        weight_map = _json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise PacelineError(f"{index} has no weight_map", hint="fetch the file again")
        return [folder / Path(shard).name for shard in sorted({str(shard) for shard in weight_map.values()})]
    return sorted(folder.glob("*.safetensors")) or _pickled(folder)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = weight_files(folder)
    if not files:
        raise PacelineError(f"{folder} has no weights", hint="*.safetensors, pytorch_model.bin or medusa_lm_head.pt")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        found = _read(file)
        twice = next((name for name in found if name in tensors), None)
        if twice is not None:
            raise PacelineError(f"{folder} holds tensor {twice} twice, the second time in {file.name}")
        tensors.update(found)
    return tensors


def _pickled(folder: Path) -> list[Path]:
    known = [folder / name for name in _PICKLED if (folder / name).is_file()]
    if known:
        return known[:1]
    found = sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    if len(found) > 1:
        raise PacelineError(
            f"{folder} holds {found[0].name} and {found[1].name}: which are the weights?",
            hint=f"name the file {' or '.join(_PICKLED)}",
        )
    return found


def _read(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        return unpickled(path)
    try:
        held: dict[str, torch.Tensor] = load_file(path)
    except Exception as error:  # safetensors has errors of its own for whatever is damaged
        raise _unreadable(path, error) from error
    return held


def unpickled(path: Path, mmap: bool = False) -> dict[str, torch.Tensor]:
    """Tensors by name of a pickled file, loaded as weights only. Raises PacelineError for anything else."""
    try:
        with path.open("rb") as file:
            if not file.read(2).startswith(_SAVED):
                raise ValueError("torch.save has not written it")
        held = torch.load(path, "cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise PacelineError(
            f"{path} holds more than tensors and is not loaded: it could run code", hint="convert it to safetensors"
        ) from error
    except Exception as error:  # a pickle that was cut or written over breaks with anything
        raise _unreadable(path, error) from error
    if not isinstance(held, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in held.items()
    ):
        raise PacelineError(f"{path} does not hold tensors by name", hint="is it a training checkpoint?")
    return dict(held)


def _unreadable(path: Path, error: Exception) -> PacelineError:
    why = next(iter(str(error).splitlines()), "") or type(error).__name__
    return PacelineError(f"{path} cannot be read: {why}", hint="fetch it again")


def without_prefix(tensors: dict[str, T]) -> dict[str, T]:
    """Some tools write the name of the module that held the head before every tensor's."""
    for prefix in ("model.", "medusa_heads.", "medusa_head."):
        if all(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors
