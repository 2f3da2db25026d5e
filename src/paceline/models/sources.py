"""The places that a model is read from: a GGUF file and a safetensors folder.

GGUF files are converted once into the prepared-weights cache (`store`) and mapped from there. Safetensors
folders are mapped and laid out in memory at each start: a copy at memory speed, and no second copy on disk.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from paceline.errors import PacelineError
from paceline.models import store
from paceline.models.checkpoint import Checkpoint, open_checkpoint
from paceline.models.config import ModelConfig, described_by
from paceline.models.hf_config import check_layer_count, config_from_hf
from paceline.models.home import Progress, file_sha256, known_sha256, silent
from paceline.models.layout import canonical_parts, check_names, prepare
from paceline.models.packing import PACKED, pack_weights
from paceline.models.tokenizer import Tokenizer

# of activations, and of weights unless `models.packing` says otherwise
PRECISIONS = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    **dict.fromkeys(PACKED, torch.bfloat16),
}
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a source yields."""

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None
    precision: str
    notes: tuple[str, ...]


TokenizerCheck = Callable[[ModelConfig, Tokenizer | None], None]
"""Raises if a model with this configuration and tokenizer will not do: asked before any weight is read."""


def accept_all(config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """The check that every model passes."""


class ModelSource(Protocol):
    """Somewhere that a model lies on this machine."""

    @property
    def origin(self) -> str: ...

    def describe(self) -> ModelConfig:
        """The configuration alone, without a look at the weights."""
        ...

    def fingerprint(self) -> str:
        """Tells these weights from any others, as they are stored: the same in whichever precision they run."""
        ...

    def read(
        self, precision: str | None, progress: Progress, accept: TokenizerCheck = accept_all, packed: bool = False
    ) -> ModelParts:
        """Config, prepared weights and tokenizer; `precision` None means the source's own.

        packed: what the source holds in blocks may stay so; else its own precision is one of numbers.
        """
        ...


@dataclass(frozen=True, slots=True)
class GGUFSource:
    """A GGUF file, or the first of a split one."""

    path: Path

    @property
    def origin(self) -> str:
        return f"GGUF file {self.path}"

    def describe(self) -> ModelConfig:
        from paceline.models.gguf import open_gguf
        from paceline.models.gguf_config import config_from_gguf

        return config_from_gguf(open_gguf(self.path))

    def read(
        self, precision: str | None, progress: Progress, accept: TokenizerCheck = accept_all, packed: bool = False
    ) -> ModelParts:
        from paceline.models.gguf import open_gguf

        chosen = precision or ("file" if packed else "bf16")
        if any(known_sha256(part) is None for part in self.parts()):
            open_gguf(self.path)  # a bad file is refused before gigabytes of it are hashed
        key = store.PreparedKey(self._sha256(progress), chosen)
        prepared = store.get(key, self.path.name, lambda: self._recipe(chosen, accept), progress)
        tokenizer = Tokenizer.load(prepared.tokenizer_folder)
        accept(prepared.config, tokenizer)
        return ModelParts(prepared.config, prepared.weights, tokenizer, chosen, prepared.notes)

    def fingerprint(self) -> str:
        return f"gguf:{self._sha256()}"

    def _sha256(self, progress: Progress = silent) -> str:
        """Of the file; of a split one, of its files' hashes."""
        hashes = [file_sha256(part, progress) for part in self.parts()]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

    def parts(self) -> list[Path]:
        """All files of a split model, by their names alone."""
        match = _SPLIT.fullmatch(self.path.name)
        if match is None:
            return [self.path]
        count = int(match["count"])
        parts = [self.path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
        for part in parts:
            if not part.is_file():
                raise PacelineError(
                    f"{part.name} is missing beside {self.path.name}",
                    hint=f"the model consists of {count} files",
                )
        return parts

    def _recipe(self, precision: str, accept: TokenizerCheck) -> store.Recipe:
        from paceline.models.gguf import open_gguf
        from paceline.models.gguf_config import config_from_gguf
        from paceline.models.gguf_tokenizer import tokenizer_from_gguf

        file = open_gguf(self.path)
        config = config_from_gguf(file)
        inert = check_names(config, file.weight_names(), str(self.path))
        tokenizer = tokenizer_from_gguf(file)
        accept(config, tokenizer)
        dtype = PRECISIONS[precision]
        if precision == "file":
            weights, size = file.packed_weights(), file.size
        elif precision in PACKED:
            weights, size = pack_weights(file.weights(torch.float32), precision), prepared_size(config, torch.uint8)
        else:
            weights, size = file.weights(dtype), prepared_size(config, dtype)
        return store.Recipe(
            config=config,
            tensors=prepare(config, weights, dtype, str(self.path)),
            size=size,
            notes=leftover_note(inert),
            save_tokenizer=tokenizer.save,
        )


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A folder with `config.json` and safetensors."""

    path: Path

    @property
    def origin(self) -> str:
        return f"folder {self.path}"

    def describe(self) -> ModelConfig:
        return self._config(open_checkpoint(self.path))

    def fingerprint(self) -> str:
        checkpoint = open_checkpoint(self.path)
        names = sorted(canonical_parts(self._config(checkpoint)))
        return tensors_fingerprint((name, checkpoint.tensor(name)) for name in names)

    def _config(self, checkpoint: Checkpoint) -> ModelConfig:
        with described_by(self.path / "config.json"):
            check_layer_count(checkpoint.config, checkpoint.stored)
            return config_from_hf(checkpoint.config, checkpoint.generation_config)

    def read(
        self, precision: str | None, progress: Progress, accept: TokenizerCheck = accept_all, packed: bool = False
    ) -> ModelParts:
        checkpoint = open_checkpoint(self.path)
        config = self._config(checkpoint)
        inert = check_names(config, checkpoint.stored, str(self.path))
        tokenizer = Tokenizer.of_hf_folder(self.path)
        accept(config, tokenizer)
        notes = leftover_note([*inert, *checkpoint.left_out])
        notes += _tied_head_note(config, checkpoint)
        chosen, precision_note = (precision, ()) if precision else own_precision(checkpoint.dtype())
        dtype, canonical = PRECISIONS[chosen], checkpoint.tensors(config, frozenset(inert))
        stored = pack_weights(canonical, chosen) if chosen in PACKED else canonical
        tensors = prepare(config, stored, dtype, str(self.path))
        weights = dict(_counted(tensors, prepared_size(config, dtype), f"loading {self.path.name}", progress))
        return ModelParts(config, weights, tokenizer, chosen, notes + precision_note)


def tensors_fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of three rows of every weight, rounded to bf16: a checkpoint keeps it when it is saved in a wider type."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        rows = tensor[[0, len(tensor) // 2, -1]] if tensor.dim() > 1 else tensor
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(rows.detach().cpu().to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return f"tensors:{digest.hexdigest()}"


def prepared_size(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the prepared tensors, about: the few that keep float32 are counted in `dtype`."""
    return sum(prod(part.shape) for part in canonical_parts(config).values()) * dtype.itemsize


def own_precision(dtype: torch.dtype) -> tuple[str, tuple[str, ...]]:
    for name, known in PRECISIONS.items():
        if known == dtype:
            return name, ()
    # every float16 value is a float32 value; bf16 would drop bits
    return "fp32", ("the checkpoint is float16: it runs in fp32, which changes no weight (bf16 is faster, but rounds)",)


def leftover_note(names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (f"not used: {', '.join(sorted(names)[:8])}{more}",)


def _tied_head_note(config: ModelConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """The config decides whether the output layer is tied; an extra one that differs deserves a word."""
    if not config.tie_embeddings or _HEAD not in checkpoint.stored:
        return ()
    if torch.equal(checkpoint.tensor(_HEAD), checkpoint.tensor(_EMBEDDINGS)):
        return ()
    return (f"{_HEAD} differs from the embeddings, but config.json ties them: the embeddings are used",)


def _counted(
    tensors: Iterator[tuple[str, torch.Tensor]], total: int, what: str, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    done = 0
    for name, tensor in tensors:
        done += tensor.numel() * tensor.element_size()
        progress(what, min(done, total), total)
        yield name, tensor
