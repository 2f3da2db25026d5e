"""What training tests have in common: a tiny target as a loaded model, random samples, recipes."""

import random
from pathlib import Path

import torch
from drafters.drafting_by_hand import Request

from paceline.core.tree_shapes import StaticTree
from paceline.drafters.base import Features, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.eagle import EagleDrafter
from paceline.models.load import LoadedModel, load_model
from paceline.models.origin import Origin
from paceline.train.batch import Batch, target_states
from paceline.train.dataset import Sample
from paceline.train.recipes.eagle import EagleRecipe
from paceline.train.recipes.eagle3 import Eagle3Recipe, Eagle3Settings
from paceline.train.unroll import unroll
from paceline.train.vocabulary import most_frequent


def random_samples(count: int, vocab_size: int, seed: int = 0, longest: int = 30) -> list[Sample]:
    """Random tokens; one or two answers each."""
    source = random.Random(seed)
    samples = []
    for i in range(count):
        length = source.randint(8, longest)
        ids = tuple(source.randrange(vocab_size) for _ in range(length))
        middle = length // 2
        spans = ((2, middle),) if i % 2 else ((2, middle - 1), (middle + 2, length))
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


def check_that_training_computes_what_inference_drafts_from(
    recipe: Eagle3Recipe | EagleRecipe, target: LoadedModel, sample: Sample, folder: Path
) -> None:
    """The drafter is loaded from the written head and drafts a chain; the trainer is shown text and chain as one."""
    recipe.write(folder, {})
    drafter = create_drafter(SpeculativeConfig(method=recipe.method, model=str(folder)), target)
    assert isinstance(drafter, EagleDrafter)
    drafter.tree = StaticTree.chain(4)
    text = list(sample.token_ids)
    states = batch_of(target, [Sample("", tuple(text[:-1]), ())], recipe.layers)
    request = Request(text)
    drafter.observe(request, text[:-1], Features(states.hidden))
    (proposal,) = drafter.propose([request], [4])
    assert len(proposal.tokens) == 4
    whole = Sample("", tuple(text) + proposal.tokens, ((len(text), len(text) + 4),))
    other = random_samples(1, target.config.vocab_size, seed=9)[0]  # in the same pack
    batch = batch_of(target, [other, whole], recipe.layers)
    row = len(other.token_ids) + len(text) - 2
    head, guesses, compared = recipe.head(), recipe.guesses(batch, 4), 0
    for level in unroll(head, batch, 4):
        (at,) = (level.tokens == row).nonzero()[0]
        ours = head.logits(level.states[at][None])[0]
        theirs = request.noted[proposal.tokens[: level.step]]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs[theirs.isfinite()].abs().max()))
        assert int(guesses[level.step, row]) == proposal.tokens[level.step]
        compared += 1
    assert compared == 4
