"""Draft heads that lie on this machine, and whether they fit a target: told by names and shapes, no weight is read."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import PacelineError
from paceline.models.checkpoint import read_header
from paceline.models.config import ModelConfig
from paceline.models.eagle_checkpoint import eagle3_layer, eagle_layer, layer_weights
from paceline.models.head_checkpoint import (
    OUTPUT,
    VOCABULARY_ROWS,
    check_medusa_blocks,
    check_medusa_rows,
    is_same_vocabulary,
    kind_of,
    one_layer,
)
from paceline.models.head_files import (
    HeadFiles,
    config_of,
    first_dimension,
    last_dimension,
    unpickled,
    weight_files,
    without_prefix,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A folder with a draft head; misfit: why it cannot be this target's, if so."""

    path: Path
    kind: str
    misfit: str | None


def find_heads(folders: Iterable[Path], target: ModelConfig) -> list[FoundHead]:
    """Heads in these folders, or in folders within them. What cannot be read is none."""
    found = []
    for folder in _candidates(folders):
        try:
            shapes = one_layer(without_prefix(_shapes(folder)))
        except (PacelineError, OSError):
            continue
        if (kind := kind_of(shapes)) is not None:
            found.append(
                FoundHead(folder, kind, _misfit(kind, shapes, target) or _refused(folder, kind, shapes, target))
            )
    return found


def hub_folders() -> list[Path]:
    """Snapshots in the Hub's cache."""
    from huggingface_hub import constants

    return sorted(Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*"))


def _candidates(folders: Iterable[Path]) -> Iterator[Path]:
    known: set[Path] = set()
    for folder in folders:
        for path in (folder, *_inside(folder)):
            if path.resolve() not in known and (path / "config.json").is_file():
                known.add(path.resolve())
                yield path


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:  # it is none, or it may not be looked into
        return []


def _shapes(folder: Path) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            shapes |= {name: tensor.shape for name, tensor in read_header(file).items()}
        else:
            shapes |= {name: tuple(tensor.shape) for name, tensor in unpickled(file, mmap=True).items()}
    return shapes


def _misfit(kind: str, shapes: Mapping[str, Shape], target: ModelConfig) -> str | None:
    size = target.hidden_size
    if kind == "early_exit":
        fits = last_dimension(shapes["exit.down.weight"]) == size
    elif kind == "medusa":
        fits = all(last_dimension(shape) == size for name, shape in shapes.items() if name.endswith(".weight"))
    else:
        width = last_dimension(shapes.get("fc.weight", ()))
        fits = width == 2 * size if kind == "eagle" else width > 0 and width % size == 0
    if not fits:
        return f"it reads other hidden states than the target's of size {size}"
    told = [
        name for name in shapes if name in VOCABULARY_ROWS or (OUTPUT.fullmatch(name) and "token_map" not in shapes)
    ]
    rows = first_dimension(shapes[told[0]]) if told else target.vocab_size
    if is_same_vocabulary(rows, target.vocab_size):
        return None
    return f"its vocabulary is {rows}, the target's {target.vocab_size}"


def _refused(folder: Path, kind: str, shapes: Mapping[str, Shape], target: ModelConfig) -> str | None:
    """What loading would say of its config and shapes."""
    where = str(folder)
    try:
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        files = HeadFiles(where, config_of(folder), tensors)
        match kind:
            case "eagle":
                layer_weights(files, eagle_layer(files, target), target.hidden_size)
            case "eagle3":
                config, _ = eagle3_layer(files, target)
                layer_weights(files, config, 2 * config.hidden_size)
            case "medusa":
                check_medusa_blocks(files, target.hidden_size)
                if "token_map" in shapes:
                    return None
                rows = [files.rows(name) for name in shapes if OUTPUT.fullmatch(name) or name == "lm_head.weight"]
                check_medusa_rows(files, rows, target.vocab_size)
    except PacelineError as error:
        return str(error).removeprefix(f"{where}: ")
    return None
