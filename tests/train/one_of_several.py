"""One process of a run, as `accelerate launch` starts it: trains two steps and the first process keeps the result."""

import sys
from pathlib import Path

import torch
from train.making import eagle3, random_samples, target_of

from paceline.train.features import OnlineFeatures
from paceline.train.loop import Loop
from paceline.train.processes import launched
from paceline.train.settings import Settings


def train(folder: Path, out: Path) -> Loop:
    """Packs of a few samples each, an odd number of them to a step."""
    target = target_of(folder, "fp64")
    samples = random_samples(9, target.config.vocab_size)
    recipe = eagle3(target, samples, vocab=120, steps=2)
    settings = Settings(steps=2, learning_rate=1e-3, batch_tokens=40, accumulate=3, save_every=0)
    features = OnlineFeatures(target.decoder, recipe.layers)
    loop = Loop(recipe, samples, features, settings, out, {"data": "abc"}, processes=launched())
    loop.run()
    return loop


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), Path(sys.argv[2]))
