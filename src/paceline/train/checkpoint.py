"""Checkpoints: a drafter that can be used as it is, and beside it what training goes on from. Whole or not there."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.train.recipe import Recipe

STATE = "state.pt"
KEPT = 2  # checkpoints


def save(folder: Path, step: int, recipe: Recipe, state: Mapping[str, Any], provenance: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a finished step; only the newest few are kept."""
    place = folder / f"step-{step:07d}"
    partial = folder / f".{place.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    recipe.write(partial, provenance)
    torch.save(dict(state), partial / STATE)
    shutil.rmtree(place, ignore_errors=True)
    partial.replace(place)
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old)
    return place


def checkpoints(folder: Path) -> list[Path]:
    """Whole ones, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / STATE).is_file())


def load(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of the newest checkpoint, None if there is none. Raises PacelineError if it is of other settings."""
    found = checkpoints(folder)
    if not found:
        return None
    state: dict[str, Any] = torch.load(found[-1] / STATE, weights_only=True)
    for name in {**asked, **state["asked"]}:
        there, value = state["asked"].get(name), asked.get(name)
        if there != value:
            raise PacelineError(
                f"{found[-1]} was trained with other settings: {name} is {there} there, {value} here",
                hint="name another --out, or ask for the same",
            )
    return state


def publish(checkpoint: Path, out: Path) -> None:
    """Put a checkpoint's drafter into `out` itself: what makes it one, its config.json, last."""
    out.mkdir(exist_ok=True)
    for path in sorted(checkpoint.iterdir(), key=lambda path: (path.is_file(), path.name == "config.json")):
        if path.is_dir():
            publish(path, out / path.name)
        elif path.name != STATE:
            partial = out / f".{path.name}.partial"
            shutil.copyfile(path, partial)
            partial.replace(out / path.name)
