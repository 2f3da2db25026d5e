"""A draft model made of some of the target's own layers, as a folder: what a method can be given by name."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from paceline.models.hf_folder import write_hf_folder
from paceline.models.load import LoadedModel, load_model
from paceline.train.student import pruned, pruned_weights


def own_layers(target: LoadedModel, layers: Sequence[int], folder: Path) -> Path:
    """Write these layers with the target's norm and output layer, as numbers; a folder that is there is replaced."""
    target = load_model(target.name, dtype="bf16", packed=False)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights = pruned_weights(target.decoder, layers, target.decoder.dtype)
    write_hf_folder(folder, pruned(target.config, layers), weights, target.tokenizer)
    return folder
