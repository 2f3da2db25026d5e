"""The real 135M model, as a user gets it: its ids are transformers', and speculation changes none of them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matrix import PARAMS, run_matrix, uncovered_positions
from prompts import LONG, SHORT
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.core.params import SamplingParams
from paceline.decode import decode
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.none import NoDrafter
from paceline.models.decoder import Segment
from paceline.models.gguf import open_gguf
from paceline.models.load import LoadedModel, load_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def bf16(smollm2_gguf: Path) -> LoadedModel:
    return load_model("smollm2-135m", dtype="bf16")


@pytest.fixture(scope="module", params=["bf16", "auto"])
def target(smollm2_gguf: Path, request: pytest.FixtureRequest) -> LoadedModel:
    """In bf16, and as it comes: its matrices as the file holds them, where there are operators for that."""
    return load_model("smollm2-135m", dtype=request.param)


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Iterator[torch.nn.Module]:
    """transformers' Llama with the file's weights in fp32, its hyper-parameters written down from the model card."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    weights = dict(open_gguf(smollm2_gguf).weights(torch.float32))
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert not [name for name, p in model.named_parameters() if p.is_meta]
    yield model.eval()


def chat(model: LoadedModel, text: str) -> list[int]:
    assert model.tokenizer is not None
    return model.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def test_fp32_logits_and_greedy_ids_equal_transformers(reference: torch.nn.Module, smollm2_gguf: Path) -> None:
    model = load_model("smollm2-135m", dtype="fp32")
    prompt = chat(model, SHORT[0])
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
        ids = reference.generate(torch.tensor([prompt]), max_new_tokens=32, min_new_tokens=32, do_sample=False)
    out = model.decoder.forward([Segment(model.decoder.new_pool(1024).new_sequence(), prompt)])
    assert (model.decoder.logits(out.hidden) - expected).abs().max().item() <= 5e-4
    params = SamplingParams(temperature=0, max_tokens=32, min_tokens=32)
    steps = decode(model.decoder, prompt, params, NgramDrafter(), 4, eos_token_ids=[0, 2])
    assert [token for step in steps for token in step.token_ids] == ids[0, len(prompt) :].tolist()


def test_it_is_exact_bit_for_bit(target: LoadedModel) -> None:
    assert target.exact == "bitwise"


def test_the_reduced_identity_matrix(target: LoadedModel) -> None:
    """`make verify-matrix` runs the whole of it. Here acceptances occur at the first four positions."""
    prompts = [chat(target, text) for text in (LONG[2][-150:], SHORT[5])]
    assert len(prompts[0]) > 64  # the matrix itself has prompts above 700
    bad, good = target.decoder.first_layers(10), target.decoder.first_layers(29)
    drafters = {
        "ngram": NgramDrafter,
        "first 10 layers": lambda: DraftModelDrafter(bad),
        "first 29 layers": lambda: DraftModelDrafter(good),  # its third and fourth tokens are kept, too
    }
    cells = list(run_matrix(target.decoder, prompts, drafters, [1, 5], 16, set()))
    assert len(cells) == len(prompts) * len(PARAMS) * 6
    assert [cell for cell in cells if not cell.identical] == []
    assert not [line for line in uncovered_positions(cells) if "K 1" in line]
    long = [cell for cell in cells if cell.k == 5]
    assert all(sum(cell.accepted_at[position] for cell in long) for position in range(4))


@pytest.mark.parametrize("name", PARAMS)
def test_the_target_as_its_own_drafter_is_accepted_always(bf16: LoadedModel, name: str) -> None:
    prompt = chat(bf16, SHORT[4])
    params = replace(PARAMS[name], max_tokens=25)
    steps = list(decode(bf16.decoder, prompt, params, DraftModelDrafter(bf16.decoder), 4))
    assert len(steps) == 5
    assert all(step.num_accepted_tokens == step.num_draft_tokens == 4 for step in steps)
    plain = decode(bf16.decoder, prompt, params, NoDrafter(), 0)
    assert [t for s in steps for t in s.token_ids] == [t for s in plain for t in s.token_ids]
