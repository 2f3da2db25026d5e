"""LayerSkip and Medusa-2 train a copy of the target: a target of its own, near the original, which stays as it was."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from train.making import batch_of, random_samples, target_of

from paceline.core.params import SamplingParams
from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.engine.llm import LLM
from paceline.errors import PacelineError
from paceline.models.load import LoadedModel, load_model
from paceline.models.origin import Origin
from paceline.train.batch import Batch, target_states
from paceline.train.dataset import Sample
from paceline.train.divergence import forward_kl
from paceline.train.evaluate import Evaluation
from paceline.train.features import OnlineFeatures
from paceline.train.loop import Loop
from paceline.train.recipes.draft_model import DraftModelRecipe, DraftModelSettings
from paceline.train.recipes.layerskip import LayerSkipRecipe, LayerSkipSettings, dropout_rates, exit_weights
from paceline.train.recipes.medusa import MedusaSettings
from paceline.train.recipes.medusa_joint import JointMedusaRecipe, JointSettings
from paceline.train.settings import Settings
from paceline.train.vocabulary import most_frequent

STEPS = 30
Tuned = LayerSkipRecipe | JointMedusaRecipe


def layerskip(model: LoadedModel, **settings: object) -> LayerSkipRecipe:
    chosen = LayerSkipSettings(**{"num_layers": 2, "every": 2, "dropout": 0.2, **settings})  # type: ignore[arg-type]
    return LayerSkipRecipe(model, Origin.of(model), chosen, 0)


def joint(model: LoadedModel, rate: float = 0.25) -> JointMedusaRecipe:
    vocabulary = most_frequent(random_samples(6, model.config.vocab_size), 70, model.config.vocab_size)
    settings = JointSettings(backbone_rate=rate)
    return JointMedusaRecipe(model, Origin.of(model), vocabulary, MedusaSettings(num_heads=2), settings, 0)


MADE = {"layerskip": layerskip, "joint": joint}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return random_samples(6, 250, longest=16)


def digest(model: LoadedModel) -> str:
    """Of all of a target's weights."""
    recipe = DraftModelRecipe(model.decoder, Origin.of(model), None, DraftModelSettings((0, 1, 2)))
    parts = [tensor.detach().numpy().tobytes() for _, tensor in sorted(recipe.parameters.items())]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def run(model: LoadedModel, recipe: Tuned, samples: list[Sample], out: Path, stop: int = STEPS) -> Loop:
    settings = Settings(steps=STEPS, learning_rate=2e-3, batch_tokens=60, save_every=10)
    loop = Loop(recipe, samples, OnlineFeatures(model.decoder, recipe.layers), settings, out, {"data": "abc"})
    loop.stop_after = stop
    loop.run()
    return loop


@pytest.fixture(scope="module", params=MADE)
def trained(
    request: pytest.FixtureRequest,
    tiny_llama_dir: Path,
    samples: list[Sample],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[LoadedModel, Tuned, Path]:
    """Original, recipe and folder after a run; the original's weights are those that it had."""
    model, out = target_of(tiny_llama_dir), tmp_path_factory.mktemp(request.param)
    before = digest(model)
    recipe: Tuned = MADE[request.param](model)  # type: ignore[operator]
    run(model, recipe, samples, out)
    assert digest(model) == before != digest(load_model(str(out / recipe.own_target), dtype="fp32"))
    return model, recipe, out


def test_what_is_written_is_the_trained_copy(
    trained: tuple[LoadedModel, Tuned, Path], samples: list[Sample], tiny_llama_dir: Path
) -> None:
    model, recipe, out = trained
    written = load_model(str(out / recipe.own_target))
    assert written.precision == "fp32" and written.config == model.config
    batch = Batch.of(samples, {})
    ours = recipe.copy.states(batch, (-1,))[-1] @ recipe.copy.output(recipe.copy.vocabulary).T
    states = target_states(written.decoder, samples, (-1,))[-1]
    theirs = states @ written.decoder.head.weight.T
    torch.testing.assert_close(theirs, ours.detach(), rtol=0, atol=1e-5 * float(ours.detach().abs().max()))
    assert written.tokenizer is not None and model.tokenizer is not None
    assert written.tokenizer.token_strings() == model.tokenizer.token_strings()


def test_it_drafts_for_itself_and_no_token_changes(trained: tuple[LoadedModel, Tuned, Path]) -> None:
    model, recipe, out = trained
    evaluation = Evaluation(model, recipe, [(5, 6, 7, 8), (40, 41, 42)], max_tokens=24)
    written = evaluation.target(out)
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in evaluation.prompts]
    plain = [output.outputs[0].token_ids for output in LLM(written, "none").generate(prompts, params)]
    drafted = [output.outputs[0] for output in evaluation.decode(out)]
    assert [own.token_ids for own in drafted] == plain
    assert all(own.speculation.num_draft_tokens > 0 for own in drafted)
    assert plain != [output.outputs[0].token_ids for output in LLM(model, "none").generate(prompts, params)]
    found = evaluation(out)
    assert found["decoded_acceptance_length"] == found["simulated_acceptance_length"]  # float32, no near-ties


