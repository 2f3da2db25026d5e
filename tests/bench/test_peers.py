"""Other engines: transformers' model made from ours, and packages that are played by files."""

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from paceline.bench.answers import Measured
from paceline.bench.peers import of_llama_cpp, of_vllm
from paceline.bench.peers.base import PEERS, OneAtATime, Peer, Subject, find_peer, is_installed, open_arms
from paceline.bench.peers.hf_twin import canonical_weights, hf_config, hf_twin
from paceline.core.params import SamplingParams
from paceline.errors import PacelineError
from paceline.models.adopt import adopt
from paceline.models.hf_config import config_from_hf
from paceline.models.load import LoadedModel, load_model
from paceline.models.sources import FolderSource, GGUFSource

PROMPTS = [tiny.prompt(20, seed=1), tiny.prompt(9, seed=2)]
PARAMS = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (12, 7)]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_twin_is_the_model_that_ours_came_from(family: str) -> None:
    config = tiny.hf_config(family, tie_word_embeddings=family == "qwen2")
    original = tiny.hf_model(config, dtype=torch.float32)
    model = adopt(original)
    assert config_from_hf(hf_config(model.config).to_dict()) == model.config
    twin = hf_twin(model)
    ids = torch.tensor([PROMPTS[0] * 3])
    with torch.inference_mode():
        # Gemma's norm weights lose their last bits where the 1 is added and taken off again
        close = {"rtol": 1e-4, "atol": 1e-4} if family == "gemma3" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(twin(ids).logits, original(ids).logits, **close)
    ours = {tensor.data_ptr() for tensor in canonical_weights(model.decoder).values()}
    matrices = [p for name, p in twin.named_parameters() if not name.endswith("norm.weight")]
    assert all(parameter.data_ptr() in ours for parameter in matrices)  # no second copy


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
        },
    ],
)
def test_the_twin_of_a_scaled_rope(rope: dict[str, Any]) -> None:
    original = tiny.hf_model(tiny.hf_config("llama", rope_parameters=rope), dtype=torch.float32)
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        assert torch.equal(hf_twin(adopt(original))(ids).logits, original(ids).logits)


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(str(tiny_llama_dir))


def subject(model: LoadedModel, **changes: Any) -> Subject:
    return Subject(**{"model": model, "draft": None, "num_draft_tokens": 3, "max_model_len": 128} | changes)


def tokens(measured: Measured) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in measured.answers]


