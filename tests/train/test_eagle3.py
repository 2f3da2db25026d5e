"""EAGLE-3's training: the forward is inference's, what is learnt is the assistant's tokens, and nothing leaks."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.making import (
    batch_of,
    check_that_training_computes_what_inference_drafts_from,
    eagle3,
    gradients,
    random_samples,
    target_of,
)

from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder
from paceline.models.load import LoadedModel
from paceline.train.batch import Batch
from paceline.train.dataset import Sample
from paceline.train.unroll import unroll

OPTIONS: dict[str, dict[str, object]] = {
    "as published": {},
    "EAGLE-3.1": {"fuse_norms": True, "norm_output": True},
    "normed residual": {"norm_before_residual": True, "aux_layers": (1, 2)},
}


@pytest.fixture(scope="module")
def target(tiny_llama_dir: Path) -> LoadedModel:
    return target_of(tiny_llama_dir, "fp64")


@pytest.fixture(scope="module")
def samples(target: LoadedModel) -> list[Sample]:
    return random_samples(6, target.config.vocab_size)


def weights_hash(decoder: Decoder) -> str:
    digest = hashlib.sha256()
    for tensor in (decoder.embedding, decoder.norm, *(linear.weight for linear in decoder.linears())):
        digest.update(tensor.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("vocab", [0, 60])
def test_training_computes_what_inference_drafts_from(
    target: LoadedModel, samples: list[Sample], options: dict[str, object], vocab: int, tmp_path: Path
) -> None:
    recipe = eagle3(target, samples, vocab, steps=4, **options)
    check_that_training_computes_what_inference_drafts_from(recipe, target, samples[0], tmp_path)


def only(sample: Sample, token: int) -> Sample:
    """With this token alone the assistant's."""
    return replace(sample, assistant=((token, token + 1),))


def test_exactly_the_assistants_tokens_are_learnt(target: LoadedModel, samples: list[Sample]) -> None:
    """The loss is the sum of what each of the assistant's tokens adds, and each that a row can predict adds to it."""
    sample = samples[1]
    recipe = eagle3(target, samples, steps=3)
    whole = recipe.learn(batch_of(target, [sample], recipe.layers))
    total, learnt = 0.0, 0
    for token in range(len(sample.token_ids)):
        batch = batch_of(target, [only(sample, token)], recipe.layers)
        outcome = recipe.learn(batch)
        norm = sum(float(g.abs().sum()) for g in gradients(recipe, batch).values()) if outcome.tokens else 0.0
        assert (norm > 0) == (token >= 2)  # row 0 predicts token 2
        if sample.mask()[token]:
            total += float(outcome.loss.detach())
            learnt += outcome.tokens
    assert float(whole.loss.detach()) == pytest.approx(total, rel=1e-9)
    assert whole.tokens == learnt == sample.num_assistant
    nothing = recipe.learn(batch_of(target, [replace(sample, assistant=())], recipe.layers))
    assert nothing.tokens == 0 and float(nothing.loss.detach()) == 0


def test_neither_neighbours_nor_a_tail_change_a_documents_gradient(target: LoadedModel, samples: list[Sample]) -> None:
    recipe = eagle3(target, samples, vocab=80, steps=3)
    alone = [gradients(recipe, batch_of(target, [sample], recipe.layers)) for sample in samples]
    together = gradients(recipe, batch_of(target, samples, recipe.layers))
    longer = [replace(sample, token_ids=(*sample.token_ids, 1, 2, 3)) for sample in samples]
    padded = gradients(recipe, batch_of(target, longer, recipe.layers))
    for name, gradient in together.items():
        expected = torch.stack([own[name] for own in alone]).sum(0)
        for found in (gradient, padded[name]):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def test_a_neighbours_tokens_change_no_bit(target: LoadedModel, samples: list[Sample]) -> None:
    recipe = eagle3(target, samples, steps=3)
    first, second = samples[:2]
    changed = replace(second, token_ids=tuple((token + 1) % 200 for token in second.token_ids))
    states = []
    for pack in ([first, second], [first, changed]):
        levels = unroll(recipe.head(), batch_of(target, pack, recipe.layers), 3)
        states.append([level.states[level.tokens < len(first.token_ids)] for level in levels])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_the_gradient_is_that_of_the_loss(target: LoadedModel, samples: list[Sample]) -> None:
    """Against finite differences, through all steps and the frozen output layer."""
    recipe = eagle3(target, samples, vocab=100, steps=3, divergence="jsd")
    batch = batch_of(target, samples[:2], recipe.layers)
    found = gradients(recipe, batch)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in recipe.parameters.items():
        direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-4 * direction)
                losses.append(float(recipe.learn(batch).loss.detach()))
                parameter.sub_(sign * 1e-4 * direction)
        expected = float((found[name] * direction).sum())
        assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(expected, rel=0.02, abs=0.02), name


def test_what_the_draft_vocabulary_cannot_say_teaches_nothing(target: LoadedModel, samples: list[Sample]) -> None:
    recipe = eagle3(target, samples, vocab=3, steps=2)
    batch = batch_of(target, samples, recipe.layers)
    outcome = recipe.learn(batch)
    assert outcome.loss.isfinite() and outcome.tokens == sum(s.num_assistant for s in samples)
    assert all(gradient.isfinite().all() for gradient in gradients(recipe, batch).values())
    assert outcome.counts[0, 1] <= outcome.tokens / 2


def test_the_target_is_not_touched_and_features_are_ordinary_tensors(
    target: LoadedModel, samples: list[Sample]
) -> None:
    before = weights_hash(target.decoder)
    recipe = eagle3(target, samples, steps=2)
    optimizer = torch.optim.AdamW(recipe.parameters.values(), lr=0.1)
    for _ in range(3):
        batch: Batch = batch_of(target, samples, recipe.layers)
        assert not any(rows.is_inference() for rows in batch.hidden.values())
        recipe.learn(batch).loss.backward()
        optimizer.step()
    assert weights_hash(target.decoder) == before
    assert not any(linear.weight.requires_grad for linear in target.decoder.linears())


def test_a_head_for_another_target_is_refused(
    target: LoadedModel, samples: list[Sample], tmp_path: Path, tiny_llama_dir: Path
) -> None:
    recipe = eagle3(target, samples)
    recipe.write(tmp_path, {})
    config = SpeculativeConfig(method="eagle3", model=str(tmp_path))
    for dtype in ("bf16", "fp32"):
        create_drafter(config, target_of(tiny_llama_dir, dtype))
    recipe.origin = replace(recipe.origin, name="another", weights="tensors:00")
    recipe.write(tmp_path, {})
    with pytest.raises(PacelineError, match=r"was trained for another, and .* has other weights"):
        create_drafter(config, target)
