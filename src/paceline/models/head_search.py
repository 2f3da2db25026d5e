"""Draft heads that lie on this machine, and whether they fit a target: told by names and shapes, no weight is read."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import PacelineError
from paceline.models.checkpoint import read_header
from paceline.models.config import ModelConfig
from paceline.models.head_checkpoint import kind_of, one_layer
from paceline.models.head_files import weight_files, without_prefix

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
        except (PacelineError, OSError, RuntimeError, ValueError):
            continue
        if (kind := kind_of(shapes)) is not None:
            found.append(FoundHead(folder, kind, _misfit(kind, shapes, target)))
    return found


def hub_folders() -> list[Path]:
    """Snapshots in the Hub's cache."""
    from huggingface_hub import constants

    return sorted(Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*"))


def _candidates(folders: Iterable[Path]) -> Iterator[Path]:
    known: set[Path] = set()
    for folder in folders:
        inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        for path in (folder, *inside):
            if path.resolve() not in known and (path / "config.json").is_file():
                known.add(path.resolve())
                yield path


def _shapes(folder: Path) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            shapes |= {name: tensor.shape for name, tensor in read_header(file).items()}
        else:
            held = torch.load(file, "cpu", weights_only=True, mmap=True)
            shapes |= {name: tuple(tensor.shape) for name, tensor in held.items() if isinstance(tensor, torch.Tensor)}
    return shapes


def _misfit(kind: str, shapes: Mapping[str, Shape], target: ModelConfig) -> str | None:
    size = target.hidden_size
    if kind in ("medusa", "early_exit"):
        fits = all(shape[-1] == size for name, shape in shapes.items() if name.endswith(".weight"))
    else:
        width = shapes.get("fc.weight", (0,))[-1]
        fits = width == 2 * size if kind == "eagle" else width > 0 and width % size == 0
    if not fits:
        return f"it reads other hidden states than the target's of size {size}"
    rows = next((shapes[name][0] for name in ("embed_tokens.weight", "t2d") if name in shapes), target.vocab_size)
    return None if rows == target.vocab_size else f"its vocabulary is {rows}, the target's {target.vocab_size}"
