"""A local safetensors folder: checked as a whole before any tensor is used, then read through a memory map.

Which file holds a tensor is decided by `model.safetensors.index.json` where there is one (a stray
`model.safetensors` beside it is not read), else by `model.safetensors`.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_SIZES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_GEMMA_NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "model.norm.weight",
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `name` is canonical, `stored_name` the one in the file."""

    name: str
    stored_name: str
    file: Path
    dtype: str  # safetensors' name of it
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose files have been checked; tensors by canonical name, in the order of the files."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    stored: dict[str, StoredTensor]
    left_out: tuple[str, ...]  # the vision part of a multimodal checkpoint

    def dtype(self) -> torch.dtype:
        """The precision that most of the weights' bytes are stored in."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.stored.values():
            if dtype := _DTYPES.get(tensor.dtype):
                sizes[dtype] = sizes.get(dtype, 0) + prod(tensor.shape) * dtype.itemsize
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as stored, mapped from its file."""
        from safetensors import safe_open

        stored = self.stored[name]
        with safe_open(stored.file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(stored.stored_name)
        return tensor

    def tensors(self, config: ModelConfig, skip: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(canonical name, effective tensor) for all but `skip`, mapped from the files."""
        from safetensors import safe_open

        by_file: dict[Path, list[StoredTensor]] = {}
        for stored in self.stored.values():
            if stored.name in skip:
                continue
            if stored.dtype not in _DTYPES:
                raise PacelineError(
                    f"{stored.file}: tensor {stored.stored_name} is of type {stored.dtype}, not supported",
                    hint=f"supported: {', '.join(_DTYPES)}; quantised checkpoints are read as GGUF files",
                )
            by_file.setdefault(stored.file, []).append(stored)
        for path, members in by_file.items():
            with safe_open(path, framework="pt") as file:
                for stored in members:
                    yield stored.name, effective(config, stored.name, file.get_tensor(stored.stored_name))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the configuration and every header. Raises, naming the culprit, if anything is missing or cut."""
    config = _json(folder / "config.json", required=True)
    files = _weight_files(folder)
    stored: dict[str, StoredTensor] = {}
    left_out: list[str] = []
    for path, listed in files.items():
        found = read_header(path)
        for name in listed:
            if name not in found:
                raise PacelineError(
                    f"{folder / INDEX} places tensor {name} in {path.name}, but it is not there",
                    hint="index and shards are of different checkpoints: fetch or save them together again",
                )
        for name, tensor in found.items():
            if _VISION.match(name):
                left_out.append(name)
            # a copy in another shard than the indexed one is not read
            elif name in listed or not any(name in other for other in files.values()):
                if (other := stored.get(tensor.name)) is not None:
                    raise PacelineError(
                        f"{folder} holds the weight {tensor.name} twice: as {other.stored_name} in {other.file.name} "
                        f"and as {name} in {path.name}",
                        hint="remove one of the two, or fetch the checkpoint again",
                    )
                stored[tensor.name] = tensor
    generation_config = _json(folder / "generation_config.json", required=False)
    return Checkpoint(folder, config or {}, generation_config, stored, tuple(left_out))


def _weight_files(folder: Path) -> dict[Path, frozenset[str]]:
    """The files to read, each with the tensors that the index places there (none for a single file)."""
    index = _json(folder / INDEX, required=False)
    if index is None:
        return {_single_file(folder): frozenset()}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise PacelineError(f"{folder / INDEX} has no weight_map", hint="fetch the file again")
    files: dict[Path, frozenset[str]] = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / str(shard)
        if path.parent != folder or not path.is_file():
            raise PacelineError(
                f"shard {shard} is missing from {folder}",
                hint=f"{INDEX} names it: fetch it, or remove a stale index",
            )
        files[path] = frozenset(name for name, place in weight_map.items() if place == shard)
    return files


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    if any(folder.glob("*.safetensors")):
        raise PacelineError(f"{folder} has shards but no {INDEX}", hint="fetch the index too")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise PacelineError(
            f"{folder} holds pickled weights (.bin or .pt), which are not loaded",
            hint="convert them to safetensors: load the folder with transformers and call save_pretrained",
        )
    gguf = next(folder.glob("*.gguf"), None)
    raise PacelineError(
        f"{folder} has no {SINGLE}",
        hint=f"name the GGUF file itself: {gguf}" if gguf else "are the weights there?",
    )


def _json(path: Path, *, required: bool) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return None
        raise PacelineError(
            f"{path.parent} has no {path.name}", hint="a model folder holds config.json and *.safetensors"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise PacelineError(f"{path} cannot be read as JSON: {error}", hint="fetch the file again") from error
    if not isinstance(value, dict):
        raise PacelineError(f"{path} does not hold a JSON object", hint="fetch the file again")
    return value


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one safetensors file by stored name. Checks that every byte the header promises is there."""

    def damaged(why: str) -> PacelineError:
        return PacelineError(f"{path} is damaged: {why}", hint="fetch the file again")

    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_size = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + header_size > size:
            raise damaged("it ends inside its header")
        try:
            header = json.loads(file.read(header_size))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {name: _stored(name, path, entry) for name, entry in entries.items()}
            extents = {
                name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise damaged("its header cannot be read") from error
    expected = 8 + header_size + max((end for _, end in extents.values()), default=0)
    if size != expected:
        raise damaged(f"{size} bytes, {expected} expected")
    for name, (begin, end) in extents.items():
        itemsize = (
            _DTYPES[tensors[name].dtype].itemsize
            if tensors[name].dtype in _DTYPES
            else _OTHER_SIZES.get(tensors[name].dtype)
        )
        if begin < 0 or (itemsize and end - begin != prod(tensors[name].shape) * itemsize):
            raise damaged(f"tensor {name} has {end - begin} bytes for shape {list(tensors[name].shape)}")
    return tensors


def _stored(name: str, path: Path, entry: dict[str, Any]) -> StoredTensor:
    return StoredTensor(canonical_name(name), name, path, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))


def effective(config: ModelConfig, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Gemma stores its norm weights less one: w + 1 in float32 (as transformers adds it), float64 if stored so."""
    if config.family == "gemma3" and name.endswith(_GEMMA_NORMS):
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + 1
    return tensor


def canonical_name(name: str) -> str:
    """The name in a text-only checkpoint: multimodal ones put `language_model.` before or inside it."""
    for prefix, replacement in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
