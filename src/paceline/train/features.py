"""What the target computes for a pack of samples: anew each time, or once and then from disk."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.models.decoder import Decoder
from paceline.models.home import make_folder, megabytes, require_space
from paceline.models.origin import Origin
from paceline.train.batch import Batch, target_states
from paceline.train.dataset import Sample


class OnlineFeatures:
    """The frozen target runs on every pack."""

    def __init__(self, target: Decoder, layers: Sequence[int]) -> None:
        self.target, self.layers = target, tuple(layers)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        return Batch.of(samples, target_states(self.target, samples, self.layers))


def cache_size(target: Decoder, layers: Sequence[int], samples: Sequence[Sample]) -> int:
    """Bytes that the states of all samples take on disk."""
    tokens = sum(len(sample.token_ids) for sample in samples)
    return tokens * len(set(layers)) * target.config.hidden_size * target.embedding.element_size()


class CachedFeatures:
    """The same from files under `folder`, one a sample, that are written when a sample is first asked for.

    Raises PacelineError if the disk has no room for all of them.
    """

    def __init__(
        self, target: Decoder, origin: Origin, layers: Sequence[int], samples: Sequence[Sample], folder: Path
    ) -> None:
        self.target, self.layers = target, tuple(sorted(set(layers)))
        of = json.dumps([origin.weights, str(target.dtype), self.layers])
        self.folder = folder / hashlib.sha256(of.encode()).hexdigest()[:16]
        make_folder(self.folder)
        missing = [sample for sample in samples if not self._file(sample).exists()]
        self.size_to_write = cache_size(target, self.layers, missing)
        require_space(self.folder, self.size_to_write, f"features ({megabytes(self.size_to_write)})")

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        from safetensors.torch import load_file

        parts = []
        for sample in samples:
            file = self._file(sample)
            if not file.exists():
                self._write(sample, file)
            parts.append({int(name): rows for name, rows in load_file(file, str(self.target.device)).items()})
        return Batch.of(samples, {layer: torch.cat([part[layer] for part in parts]) for layer in self.layers})

    def _write(self, sample: Sample, file: Path) -> None:
        from safetensors.torch import save_file

        states = target_states(self.target, [sample], self.layers)
        partial = file.with_suffix(".partial")
        save_file({str(layer): rows.contiguous() for layer, rows in states.items()}, partial)
        partial.replace(file)

    def _file(self, sample: Sample) -> Path:
        return self.folder / f"{hashlib.sha256(repr(sample.token_ids).encode()).hexdigest()[:32]}.safetensors"


def usual_sizes(batch: Batch) -> dict[int, torch.Tensor]:
    """Of each layer's states, dimension by dimension: the root of the mean square [d], in float32, never 0."""
    return {i: rows.float().pow(2).mean(0).sqrt().clamp(min=1e-3) for i, rows in batch.hidden.items()}
