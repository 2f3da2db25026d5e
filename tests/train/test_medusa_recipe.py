"""Medusa's training: each head learns its own distance, by the target's word alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from train.making import batch_of, random_samples, target_of

from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.medusa import MedusaDrafter
from paceline.models.load import LoadedModel
from paceline.models.origin import Origin
from paceline.train.dataset import Sample
from paceline.train.features import OnlineFeatures
from paceline.train.loop import Loop
from paceline.train.recipes.medusa import MedusaRecipe, MedusaSettings
from paceline.train.settings import Settings
from paceline.train.vocabulary import most_frequent

V = 32


@pytest.fixture(scope="module")
def successor(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A target that always says (x + 1) mod V: embeddings one-hot, no layer adds anything, the output is a shift."""
    folder = tmp_path_factory.mktemp("successor")
    hf = tiny.hf_model(tiny.hf_config("llama", vocab_size=V, hidden_size=64), dtype=torch.float32)
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        hf.model.embed_tokens.weight.copy_(torch.eye(V, 64))
        hf.model.norm.weight.fill_(1)
        hf.lm_head.weight.copy_(2 * torch.eye(V, 64).roll(1, 0))
    hf.save_pretrained(folder)
    return target_of(folder)


def medusa(target: LoadedModel, samples: list[Sample], vocab: int = 0, **settings: object) -> MedusaRecipe:
    vocabulary = most_frequent(samples, vocab, target.config.vocab_size)
    return MedusaRecipe(target.decoder, Origin.of(target), vocabulary, MedusaSettings(**settings), 0)  # type: ignore[arg-type]


def test_head_k_learns_the_token_k_plus_2_places_on(successor: LoadedModel, tmp_path: Path) -> None:
    samples = [Sample(str(x), tuple((x + i) % V for i in range(7)), ((1, 7),)) for x in range(V)]
    recipe = medusa(successor, samples)
    settings = Settings(steps=60, learning_rate=0.1, batch_tokens=1000, save_every=0)
    Loop(recipe, samples, OnlineFeatures(successor.decoder, (-1,)), settings, tmp_path, {"data": "successor"}).run()
    drafter = create_drafter(SpeculativeConfig(method="medusa", model=str(tmp_path)), successor)
    assert isinstance(drafter, MedusaDrafter)
    states = batch_of(successor, [Sample("", tuple(range(V)), ())], (-1,)).hidden[-1]
    for head in range(4):
        expected = [(x + head + 2) % V for x in range(V)]
        assert drafter.heads.logits(head, states).argmax(-1).tolist() == expected


@pytest.mark.parametrize("vocab", [0, 50])
def test_training_computes_what_inference_drafts_from(tiny_llama_dir: Path, vocab: int, tmp_path: Path) -> None:
    target = target_of(tiny_llama_dir, "fp64")
    samples = random_samples(5, target.config.vocab_size)
    recipe = medusa(target, samples, vocab, num_heads=3, num_blocks=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in recipe.parameters.values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    recipe.write(tmp_path, {})
    drafter = create_drafter(SpeculativeConfig(method="medusa", model=str(tmp_path)), target)
    assert isinstance(drafter, MedusaDrafter) and len(drafter.heads.heads) == 3
    batch = batch_of(target, samples, (-1,))
    guesses = recipe.guesses(batch, 3)
    for head in range(3):
        ours, theirs = recipe.heads().logits(head, batch.hidden[-1]), drafter.heads.logits(head, batch.hidden[-1])
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        rows = batch.answers(head + 2)
        assert torch.equal(guesses[head][rows], theirs.argmax(-1)[rows]) and (guesses[head][~rows] == -1).all()


def test_exactly_the_assistants_tokens_are_learnt(tiny_llama_dir: Path) -> None:
    target = target_of(tiny_llama_dir, "fp64")
    sample = random_samples(2, target.config.vocab_size)[1]
    recipe = medusa(target, [sample], num_heads=3)
    total = 0.0
    for token in range(len(sample.token_ids)):
        only = replace(sample, assistant=((token, token + 1),))
        loss = float(recipe.learn(batch_of(target, [only], (-1,))).loss.detach())
        assert (loss > 0) == (token >= 2)
        total += loss if sample.mask()[token] else 0.0
    whole = recipe.learn(batch_of(target, [sample], (-1,)))
    assert float(whole.loss.detach()) == pytest.approx(total, rel=1e-9) and whole.tokens == sample.num_assistant
