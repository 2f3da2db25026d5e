"""Draft models made from the target: the training forward is the decoder's, the folder is read by others, too."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from train.making import batch_of, random_samples, target_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.errors import PacelineError
from paceline.models.decoder import Segment
from paceline.models.load import load_model
from paceline.models.origin import Origin
from paceline.train.batch import Batch
from paceline.train.dataset import Sample
from paceline.train.features import OnlineFeatures
from paceline.train.forward import whole_states
from paceline.train.loop import Loop
from paceline.train.on_policy import OnPolicy
from paceline.train.recipes.draft_model import DraftModelRecipe, DraftModelSettings
from paceline.train.settings import Settings
from paceline.train.student import spread_layers


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_training_forward_is_the_decoders(family: str) -> None:
    decoder = tiny.tiny_decoder(family, dtype=torch.float64)
    samples = random_samples(3, 256, longest=40)
    states = whole_states(decoder, Batch.of(samples, {}).texts, (0, 2, -1))
    pool = decoder.new_pool(300)
    out = decoder.forward([Segment(pool.new_sequence(), sample.token_ids) for sample in samples], taps=(0, 2))
    torch.testing.assert_close(states[-1], decoder.final_hidden(out.hidden).clone(), rtol=1e-5, atol=1e-5)
    for layer, rows in out.taps.items():
        torch.testing.assert_close(states[layer], rows.clone(), rtol=1e-5, atol=1e-4)


def test_a_layer_left_out_is_a_model_without_it(tiny_llama_dir: Path) -> None:
    model = target_of(tiny_llama_dir, "fp64")
    samples = random_samples(3, 250)
    texts = Batch.of(samples, {}).texts
    shorter = DraftModelRecipe(model.decoder, Origin.of(model), None, DraftModelSettings((0, 2))).student
    whole, short = whole_states(model.decoder, texts, (2, -1)), whole_states(shorter, texts, (1, -1))
    everywhere = torch.ones(len(texts.ids), dtype=torch.bool)
    nowhere = whole_states(model.decoder, texts, (2, -1), {1: ~everywhere})
    skipped = whole_states(model.decoder, texts, (2, -1), {1: everywhere})
    (start, stop) = texts.spans[1]
    one = (torch.arange(len(texts.ids)) >= start) & (torch.arange(len(texts.ids)) < stop)
    mixed = whole_states(model.decoder, texts, (2, -1), {1: one})
    assert torch.equal(nowhere[-1], whole[-1]) and torch.equal(nowhere[2], whole[2])
    torch.testing.assert_close(skipped[-1], short[-1])
    torch.testing.assert_close(skipped[2], short[1])
    torch.testing.assert_close(mixed[2], torch.where(one[:, None], short[1], whole[2]))
    assert not torch.allclose(short[-1], whole[-1], rtol=0.1)


def recipe_of(folder: Path, dtype: str = "fp32", **settings: object) -> DraftModelRecipe:
    target = target_of(folder, dtype)
    return DraftModelRecipe(target.decoder, Origin.of(target), target.tokenizer, DraftModelSettings(**settings))  # type: ignore[arg-type]


def test_a_student_of_all_layers_is_the_target_and_has_nothing_to_learn(tiny_llama_dir: Path) -> None:
    recipe = recipe_of(tiny_llama_dir, "fp64", layers=(0, 1, 2))
    target = target_of(tiny_llama_dir, "fp64")
    samples = random_samples(4, target.config.vocab_size)
    outcome = recipe.learn(batch_of(target, samples, (-1,)))
    assert float(outcome.loss.detach()) == pytest.approx(0, abs=1e-6)
    assert outcome.counts[0].tolist() == pytest.approx([outcome.tokens] * 3)
    with pytest.raises(PacelineError, match=r"layers are \[2, 1\]"):
        recipe_of(tiny_llama_dir, layers=(2, 1))
    assert spread_layers(30, 5) == (0, 7, 14, 22, 29) and spread_layers(3, 1) == (0,)


def test_a_students_folder_is_a_model_for_us_and_for_transformers(tiny_llama_dir: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_llama_dir, layers=(0, 2), vocab_size=200)
    recipe.write(tmp_path, {"about": "a test"})
    ours = load_model(str(tmp_path))
    assert ours.config == recipe.student.config
    ids = tiny.prompt(20, vocab_size=200)
    out = ours.decoder.forward([Segment(ours.decoder.new_pool(64).new_sequence(), ids)])
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours.decoder.logits(out.hidden).clone(), expected, rtol=1e-4, atol=1e-3)
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hi ü"}]
    assert ours.tokenizer is not None
    rendered = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == ours.tokenizer.render_chat(messages)
    assert hf_tokenizer(rendered, add_special_tokens=False)["input_ids"] == ours.tokenizer.apply_chat_template(messages)
    target = target_of(tiny_llama_dir)
    create_drafter(SpeculativeConfig(method="draft_model", model=str(tmp_path), draft_vocab_size=200), target)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_distillation_brings_the_student_nearer_and_resumes_bit_for_bit(
    tiny_llama_dir: Path, tmp_path: Path, share: float
) -> None:
    target = target_of(tiny_llama_dir)
    samples = random_samples(6, target.config.vocab_size, longest=16)

    def run(out: Path, steps: int) -> Loop:
        recipe = recipe_of(tiny_llama_dir, layers=(0, 1), divergence="jsd")
        settings = Settings(steps=6, learning_rate=3e-3, batch_tokens=200, save_every=2)
        rewrite = OnPolicy(recipe.student, share, seed=1)
        loop = Loop(recipe, samples, OnlineFeatures(target.decoder, (-1,)), settings, out, {}, rewrite=rewrite)
        loop.stop_after = steps
        loop.run()
        return loop

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "parts", 4)
    again = run(tmp_path / "parts", 6)
    for name, parameter in whole.recipe.parameters.items():
        assert torch.equal(parameter, again.recipe.parameters[name])
    batch = batch_of(target, samples, (-1,))
    before = recipe_of(tiny_llama_dir, layers=(0, 1), divergence="jsd").learn(batch)
    assert float(whole.recipe.learn(batch).loss.detach()) < float(before.loss.detach())


def test_on_policy_answers_are_the_students(tiny_llama_dir: Path) -> None:
    recipe = recipe_of(tiny_llama_dir, layers=(0, 1))
    samples = [replace(s, id=str(i)) for i, s in enumerate(random_samples(40, 250, longest=12))]
    policy = OnPolicy(recipe.student, 0.5, seed=3)
    rewritten = policy(samples, 7)
    changed = [(old, new) for old, new in zip(samples, rewritten, strict=True) if old != new]
    assert 8 <= len(changed) <= 32  # of 40 coins; false alarm 3e-4 were the seed free
    assert policy(samples, 7) == rewritten != policy(samples, 8)
    for old, new in changed:
        start, stop = new.assistant[0]
        assert start == old.assistant[0][0] and new.token_ids[:start] == old.token_ids[:start]
        assert stop == len(new.token_ids) and stop - start <= old.assistant[0][1] - start
    assert (
        Sample("", (1, 2, 3), ((0, 3),)) == OnPolicy(recipe.student, 1.0, 0)([Sample("", (1, 2, 3), ((0, 3),))], 0)[0]
    )
