"""The loop: resumed is uninterrupted, cuts into packs change nothing, checkpoints are whole, faults are told."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from train.making import eagle3, random_samples, target_of

from paceline.errors import PacelineError
from paceline.models.load import LoadedModel
from paceline.train.batch import Batch
from paceline.train.checkpoint import checkpoints
from paceline.train.dataset import Sample
from paceline.train.evaluate import Evaluation, pass_lengths
from paceline.train.features import CachedFeatures, OnlineFeatures, cache_size
from paceline.train.loop import Loop
from paceline.train.settings import Settings


@pytest.fixture(scope="module")
def target(tiny_llama_dir: Path) -> LoadedModel:
    return target_of(tiny_llama_dir)


@pytest.fixture(scope="module")
def samples(target: LoadedModel) -> list[Sample]:
    return random_samples(12, target.config.vocab_size)


def loop(target: LoadedModel, samples: list[Sample], out: Path, features: object = None, **changes: object) -> Loop:
    recipe = eagle3(target, samples, vocab=120, steps=3)
    settings = {"steps": 7, "learning_rate": 3e-3, "batch_tokens": 60, "accumulate": 2, "save_every": 2, **changes}
    online = OnlineFeatures(target.decoder, recipe.layers)
    return Loop(recipe, samples, features or online, Settings(**settings), out, {"data": "abc"})  # type: ignore[arg-type]


class Interrupted(OnlineFeatures):
    """Ctrl-C in the middle of a step."""

    calls = 0

    def __call__(self, samples: list[Sample]) -> Batch:  # type: ignore[override]
        self.calls += 1
        if self.calls == 10:
            raise KeyboardInterrupt
        return super().__call__(samples)


@pytest.mark.parametrize("how", [{"bf16": True}, {"optimizer": "adamw"}, {"optimizer": "muon"}])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    target: LoadedModel, samples: list[Sample], tmp_path: Path, how: dict[str, object]
) -> None:
    whole = loop(target, samples, tmp_path / "whole", **how)
    whole.run()
    torn = loop(target, samples, tmp_path / "torn", Interrupted(target.decoder, whole.recipe.layers), **how)
    with pytest.raises(KeyboardInterrupt):
        torn.run()
    assert [path.name for path in checkpoints(tmp_path / "torn/checkpoints")] == ["step-0000002", "step-0000004"]
    again = loop(target, samples, tmp_path / "torn", **how)
    again.run()
    for name, parameter in whole.recipe.parameters.items():
        assert torch.equal(parameter, again.recipe.parameters[name])
    for file in ("model.safetensors", "config.json", "provenance.json", "log.jsonl"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "torn" / file).read_bytes(), file
    assert again.run() == tmp_path / "torn/checkpoints/step-0000007"  # finished: nothing to do
    assert len((tmp_path / "torn/log.jsonl").read_text().splitlines()) == 7


def test_an_unfinished_checkpoint_is_none(target: LoadedModel, samples: list[Sample], tmp_path: Path) -> None:
    first = loop(target, samples, tmp_path, steps=4)
    first.run()
    partial = tmp_path / "checkpoints/.step-0000006.partial"
    partial.mkdir()
    (partial / "state.pt").write_bytes(b"half")
    assert checkpoints(tmp_path / "checkpoints")[-1].name == "step-0000004"
    with pytest.raises(PacelineError, match="other settings: steps is 4 there, 7 here"):
        loop(target, samples, tmp_path).run()


def test_how_samples_are_cut_into_packs_changes_nothing(
    target: LoadedModel, samples: list[Sample], tmp_path: Path
) -> None:
    """All samples in one step: as one pack, and as many."""
    one = loop(target, samples, tmp_path / "one", steps=1, batch_tokens=10_000, accumulate=1)
    many = loop(target, samples, tmp_path / "many", steps=1, batch_tokens=40, accumulate=1000)
    many._packs = lambda: iter([[(i, [sample]) for i, sample in enumerate(samples)]])  # type: ignore[method-assign]
    one.run(), many.run()
    for name, parameter in one.recipe.parameters.items():
        other = many.recipe.parameters[name]
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-3, atol=1e-4 * float(parameter.grad.abs().max()))


def test_a_step_that_teaches_nothing_is_told_and_changes_nothing(
    target: LoadedModel, samples: list[Sample], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mute = [Sample("m", samples[0].token_ids, ((0, 2),))]  # no row predicts the first two tokens
    run = loop(target, mute, tmp_path, steps=2, accumulate=1)
    before = {name: parameter.detach().clone() for name, parameter in run.recipe.parameters.items()}
    run.run()
    assert "taught nothing" in caplog.text
    assert all(torch.equal(parameter, before[name]) for name, parameter in run.recipe.parameters.items())
    assert all(json.loads(line)["loss"] == 0 for line in (tmp_path / "log.jsonl").read_text().splitlines())


def test_features_from_disk_are_the_online_ones(
    target: LoadedModel, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = eagle3(target, samples, steps=3)
    cached = CachedFeatures(target.decoder, recipe.origin, recipe.layers, samples, tmp_path)
    tokens = sum(len(sample.token_ids) for sample in samples)
    assert cached.size_to_write == cache_size(target.decoder, recipe.layers, samples) == tokens * 4 * 64 * 4
    online = OnlineFeatures(target.decoder, recipe.layers)
    for pack in (samples[:3], samples[2:5], samples[:3]):
        for layer in recipe.layers:
            torch.testing.assert_close(cached(pack).hidden[layer], online(pack).hidden[layer], rtol=1e-4, atol=1e-4)
    again = CachedFeatures(target.decoder, recipe.origin, recipe.layers, samples, tmp_path)
    assert again.size_to_write < cached.size_to_write
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(PacelineError, match="no space for features"):
        CachedFeatures(target.decoder, recipe.origin, recipe.layers, samples, tmp_path / "other")


def test_the_learning_rate_rises_and_falls() -> None:
    settings = Settings(steps=100, learning_rate=1.0, warmup=0.1, final_rate=0.1)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.55) and rates[99] == pytest.approx(0.1, abs=1e-3)


def test_a_walk_over_guesses_counts_passes_as_decoding_does() -> None:
    """By hand. Prompt 1 2 3, answer 4 5 6 7 8 9; guesses[i, t] is of token t + 2 + i."""
    wrong = -1
    guesses = torch.full((3, 9), wrong)
    guesses[0, 1], guesses[1, 1], guesses[2, 1] = 4, 5, wrong  # two right: 4 5 and the target's 6
    guesses[0, 4], guesses[1, 4], guesses[2, 4] = 7, 8, 9  # three right, but the last token is the target's
    assert pass_lengths(guesses, (1, 2, 3), (4, 5, 6, 7, 8, 9)) == [3, 3]
    assert pass_lengths(guesses[:1], (1, 2, 3), (4, 5, 6, 7, 8, 9)) == [2, 1, 2, 1]


def test_simulated_acceptance_is_the_engines(target: LoadedModel, samples: list[Sample], tmp_path: Path) -> None:
    """After training on the target's own greedy answers: float32 and no near-ties, so the two agree to the token."""
    prompts = [sample.token_ids[:6] for sample in samples[:6]]
    fresh = eagle3(target, samples, steps=3)
    answers = Evaluation(target, fresh, prompts, max_tokens=24)
    fresh.write(tmp_path, {})
    outputs = answers.decode(tmp_path)
    said = [
        Sample(str(i), o.prompt_token_ids + o.outputs[0].token_ids, ((6, 6 + len(o.outputs[0].token_ids)),))
        for i, o in enumerate(outputs)
    ]
    run = loop(target, said, tmp_path / "run", steps=40, batch_tokens=400, accumulate=1, save_every=0)
    run.evaluate = Evaluation(target, run.recipe, prompts, max_tokens=24)
    run.run()
    found = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert found["decoded_acceptance_length"] > 1.3
    assert found["simulated_acceptance_length"] == found["decoded_acceptance_length"]
