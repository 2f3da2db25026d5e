"""EAGLE-1's training and the early exit's: what is trained is what drafts, and the assistant's tokens alone teach."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.making import (
    batch_of,
    check_that_training_computes_what_inference_drafts_from,
    random_samples,
    target_of,
)

from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.early_exit import EarlyExitDrafter
from paceline.errors import PacelineError
from paceline.models.exit_adapter import load_exit_adapter
from paceline.models.load import LoadedModel
from paceline.models.origin import Origin
from paceline.train.dataset import Sample
from paceline.train.evaluate import Evaluation
from paceline.train.features import OnlineFeatures
from paceline.train.loop import Loop
from paceline.train.recipe import UNSURE
from paceline.train.recipes.eagle import EagleRecipe, EagleSettings
from paceline.train.recipes.early_exit import EarlyExitRecipe, EarlyExitSettings
from paceline.train.settings import Settings
from paceline.train.vocabulary import most_frequent


@pytest.fixture(scope="module")
def target(tiny_llama_dir: Path) -> LoadedModel:
    return target_of(tiny_llama_dir, "fp64")


@pytest.fixture(scope="module")
def samples(target: LoadedModel) -> list[Sample]:
    return random_samples(6, target.config.vocab_size)


def eagle(target: LoadedModel) -> EagleRecipe:
    return EagleRecipe(target.decoder, Origin.of(target), EagleSettings(), 0)


def early_exit(target: LoadedModel, samples: list[Sample], vocab: int = 0) -> EarlyExitRecipe:
    vocabulary = most_frequent(samples, vocab, target.config.vocab_size)
    return EarlyExitRecipe(target.decoder, Origin.of(target), vocabulary, EarlyExitSettings(1, 48), 0)


def test_an_exit_reads_states_of_any_size_alike(target: LoadedModel, samples: list[Sample], tmp_path: Path) -> None:
    """Trained on states of known sizes: as the output layer is used to at first, whatever theirs, and written so."""
    hidden = batch_of(target, samples, (0, -1)).hidden
    scales = {layer: rows.pow(2).mean(0).sqrt() for layer, rows in hidden.items()}
    vocabulary = most_frequent(samples, 0, target.config.vocab_size)
    recipe = EarlyExitRecipe(target.decoder, Origin.of(target), vocabulary, EarlyExitSettings(1, 48), 0, scales)
    read = recipe.adapter().read(hidden[0])
    rms = hidden[0].pow(2).mean(-1, keepdim=True).sqrt() / scales[0].pow(2).mean().sqrt()
    expected = UNSURE * scales[-1] * target.decoder.norm.sign() * hidden[0] / scales[0] / rms
    torch.testing.assert_close(read, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for parameter in recipe.parameters.values():
            parameter += 0.1
    recipe.write(tmp_path, {})
    loaded = load_exit_adapter(str(tmp_path), target.decoder)
    torch.testing.assert_close(loaded.logits(hidden[0]), recipe.adapter().logits(hidden[0]))


def test_eagle_trains_what_inference_drafts_from(target: LoadedModel, samples: list[Sample], tmp_path: Path) -> None:
    check_that_training_computes_what_inference_drafts_from(eagle(target), target, samples[0], tmp_path)


@pytest.mark.parametrize("kind", ["eagle", "early_exit"])
def test_exactly_the_assistants_tokens_are_learnt(kind: str, target: LoadedModel, samples: list[Sample]) -> None:
    sample = samples[1]
    recipe = eagle(target) if kind == "eagle" else early_exit(target, samples)
    first = 2 if kind == "eagle" else 1  # the first token that something is read from before
    total = 0.0
    for token in range(len(sample.token_ids)):
        only = replace(sample, assistant=((token, token + 1),))
        loss = recipe.learn(batch_of(target, [only], recipe.layers)).loss
        assert (float(loss.detach()) > 0) == (token >= first)
        total += float(loss.detach()) if sample.mask()[token] else 0.0
    whole = recipe.learn(batch_of(target, [sample], recipe.layers))
    assert float(whole.loss.detach()) == pytest.approx(total, rel=1e-9) and whole.tokens == sample.num_assistant


@pytest.mark.parametrize("vocab", [0, 70])
def test_an_exit_is_trained_as_it_drafts(
    target: LoadedModel, samples: list[Sample], vocab: int, tmp_path: Path, tiny_llama_dir: Path
) -> None:
    """It begins as the bare exit; trained, decoding with it accepts what the trainer says, and more than bare."""
    recipe = early_exit(target, samples, vocab)
    hidden = batch_of(target, samples, recipe.layers).hidden
    if not vocab:
        bare = EarlyExitDrafter(target.decoder, 1)
        torch.testing.assert_close(recipe.adapter().logits(hidden[0]), UNSURE * bare.read(hidden[0]).clone())
    prompts = [sample.token_ids[:6] for sample in samples]
    evaluation = Evaluation(target, recipe, prompts, max_tokens=16)
    recipe.write(tmp_path, {})
    outputs = evaluation.decode(tmp_path)
    before = evaluation(tmp_path)
    texts = [(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs]
    said = [Sample(str(i), prompt + own, ((6, 6 + len(own)),)) for i, (prompt, own) in enumerate(texts)]
    settings = Settings(steps=30, learning_rate=1e-2, batch_tokens=400, save_every=0)
    out = tmp_path / "run"
    Loop(recipe, said, OnlineFeatures(target.decoder, recipe.layers), settings, out, {}).run()
    after = evaluation(out)
    assert after["decoded_acceptance_length"] == after["simulated_acceptance_length"]
    assert after["decoded_acceptance_length"] > before["decoded_acceptance_length"]
    with pytest.raises(PacelineError, match=r"early_exit_layer is 2, and .* was trained for layer 1"):
        create_drafter(SpeculativeConfig(method="early_exit", model=str(out), early_exit_layer=2), target)