def test_transformers_with_and_without_its_own_speculation(model: LoadedModel, tiny_llama_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    expected = []
    for ids, own in zip(PROMPTS, PARAMS, strict=True):
        out = list(ids)
        for _ in range(own.max_tokens or 0):
            with torch.inference_mode():
                out.append(int(reference(torch.tensor([out])).logits[0, -1].argmax()))
        expected.append(tuple(out[len(ids) :]))
    arms = open_arms(PEERS["transformers"], subject(model, draft=lambda: model))
    assert [arm.label for arm in arms] == ["transformers", "transformers+lookup", "transformers+draft"]
    for arm in arms:
        assert arm.most_at_once == 1
        measured = arm.answer(PROMPTS, PARAMS)
        assert tokens(measured) == expected, arm.label
        for answer in measured.answers:
            assert answer.first_s is not None and 0 < answer.first_s <= answer.seconds <= measured.seconds
            assert 1 <= answer.num_first <= len(answer.token_ids)


FAKE_LLAMA = """
class Llama:
    made = []
    def __init__(self, **options):
        self.options, self.resets = options, 0
        Llama.made.append(self)
    def generate(self, tokens, temp, repeat_penalty):
        assert temp == 0.0 and repeat_penalty == 1.0
        n = tokens[-1]
        while True:
            n += 1
            yield n
    def reset(self):
        self.resets += 1
"""
FAKE_LOOKUP = """
class LlamaPromptLookupDecoding:
    def __init__(self, max_ngram_size=2, num_pred_tokens=10):
        self.num_pred_tokens = num_pred_tokens
"""
FAKE_VLLM = """
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert temperature == 0.0 and ignore_eos
        self.max_tokens = max_tokens
class Output:
    def __init__(self, token_ids):
        self.outputs = [self]
        self.token_ids = token_ids
class Whole:
    def __init__(self, token_ids):
        self.outputs = [Output(token_ids)]
class LLM:
    made = []
    def __init__(self, **options):
        self.options, self.resets = options, 0
        LLM.made.append(self)
    def generate(self, prompts, params, use_tqdm):
        assert use_tqdm is False
        return [Whole([p["prompt_token_ids"][0]] * s.max_tokens) for p, s in zip(prompts, params)]
    def reset_prefix_cache(self):
        self.resets += 1
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a package for the test: files by name, and which release of it has what."""

    def install(name: str, **files: str) -> Any:
        (tmp_path / name).mkdir()
        for file, text in {"__init__": "", **files}.items():
            (tmp_path / name / f"{file}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        for loaded in [module for module in sys.modules if module.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
        return __import__(name)

    yield install
    for loaded in [module for module in sys.modules if module.split(".")[0] in ("llama_cpp", "vllm")]:
        sys.modules.pop(loaded)


def test_llama_cpp(model: LoadedModel, package: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llama_cpp = package("llama_cpp", __init__=FAKE_LLAMA, llama_speculative=FAKE_LOOKUP)
    monkeypatch.setattr(of_llama_cpp, "resolve", lambda name: GGUFSource(tmp_path / "m.gguf"))
    arms = open_arms(PEERS["llama.cpp"], subject(model))
    assert [arm.label for arm in arms] == ["llama.cpp", "llama.cpp+lookup"]
    plain, lookup = llama_cpp.Llama.made
    assert plain.options["model_path"] == str(tmp_path / "m.gguf") and plain.options["n_ctx"] == 128
    assert plain.options["n_threads"] == torch.get_num_threads() and "draft_model" not in plain.options
    assert lookup.options["draft_model"].num_pred_tokens == 3
    measured = arms[0].answer(PROMPTS, PARAMS)
    assert tokens(measured) == [
        tuple(range(ids[-1] + 1, ids[-1] + 1 + (own.max_tokens or 0))) for ids, own in zip(PROMPTS, PARAMS, strict=True)
    ]
    arms[0].forget()
    assert plain.resets == 1 and lookup.resets == 0


def test_a_llama_cpp_without_prompt_lookup_runs_plain(
    model: LoadedModel, package: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package("llama_cpp", __init__=FAKE_LLAMA)
    monkeypatch.setattr(of_llama_cpp, "resolve", lambda name: GGUFSource(tmp_path / "m.gguf"))
    assert [arm.label for arm in open_arms(PEERS["llama.cpp"], subject(model))] == ["llama.cpp"]


def test_llama_cpp_refuses_what_is_no_gguf_file(model: LoadedModel, package: Any) -> None:
    package("llama_cpp", __init__=FAKE_LLAMA)
    with pytest.raises(PacelineError, match="reads GGUF files"):
        open_arms(PEERS["llama.cpp"], subject(model))


def test_vllm(model: LoadedModel, package: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vllm = package("vllm", __init__=FAKE_VLLM)
    monkeypatch.setattr(of_vllm, "resolve", lambda name: FolderSource(tmp_path))
    arms = open_arms(PEERS["vllm"], subject(model))
    assert [arm.label for arm in arms] == ["vllm", "vllm+ngram"]
    plain, ngram = vllm.LLM.made
    assert plain.options["model"] == str(tmp_path) and "speculative_config" not in plain.options
    assert plain.options["dtype"] == "float32" and plain.options["max_model_len"] == 128
    assert ngram.options["speculative_config"]["num_speculative_tokens"] == 3
    measured = arms[1].answer(PROMPTS, PARAMS)
    assert arms[1].most_at_once is None
    assert tokens(measured) == [(ids[0],) * (own.max_tokens or 0) for ids, own in zip(PROMPTS, PARAMS, strict=True)]
    assert all(answer.first_s is None for answer in measured.answers)
    arms[1].forget()
    assert ngram.resets == 1
    monkeypatch.setattr(of_vllm, "resolve", lambda name: GGUFSource(tmp_path / "m.gguf"))
    with pytest.raises(PacelineError, match="Hugging Face folders"):
        open_arms(PEERS["vllm"], subject(model))


def test_what_is_installed_is_known_without_importing_it(package: Any) -> None:
    assert is_installed(PEERS["transformers"])
    assert not is_installed(Peer("no_such_engine", "", ""))
    with pytest.raises(PacelineError, match="--peer sglang is unknown"):
        find_peer("sglang")


def test_prompts_of_one_arm_follow_one_another() -> None:
    asked: list[tuple[list[int], int]] = []

    def answer_one(ids: Any, count: int) -> Any:
        from paceline.bench.answers import Answer

        asked.append((list(ids), count))
        return Answer(tuple(range(count)), 0.5)

    measured = OneAtATime("x", answer_one).answer(PROMPTS, PARAMS)
    assert asked == [(PROMPTS[0], 12), (PROMPTS[1], 7)]
    assert measured.num_tokens == 19