def make_again(recipe: Tuned, model: LoadedModel) -> Tuned:
    make = MADE["joint" if isinstance(recipe, JointMedusaRecipe) else "layerskip"]
    return make(model)  # type: ignore[operator,no-any-return]


def taught(recipe: Tuned, batch: Batch) -> tuple[float, float]:
    """Loss, and how many first drafts agree: of the exit with no layer left out, or of heads and copy."""
    if isinstance(recipe, JointMedusaRecipe):
        outcome = recipe.learn(batch)
        return float(outcome.loss.detach()), float(outcome.counts[0, 1])
    tokens, said = recipe.copy.original_says(batch)
    own = recipe.copy.compare(recipe.copy.states(batch, (1,))[1][tokens], said, forward_kl)
    return float(own.loss.detach()), float(own.counts[1])


def test_loss_falls_and_drafts_agree_more(trained: tuple[LoadedModel, Tuned, Path], samples: list[Sample]) -> None:
    model, recipe, out = trained
    batch = batch_of(model, samples, (-1,))
    (loss, agreed), (loss_after, agreed_after) = taught(make_again(recipe, model), batch), taught(recipe, batch)
    assert loss_after < 0.8 * loss and agreed_after >= agreed + 3, (loss, loss_after, agreed, agreed_after)
    assert len((out / "log.jsonl").read_text().splitlines()) == STEPS


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    trained: tuple[LoadedModel, Tuned, Path], samples: list[Sample], tmp_path: Path
) -> None:
    model, recipe, out = trained
    run(model, make_again(recipe, model), samples, tmp_path, stop=12)
    again = run(model, make_again(recipe, model), samples, tmp_path)
    for name, parameter in recipe.parameters.items():
        assert torch.equal(parameter, again.recipe.parameters[name]), name
    files = [path.relative_to(out) for path in out.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    assert len(files) >= 5
    for file in files:
        assert (out / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_joint_heads_are_for_the_new_target_alone(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """However little it was changed; and a run of heads alone does not go on with them."""
    model, recipe = target_of(tiny_llama_dir), joint(target_of(tiny_llama_dir))
    with torch.no_grad():
        recipe.copy.parameters["norm"][3] *= 1.1
    recipe.write(tmp_path, {})
    config = SpeculativeConfig(method="medusa", model=str(tmp_path))
    assert create_drafter(config, load_model(str(tmp_path / "target"))).name == "medusa"
    with pytest.raises(PacelineError, match=r"the copy of .* in its folder `target`, and .* has other weights"):
        create_drafter(config, model)
    samples = random_samples(3, 250)
    run(model, recipe, samples, tmp_path / "run", stop=1)
    with pytest.raises(PacelineError, match=r"medusa.heads_weight is 0.2 there, None here"):
        run(model, recipe.medusa, samples, tmp_path / "run")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MADE)
def test_exactly_the_assistants_tokens_are_learnt(kind: str, tiny_llama_dir: Path) -> None:
    model = target_of(tiny_llama_dir, "fp64")
    sample = random_samples(2, model.config.vocab_size)[1]
    recipe: Tuned = MADE[kind](model)  # type: ignore[operator]
    with torch.no_grad():  # a copy that is the original has no loss after its last layer
        recipe.copy.parameters["layers.1.down"] *= 1.2
    total = 0.0
    for token in range(len(sample.token_ids)):
        only = replace(sample, assistant=((token, token + 1),))
        loss = float(recipe.learn(batch_of(model, [only], (-1,))).loss.detach())
        assert (loss > 0) == (token >= 1)
        total += loss if sample.mask()[token] else 0.0
    whole = recipe.learn(batch_of(model, [sample], (-1,)))
    assert float(whole.loss.detach()) == pytest.approx(total, rel=1e-9) and whole.tokens == sample.num_assistant


def gradients(recipe: Tuned, batch: Batch) -> dict[str, torch.Tensor]:
    recipe.learn(batch).loss.backward()
    return {name: p.grad for name, p in recipe.parameters.items() if p.grad is not None and p.grad.any()}


def test_gradients_reach_what_an_exit_reads_and_nothing_else(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit after layer 1; layer 0 is left out of both documents in the second case."""
    model = target_of(tiny_llama_dir, "fp64")
    texts = [Sample("a", (1, 2, 3, 4, 5, 6), ((2, 4),)), Sample("b", (7, 8, 9), ((1, 2),))]
    batch = batch_of(model, texts, (-1,))
    everything = set(layerskip(model).parameters)
    for left_out in ({}, {0: torch.ones(9, dtype=torch.bool)}):
        recipe = layerskip(model)
        monkeypatch.setattr(recipe, "exits", lambda batch: {1: 1.0})
        monkeypatch.setattr(recipe, "left_out", lambda batch, left_out=left_out: left_out)
        found = gradients(recipe, batch)
        without = ("layers.2.", *(f"layers.{layer}." for layer in left_out))
        assert set(found) == {name for name in everything if not name.startswith(without)}
        # rows that a taught prediction reads: of a token, and of those before it in its own document
        assert found["embed"].any(-1).nonzero().flatten().tolist() == [1, 2, 3, 7]


def test_gradients_reach_heads_and_the_whole_copy(tiny_llama_dir: Path) -> None:
    """A copy that is still the original is taught by its heads alone."""
    model = target_of(tiny_llama_dir, "fp64")
    recipe = joint(model)
    found = gradients(recipe, batch_of(model, [Sample("a", (1, 2, 3, 4, 5, 6), ((2, 5),))], (-1,)))
    assert set(found) == set(recipe.parameters)
    # head 0 reads tokens 0, 1, 2 (of ids 1, 2, 3), head 1 those before; token 3 (id 4) teaches the copy alone: nothing
    largest = found["target.embed"].abs().amax(-1)
    assert (largest > 1e-4 * largest.max()).nonzero().flatten().tolist() == [1, 2, 3]


def test_rates_and_weights_are_the_papers() -> None:
    """By hand: 2^½ − 1 = 0.414… in the middle; s·(0 + 1) and (L − 1) + s·(0 + 1 + 2)."""
    assert dropout_rates(3, 0.2) == pytest.approx([0, 0.2 * 0.41421356, 0.2])
    assert exit_weights([1, 3], 4, 0.5) == pytest.approx({1: 0.1, 3: 0.9})
    assert exit_weights([0, 2, 3], 4, 1.0) == pytest.approx({0: 0, 2: 3 / 9, 3: 6 / 9})


def test_draws_follow_from_batch_and_seed(tiny_llama_dir: Path) -> None:
    model = target_of(tiny_llama_dir)
    recipe, rest = layerskip(model, every=3, dropout=0.5), random_samples(60, 250)
    packs = [Batch.of(rest[i : i + 3], {}) for i in range(58)]
    starts = [min(recipe.exits(pack)) for pack in packs]
    assert {start: starts.count(start) > 8 for start in range(3)} == dict.fromkeys(range(3), True)  # chance 2e-3 each
    assert all(2 in recipe.exits(pack) for pack in packs)
    left_out = [recipe.left_out(pack) for pack in packs]
    documents = sum(
        int(out[2][pack.positions == 0].sum()) for pack, out in zip(packs, left_out, strict=True) if 2 in out
    )
    assert 60 < documents < 114 and not any(0 in out for out in left_out)  # 87 ± 6.6 of 174: 4 deviations
    assert {len(out[2].unique()) for out in left_out if 2 in out} == {1, 2}
    again = layerskip(model, every=3, dropout=0.5)
    assert [again.exits(pack) for pack in packs] == [recipe.exits(pack) for pack in packs]
    other = LayerSkipRecipe(model, Origin.of(model), recipe.settings, seed=1)
    assert [other.exits(pack) for pack in packs] != [recipe.exits(pack) for pack in packs]


def test_the_copys_rate_is_a_share_of_the_heads(tiny_llama_dir: Path, samples: list[Sample], tmp_path: Path) -> None:
    """AdamW's first step moves every entry that has a gradient by the rate."""
    model = target_of(tiny_llama_dir, "fp64")
    recipe = joint(model, rate=0.1)
    before = {name: parameter.detach().clone() for name, parameter in recipe.parameters.items()}
    loop = run(model, recipe, samples, tmp_path, stop=1)
    rate = loop.settings.rate(0)
    for name, share in (("0.0.linear.weight", 1.0), ("target.layers.0.qkv", 0.1)):
        moved = (recipe.parameters[name].detach() - before[name]).abs().max()
        assert float(moved) == pytest.approx(share * rate, rel=1e-3)


def test_what_cannot_be_is_refused_before_training(tiny_llama_dir: Path, tmp_path: Path) -> None:
    model = target_of(tiny_llama_dir)
    for bad, message in (
        ({"num_layers": 3}, "the exit is after layer 3"),
        ({"dropout": 1.5}, "dropout is 1.5"),
        ({"every": 4}, "every 4 layers"),
        ({"exit_scale": 0.0}, "exit scale is 0"),
    ):
        with pytest.raises(PacelineError, match=message):
            layerskip(model, **bad)
    with pytest.raises(PacelineError, match=r"backbone's rate is 0.5; it must be above 0 and at most 0.25"):
        joint(model, rate=0.5)
    tiny.hf_model(tiny.hf_config("gemma3"), dtype=torch.float32).save_pretrained(tmp_path)
    gemma = target_of(tmp_path)
    with pytest.raises(PacelineError, match="gemma3 model cannot be written"):
        layerskip(gemma)
    with pytest.raises(PacelineError, match="gemma3 model cannot be written"):
        DraftModelRecipe(gemma.decoder, Origin.of(gemma), None, DraftModelSettings((0, 1)))


def test_a_copy_has_all_the_originals_positions(tiny_llama_dir: Path) -> None:
    short = load_model(str(tiny_llama_dir), dtype="fp32", max_context=64)
    assert layerskip(short).copy.decoder.config.max_context == 512
