"""From a model's name to a decoder that runs: folder, GGUF file, catalog alias or Hub id.

GGUF files are dequantised once into the prepared-weights cache (`store`) and mapped from there. Safetensors
folders are mapped and laid out in memory at each start: a copy at memory speed, and no second copy on disk.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from paceline.errors import PacelineError
from paceline.models import catalog, store
from paceline.models.checkpoint import Checkpoint, open_checkpoint
from paceline.models.config import ModelConfig, config_from_hf
from paceline.models.decoder import Decoder
from paceline.models.download import pull
from paceline.models.home import Progress, file_sha256, known_sha256, silent
from paceline.models.hub import HubId
from paceline.models.layout import canonical_parts, check_names, prepare
from paceline.models.probe import ProbeResult, probe
from paceline.models.tokenizer import Tokenizer

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_SPELLINGS = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and how it was loaded: lossless means relative to this."""

    decoder: Decoder
    tokenizer: Tokenizer | None  # None: a checkpoint without tokenizer files, which takes and gives token ids only
    config: ModelConfig
    name: str  # as the user gave it
    origin: str  # e.g. "GGUF file /…/model.gguf"
    precision: str  # a key of PRECISIONS
    notes: tuple[str, ...]  # lines for the person who loads it
    exactness: ProbeResult
    load_seconds: float

    @property
    def exact(self) -> str:
        """What the probe found: "bitwise" or "up to ties"."""
        return self.exactness.exact


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a source yields."""

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None
    precision: str
    notes: tuple[str, ...]


class ModelSource(Protocol):
    """Somewhere that a model lies on this machine."""

    @property
    def origin(self) -> str: ...

    def read(self, precision: str | None, progress: Progress) -> ModelParts:
        """Config, prepared weights and tokenizer; `precision` None means the source's own."""
        ...


@dataclass(frozen=True, slots=True)
class GGUFSource:
    """A GGUF file, or the first of a split one."""

    path: Path

    @property
    def origin(self) -> str:
        return f"GGUF file {self.path}"

    def read(self, precision: str | None, progress: Progress) -> ModelParts:
        from paceline.models.gguf import open_gguf

        chosen = precision or "bf16"
        if any(known_sha256(part) is None for part in self.parts()):
            open_gguf(self.path)  # a bad file is refused before gigabytes of it are hashed
        hashes = [file_sha256(part, progress) for part in self.parts()]
        source = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
        key = store.PreparedKey(source, chosen)
        prepared = store.get(key, self.path.name, lambda: self._recipe(PRECISIONS[chosen]), progress)
        tokenizer = Tokenizer.load(prepared.tokenizer_folder)
        return ModelParts(prepared.config, prepared.weights, tokenizer, chosen, prepared.notes)

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

    def _recipe(self, dtype: torch.dtype) -> store.Recipe:
        from paceline.models.gguf import open_gguf
        from paceline.models.gguf_config import config_from_gguf
        from paceline.models.gguf_tokenizer import tokenizer_from_gguf

        file = open_gguf(self.path)
        config = config_from_gguf(file)
        inert = check_names(config, file.weight_names(), str(self.path))
        return store.Recipe(
            config=config,
            tensors=prepare(config, file.weights(dtype), dtype),
            size=prepared_size(config, dtype),
            notes=leftover_note(inert),
            save_tokenizer=tokenizer_from_gguf(file).save,
        )


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A folder with `config.json` and safetensors."""

    path: Path

    @property
    def origin(self) -> str:
        return f"folder {self.path}"

    def read(self, precision: str | None, progress: Progress) -> ModelParts:
        checkpoint = open_checkpoint(self.path)
        config = config_from_hf(checkpoint.config, checkpoint.generation_config)
        inert = check_names(config, checkpoint.stored, str(self.path))
        notes = leftover_note([*inert, *checkpoint.left_out])
        notes += _tied_head_note(config, checkpoint)
        chosen, precision_note = (precision, ()) if precision else own_precision(checkpoint.dtype())
        dtype = PRECISIONS[chosen]
        tensors = prepare(config, checkpoint.tensors(config, frozenset(inert)), dtype)
        weights = dict(_counted(tensors, prepared_size(config, dtype), f"loading {self.path.name}", progress))
        has_tokenizer = any((self.path / file).exists() for file in _TOKENIZER_FILES)
        tokenizer = Tokenizer.from_hf_folder(self.path) if has_tokenizer else None
        return ModelParts(config, weights, tokenizer, chosen, notes + precision_note)


def resolve(name: str, progress: Progress = silent) -> ModelSource:
    """Where the model called `name` lies; a catalog alias or a Hub id is downloaded first if need be.

    In this order: a folder, a file, a catalog alias, a Hub id (`owner/name[@revision][:file.gguf]`).
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return FolderSource(path)
    if path.is_file():
        return GGUFSource(path)
    if name in catalog.CATALOG:
        return GGUFSource(pull(catalog.find(name), progress))
    hub_id = None if name.startswith((".", "/", "~")) else HubId.parse(name)
    if hub_id is not None:
        found = hub_id.fetch()
        return GGUFSource(found) if found.is_file() else FolderSource(found)
    closest = catalog.closest_alias(name)
    raise PacelineError(
        f"no model {name!r}: no such folder or file, not in the catalog, not a Hub id",
        hint=f"did you mean {closest}?" if closest else "`paceline models` lists the catalog",
    )


def load_model(
    name: str,
    dtype: str = "auto",
    device: str = "cpu",
    max_context: int | None = None,
    progress: Progress = silent,
) -> LoadedModel:
    """Load a model by name (see `resolve`).

    dtype: "auto" (a checkpoint's own precision; bf16 for GGUF), "bf16", "fp32" or "fp64".
    max_context: positions to allow, at most the model's own; None means all of them.
    Raises PacelineError with one line for anything that is missing, damaged or not supported.
    """
    return load_source(name, lambda: resolve(name, progress), dtype, device, max_context, progress)


def load_source(
    name: str,
    find: Callable[[], ModelSource],
    dtype: str = "auto",
    device: str = "cpu",
    max_context: int | None = None,
    progress: Progress = silent,
) -> LoadedModel:
    """Load what `find` yields, once the other arguments have proved good; as `load_model`."""
    start = time.perf_counter()
    precision = _precision(dtype)
    place = _device(device)
    source = find()
    parts = source.read(precision, progress)
    config = _with_context(parts.config, max_context)
    decoder = Decoder(config, parts.weights, PRECISIONS[parts.precision], place)
    return LoadedModel(
        decoder=decoder,
        tokenizer=parts.tokenizer,
        config=config,
        name=name,
        origin=source.origin,
        precision=parts.precision,
        notes=parts.notes,
        exactness=probe(decoder, progress),
        load_seconds=time.perf_counter() - start,
    )


def prepared_size(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the prepared tensors, about: the few that keep float32 are counted in `dtype`."""
    return sum(prod(part.shape) for part in canonical_parts(config).values()) * dtype.itemsize


def _precision(dtype: str) -> str | None:
    if dtype == "auto":
        return None
    name = _SPELLINGS.get(dtype, dtype)
    if name not in PRECISIONS:
        raise PacelineError(f"unknown dtype {dtype!r}", hint=f"known: auto, {', '.join(PRECISIONS)}")
    return name


def own_precision(dtype: torch.dtype) -> tuple[str, tuple[str, ...]]:
    for name, known in PRECISIONS.items():
        if known == dtype:
            return name, ()
    # every float16 value is a float32 value; bf16 would drop bits
    return "fp32", ("the checkpoint is float16: it runs in fp32, which changes no weight (bf16 is faster, but rounds)",)


def _device(device: str) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise PacelineError(f"unknown device {device!r}", hint="known: cpu, cuda, cuda:0 …") from error
    if place.type == "cuda" and (not torch.cuda.is_available() or (place.index or 0) >= torch.cuda.device_count()):
        raise PacelineError(
            f"device {device} is not available ({torch.cuda.device_count()} CUDA devices found)",
            hint="use --device cpu, or install a CUDA build of torch",
        )
    if place.type not in ("cpu", "cuda"):
        raise PacelineError(f"device type {place.type!r} is not supported", hint="known: cpu, cuda")
    return place


def _with_context(config: ModelConfig, max_context: int | None) -> ModelConfig:
    if max_context is None:
        return config
    if not 1 <= max_context <= config.max_context:
        raise PacelineError(
            f"max_context {max_context} is not possible: the model has {config.max_context} positions",
            hint=f"choose 1 to {config.max_context}",
        )
    return replace(config, max_context=max_context)


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
