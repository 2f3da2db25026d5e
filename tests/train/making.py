"""What training tests have in common: a tiny target as a loaded model, random samples, recipes."""

import random
from pathlib import Path

import torch

from paceline.models.load import LoadedModel, load_model
from paceline.models.origin import Origin
from paceline.train.batch import Batch, target_states
from paceline.train.dataset import Sample
from paceline.train.recipes.eagle3 import Eagle3Recipe, Eagle3Settings
from paceline.train.vocabulary import most_frequent


def random_samples(count: int, vocab_size: int, seed: int = 0, longest: int = 30) -> list[Sample]:
    """Random tokens; one or two answers each."""
    source = random.Random(seed)
    samples = []
    for i in range(count):
        length = source.randint(8, longest)
        ids = tuple(source.randrange(vocab_size) for _ in range(length))
        middle = length // 2
        spans = ((2, middle),) if i % 2 else ((3, middle - 1), (middle + 2, length))
        samples.append(Sample(f"s/{i}", ids, spans))
    return samples


def target_of(folder: Path, dtype: str = "fp32") -> LoadedModel:
    return load_model(str(folder), dtype=dtype)


def batch_of(model: LoadedModel, samples: list[Sample], layers: tuple[int, ...]) -> Batch:
    return Batch.of(samples, target_states(model.decoder, samples, layers))


def eagle3(
    model: LoadedModel, samples: list[Sample], vocab: int = 0, seed: int = 0, **settings: object
) -> Eagle3Recipe:
    vocabulary = most_frequent(samples, vocab, model.config.vocab_size)
    return Eagle3Recipe(model.decoder, Origin.of(model), vocabulary, Eagle3Settings(**settings), seed)  # type: ignore[arg-type]


def gradients(recipe: Eagle3Recipe, batch: Batch) -> dict[str, torch.Tensor]:
    """Of a batch's loss by every trained tensor."""
    for parameter in recipe.parameters.values():
        parameter.grad = None
    recipe.learn(batch).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in recipe.parameters.items() if parameter.grad is not None}
