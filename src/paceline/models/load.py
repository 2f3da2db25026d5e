"""From a model's name to a decoder that runs: folder, GGUF file, catalog alias or Hub id."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.errors import PacelineError
from paceline.models import catalog
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.download import pull
from paceline.models.home import Progress, silent
from paceline.models.hub import WITHOUT_WEIGHTS, HubId
from paceline.models.packing import PACKED, check_packed_runs, packed_runs
from paceline.models.precision import precision_of
from paceline.models.probe import ProbeResult, probe
from paceline.models.sources import PRECISIONS, FolderSource, GGUFSource, ModelSource
from paceline.models.tokenizer import Tokenizer
from paceline.ops.packed import GROUP
from paceline.values import is_whole, shown

# Gemma 3's text models share the multimodal ones' tokenizer, whose placeholder for images they have no row for
_PLACEHOLDERS = {"<image_soft_token>"}


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
    source: ModelSource

    @property
    def treatment(self) -> str:
        """In words: what the weights are held as and what the activations are."""
        if self.precision not in PACKED:
            return f"{self.precision} weights and activations"
        types: dict[str, int] = {}
        packed = list(self.decoder.packed_linears())
        for linear in packed:
            for part in linear.parts:
                types[part.type] = types.get(part.type, 0) + part.out * part.inner
        held = ", ".join(sorted(types, key=types.__getitem__, reverse=True))
        activations = f"int8 activations in groups of {GROUP}" if set(types) - {"BF16"} else "bf16 activations"
        if "BF16" in types and len(types) > 1:
            activations += " (bf16 for BF16)"
        return f"{held} weights, {activations} ({packed[-1].level})"

    @property
    def exact(self) -> str:
        """What the probe found: "bitwise" or "up to ties"."""
        return self.exactness.exact


def resolve(name: str, progress: Progress = silent) -> ModelSource:
    """Where the model called `name` lies; a catalog alias or a Hub id is downloaded first if need be.

    In this order: a folder, a file, a catalog alias, a Hub id (`owner/name[@revision][:file.gguf]`).
    """
    path = os.path.expanduser(name)  # of os.path, which raises at no name, be it ever so strange
    if os.path.isdir(path):
        return FolderSource(Path(path))
    if os.path.isfile(path):
        return GGUFSource(Path(path))
    if name in catalog.CATALOG:
        return GGUFSource(pull(catalog.find(name), progress))
    if (hub_id := _hub_id(name)) is not None:
        found = hub_id.fetch()
        return GGUFSource(found) if found.is_file() else FolderSource(found)
    closest = catalog.closest_alias(name)
    raise PacelineError(
        f"no model {shown(name, 200)}: no such folder or file, not in the catalog, not a Hub id",
        hint=f"did you mean {closest}?" if closest else "`paceline models` lists the catalog",
    )


def _hub_id(name: str) -> HubId | None:
    """The Hub id that `name` is, if it is neither something on this machine nor in the catalog."""
    on_disk = name.startswith((".", "/", "~")) or os.path.exists(name)
    return None if on_disk or name in catalog.CATALOG else HubId.parse(name)


def accept_any(tokenizer: Tokenizer | None) -> None:
    """The check that every tokenizer passes."""


def load_model(
    name: str,
    dtype: str = "auto",
    device: str = "cpu",
    max_context: int | None = None,
    progress: Progress = silent,
    accept: Callable[[Tokenizer | None], None] = accept_any,
    packed: bool = True,
) -> LoadedModel:
    """Load a model by name (see `resolve`).

    dtype: "auto" (a checkpoint's own precision; for GGUF "file" where that runs, else "bf16"), "bf16", "fp32" or
    "fp64"; "file" (matrices held and computed on as the file stores them), "int8" or "int4" (made into groups of 32
    that share a scale). The last three run on the CPU; activations that meet quantised weights are rounded to 8 bits,
    in groups of 32.
    packed: whether "auto" may choose "file"; training and export need weights that are numbers.
    max_context: positions to allow, at most the model's own; None means all of them.
    accept: given the tokenizer before weights are read (of a Hub folder: before they are downloaded); it may raise.
    Raises PacelineError with one line for anything that is missing, damaged or not supported.
    """

    def find() -> ModelSource:
        hub_id = _hub_id(name)
        if accept is not accept_any and hub_id is not None and hub_id.file is None:
            accept(Tokenizer.of_hf_folder(hub_id.fetch(WITHOUT_WEIGHTS)))
        return resolve(name, progress)

    return load_source(name, find, dtype, device, max_context, progress, accept, packed)


def load_source(
    name: str,
    find: Callable[[], ModelSource],
    dtype: str = "auto",
    device: str = "cpu",
    max_context: int | None = None,
    progress: Progress = silent,
    accept: Callable[[Tokenizer | None], None] = accept_any,
    packed: bool = True,
) -> LoadedModel:
    """Load what `find` yields, once the other arguments have proved good; as `load_model`."""
    start = time.perf_counter()
    precision = precision_of(dtype)
    place = _device(device)
    if precision is not None:
        check_packed_runs(precision, place)
    source = find()

    def check(config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        _check_tokenizer_fits(name, config, tokenizer)
        accept(tokenizer)

    parts = source.read(precision, progress, check, packed and packed_runs(place))
    config = _with_end_of_sequence(_with_context(parts.config, max_context), parts.tokenizer)
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
        source=source,
    )


def _check_tokenizer_fits(name: str, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Refuse ids that the model has no row for; rows without a token (padding) are common and harmless."""
    if tokenizer is None or tokenizer.vocab_size <= config.vocab_size:
        return
    if not set(tokenizer.token_strings()[config.vocab_size :]) <= _PLACEHOLDERS:
        raise PacelineError(
            f"{name}: its tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary {config.vocab_size}",
            hint="it is another model's tokenizer, or tokens were added to it and no rows to the embeddings",
        )


def _device(device: str) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise PacelineError(f"unknown device {shown(device)}", hint="known: cpu, cuda, cuda:0 …") from error
    if place.type == "cuda" and (not torch.cuda.is_available() or (place.index or 0) >= torch.cuda.device_count()):
        raise PacelineError(
            f"device {device} is not available ({torch.cuda.device_count()} CUDA devices found)",
            hint="use --device cpu, or install a CUDA build of torch",
        )
    if place.type == "cpu" and place.index not in (None, 0):
        raise PacelineError(f"device {place} is not available (there is one CPU)", hint="use cpu")
    if place.type not in ("cpu", "cuda"):
        raise PacelineError(f"device type {shown(place.type)} is not supported", hint="known: cpu, cuda")
    return place


def _with_context(config: ModelConfig, max_context: int | None) -> ModelConfig:
    if max_context is None:
        return config
    if not is_whole(max_context) or not 1 <= max_context <= config.max_context:
        raise PacelineError(
            f"max_context {shown(max_context)} is not possible: the model has {config.max_context} positions",
            hint=f"choose 1 to {config.max_context}",
        )
    return replace(config, max_context=max_context)


def _with_end_of_sequence(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """The tokenizer's own end joins those of the configuration: any of the files may be the only one to name it."""
    end = None if tokenizer is None else tokenizer.eos_id
    if end is None or end in config.eos_token_ids or end >= config.vocab_size:
        return config
    return replace(config, eos_token_ids=(*config.eos_token_ids, end))
