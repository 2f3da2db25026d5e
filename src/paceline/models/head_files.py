"""A draft head's folder: its configuration and its tensors, whatever kind of file they lie in."""

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.errors import PacelineError
from paceline.models.checkpoint import INDEX
from paceline.models.hub import HEAD_PATTERNS, HubId

T = TypeVar("T")
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
        return tensor

    def drop(self, *names: str) -> None:
        """Leave out tensors that change nothing."""
        for name in names:
            self.tensors.pop(name, None)

    def rows(self, name: str) -> int:
        """Length of a tensor's first dimension, 0 if it is not there."""
        return len(self.tensors[name]) if name in self.tensors else 0

    def check_empty(self, what: str) -> None:
        """Raises PacelineError if a tensor was not taken: unused, it would change the drafts."""
        if self.tensors:
            left = sorted(self.tensors)
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise PacelineError(f"{self.where}: tensor {left[0]} has no place in {what}{more}")


def open_head(name: str) -> HeadFiles:
    """A folder or a Hub id. Raises PacelineError, one line, for what is missing, damaged or more than tensors."""
    folder = _folder(name)
    return HeadFiles(str(folder), _config(folder), without_prefix(_tensors(folder)))


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    hub_id = None if name.startswith((".", "/", "~")) or path.exists() else HubId.parse(name)
    if hub_id is None or hub_id.file is not None:
        raise PacelineError(
            f"no draft head {name!r}: no such folder, not a Hub id", hint="a head is a folder with config.json"
        )
    return hub_id.fetch(HEAD_PATTERNS)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PacelineError(f"{folder} has no config.json", hint="a head is a folder with config.json") from error
    except (OSError, ValueError) as error:
        raise PacelineError(f"{path} cannot be read as JSON: {error}", hint="fetch the file again") from error
    if not isinstance(value, dict):
        raise PacelineError(f"{path} does not hold a JSON object", hint="fetch the file again")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The files with a head's weights: those of the index, all safetensors, or a pickled one. May be empty."""
    index = folder / INDEX
    if index.is_file():
        shards = {str(shard) for shard in json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()}
        return [folder / Path(shard).name for shard in sorted(shards)]
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
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        held = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise PacelineError(
            f"{path} holds more than tensors and is not loaded: it could run code", hint="convert it to safetensors"
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, SafetensorError) as error:
        raise PacelineError(f"{path} cannot be read: {str(error).splitlines()[0]}", hint="fetch it again") from error
    if not isinstance(held, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in held.values()):
        raise PacelineError(f"{path} does not hold tensors by name", hint="is it a training checkpoint?")
    return dict(held)


def without_prefix(tensors: dict[str, T]) -> dict[str, T]:
    """Some tools write the name of the module that held the head before every tensor's."""
    for prefix in ("model.", "medusa_heads.", "medusa_head."):
        if all(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors
