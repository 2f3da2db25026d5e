"""Where a drafter comes from: target, data, code."""

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.models.load import LoadedModel
from paceline.models.origin import Origin
from paceline.train.dataset import Sample, Samples
from paceline.train.processes import Processes


def provenance(
    model: LoadedModel,
    origin: Origin,
    data: Path,
    samples: Samples,
    training: list[Sample],
    aside: list[Sample],
    processes: Processes,
) -> dict[str, Any]:
    """Of a run: what must be known to make it again. `data` names the file's contents, not where it lies."""
    return {
        "target": {**origin.to_dict(), "precision": model.precision},
        "data": hashlib.sha256(data.read_bytes()).hexdigest(),
        "data_about": samples.about,
        "samples": {
            "training": len(training),
            "held_aside": len(aside),
            "skipped": samples.skipped,
            "tokens": sum(len(sample.token_ids) for sample in training),
            "assistant_tokens": sum(sample.num_assistant for sample in training),
        },
        "processes": processes.count,
        "paceline": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
