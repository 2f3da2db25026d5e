"""Not one token changes with heads whose trees are dynamic; chains and static trees are the contract tests'.

The vocabulary is so small that random heads' trees are right now and then, and every acceptance occurs.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tiny
import torch
from drafters import head_files
from engine.running import make_engine, plain, run
from transformers import AutoModelForCausalLM

from paceline.core.params import SamplingParams
from paceline.core.tree_shapes import EAGLE_TREE, MEDUSA_TREE, DynamicTree, TreeShape
from paceline.core.verify import Typical, make_rule
from paceline.decode import decode
from paceline.drafters.base import Drafter
from paceline.drafters.eagle import EagleDrafter
from paceline.drafters.medusa import MedusaDrafter
from paceline.engine.engine import RequestOptions
from paceline.engine.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.eagle_checkpoint import load_eagle, load_eagle3
from paceline.models.head_checkpoint import load_medusa
from paceline.models.heads import Eagle3Head, EagleHead, MedusaHeads

VOCAB, NUM_LAYERS, BUDGET = 16, 5, 12
CONFIGS = {
    "llama": tiny.hf_config("llama", vocab_size=VOCAB, num_hidden_layers=NUM_LAYERS),
    "qwen3": tiny.hf_config("qwen3", vocab_size=VOCAB, num_hidden_layers=NUM_LAYERS),
}
MODELS = {family: tiny.hf_model(config, dtype=torch.float32) for family, config in CONFIGS.items()}
TARGETS = {family: tiny.decoder_of(model, torch.float32) for family, model in MODELS.items()}

Build = Callable[[str, Path], Drafter]


def matrices(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    model = MODELS[family]
    embed, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return embed.detach().double(), output.detach().double()


def medusa(tree: TreeShape) -> Build:
    def build(family: str, folder: Path) -> Drafter:
        path = head_files.medusa(matrices(family)[1], "original", own_output=False).write(folder)
        return MedusaDrafter(load_medusa(str(path), TARGETS[family]), tree)

    return build


def eagle(tree: TreeShape) -> Build:
    def build(family: str, folder: Path) -> Drafter:
        path = head_files.eagle(*matrices(family)).write(folder)
        return EagleDrafter("eagle", load_eagle(str(path), TARGETS[family]), tree, 4096)

    return build


def eagle3(tree: TreeShape) -> Build:
    def build(family: str, folder: Path) -> Drafter:
        path = head_files.eagle3_speculators(matrices(family)[0], draft_vocab=14, fc_norm=True).write(folder)
        return EagleDrafter("eagle3", load_eagle3(str(path), TARGETS[family]), tree, 4096)

    return build


DYNAMIC = DynamicTree(4, 5, unpruned=EAGLE_TREE)
BUILDS: dict[str, Build] = {
    "medusa, dynamic": medusa(DynamicTree(4, 4, unpruned=MEDUSA_TREE)),
    "eagle, dynamic": eagle(DYNAMIC),
    "eagle3, dynamic": eagle3(DYNAMIC),
}


@pytest.fixture(params=BUILDS.values(), ids=BUILDS)
def build(request: pytest.FixtureRequest) -> Build:
    built: Build = request.param
    return built


@pytest.fixture(params=TARGETS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def in_use(drafter: Drafter) -> int:
    if isinstance(drafter, MedusaDrafter):
        return len(drafter._seen)
    assert isinstance(drafter, EagleDrafter)
    return drafter.pool.blocks_in_use + len(drafter._states)


def expected(family: str, length: int, params: SamplingParams) -> list[int]:
    return _expected(family, length, params is GREEDY)


@cache
def _expected(family: str, length: int, greedy: bool) -> list[int]:
    return plain(TARGETS[family], prompt_of(length), GREEDY if greedy else SEEDED)


def prompt_of(length: int) -> list[int]:
    return tiny.prompt(length, seed=length, vocab_size=VOCAB)


GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=24)


def test_the_loop(build: Build, family: str, tmp_path: Path) -> None:
    target, drafter = TARGETS[family], build(family, tmp_path)
    accepted: set[int] = set()
    for params, length in ((GREEDY, 1), (SEEDED, 62)):
        steps = list(decode(target, prompt_of(length), params, drafter, BUDGET, prefill_rows=40))
        assert [t for step in steps for t in step.token_ids] == expected(family, length, params)
        accepted |= {step.num_accepted_tokens for step in steps}
    assert {0, 1} <= accepted
    assert in_use(drafter) == 0


def test_the_engine_with_three_requests(build: Build, tmp_path: Path) -> None:
    """Unequal acceptance, put-back for want of blocks, two choices, one request without speculation."""
    family = "qwen3" if build is BUILDS["eagle3, dynamic"] else "llama"
    target, drafter = TARGETS[family], build(family, tmp_path)
    engine = make_engine(target, {"m": drafter}, num_draft_tokens=BUDGET, num_kv_blocks=5, max_num_seqs=3)
    asked = {}
    for number, length in enumerate((60, 61, 62, 120)):
        params = SEEDED if number % 2 else GREEDY
        asked[engine.add_request(prompt_of(length), params, RequestOptions(speculative=number != 2))] = length, params
    forked = engine.add_request(prompt_of(70), replace(SEEDED, n=2))
    result = run(engine)
    for request_id, (length, params) in asked.items():
        assert result.ids(request_id) == expected(family, length, params)
    assert result.ids(forked, 0) == expected(family, 70, SEEDED) != result.ids(forked, 1)
    metrics = [output.metrics for output in result.outputs.values()]
    assert sum(m.speculation.num_accepted_tokens for m in metrics) > 0 and sum(m.num_put_back for m in metrics) > 0
    assert not engine.speculation.faults and in_use(drafter) == 0


@pytest.mark.parametrize("rule", ["standard", "typical"])
def test_other_rules_take_the_trees(build: Build, rule: str, tmp_path: Path) -> None:
    """`standard` gets sampled trees whole, even from a dynamic shape."""
    target, drafter = TARGETS["llama"], build("llama", tmp_path)
    steps = list(decode(target, prompt_of(30), SEEDED, drafter, BUDGET, rule=make_rule(rule)))
    assert sum(len(step.token_ids) for step in steps) == SEEDED.max_tokens
    assert sum(step.num_accepted_tokens for step in steps) > 0


def test_typical_marks_its_outputs(tmp_path: Path) -> None:
    drafter = medusa(MEDUSA_TREE)("llama", tmp_path)
    engine = make_engine(TARGETS["llama"], {"medusa": drafter}, num_draft_tokens=BUDGET)
    loose = engine.add_request(prompt_of(30), SEEDED, RequestOptions(rule=Typical(epsilon=0.01, delta=0.01)))
    exact = engine.add_request(prompt_of(30), SEEDED)
    result = run(engine)
    assert not result.outputs[loose].lossless and result.outputs[exact].lossless
    accepted = {i: result.outputs[i].metrics.speculation.num_accepted_tokens for i in (loose, exact)}
    assert accepted[loose] > accepted[exact]


def test_a_target_of_another_precision(tmp_path: Path) -> None:
    """bf16: the head runs in it, too."""
    model = tiny.hf_model(CONFIGS["llama"], dtype=torch.float32)
    target: Decoder = tiny.decoder_of(model, torch.bfloat16)
    head = head_files.eagle3_speculators(matrices("llama")[0], draft_vocab=14)
    drafter = EagleDrafter("eagle3", load_eagle3(str(head.write(tmp_path)), target), DYNAMIC)
    for params in (GREEDY, SEEDED):
        steps = list(decode(target, prompt_of(40), params, drafter, BUDGET))
        assert [t for step in steps for t in step.token_ids] == plain(target, prompt_of(40), params)


@pytest.mark.parametrize("name", ["eagle, dynamic", "eagle3, dynamic"])
def test_a_full_cache_means_no_draft(name: str, tmp_path: Path) -> None:
    """Four blocks for three texts of two blocks each: who finds no room goes on without a draft, by no fault."""
    drafter = BUILDS[name]("llama", tmp_path)
    assert isinstance(drafter, EagleDrafter)
    drafter.pool = drafter.head.layer.new_pool(4 * 64)
    engine = make_engine(TARGETS["llama"], {"m": drafter}, num_draft_tokens=BUDGET, prefix_cache_blocks=4)
    asked = {engine.add_request(prompt_of(length), SEEDED): length for length in (60, 61, 62)}
    result = run(engine)
    assert {i: result.ids(i) for i in asked} == {i: expected("llama", length, SEEDED) for i, length in asked.items()}
    assert sum(output.metrics.speculation.num_draft_tokens for output in result.outputs.values()) > 0
    engine.reset_prefix_cache()
    assert not engine.speculation.faults and in_use(drafter) == 0


@pytest.mark.parametrize("name", [*BUILDS])
def test_asked_again_after_an_exception_it_drafts_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, twin = (BUILDS[name]("llama", tmp_path) for _ in range(2))
    calls = itertools.count()

    def stumbling(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*arguments: object) -> torch.Tensor:
            if next(calls) % 11 == 3:  # more than a draft takes
                raise RuntimeError("stumbled")
            return method(*arguments)

        return call

    for kind in (MedusaHeads, EagleHead, Eagle3Head):
        monkeypatch.setattr(kind, "logits", stumbling(kind.logits))
    engine = make_engine(TARGETS["llama"], {"m": Persistent(drafter)}, num_draft_tokens=BUDGET)
    number = engine.add_request(prompt_of(66), SEEDED)
    result = run(engine)
    monkeypatch.undo()
    undisturbed = make_engine(TARGETS["llama"], {"m": twin}, num_draft_tokens=BUDGET)
    other = undisturbed.add_request(prompt_of(66), SEEDED)
    assert result.ids(number) == expected("llama", 66, SEEDED)
    assert next(calls) > 5
    assert result.outputs[number].metrics.speculation == run(undisturbed).outputs[other].metrics.speculation
    assert in_use(drafter) == 0


class Persistent:
    """Asks a drafter that has raised once more."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name, self.needs = inner, inner.name, inner.needs

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def propose(self, sequences: list, budgets: list) -> list:
        try:
            return self.inner.propose(sequences, budgets)
        except RuntimeError:
            return self.inner.propose(sequences, budgets)


def test_a_head_is_named_as_in_vllm(tiny_llama_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float64)
    embed, output = (m.weight.detach() for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    heads = {
        "medusa": head_files.medusa(output, "vllm"),
        "eagle": head_files.eagle(embed, output),
        "eagle3": head_files.eagle3_specforge(embed),
    }
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12)
    plainly = LLM(str(tiny_llama_dir), dtype="fp32").generate("hello", params)
    for method, head in heads.items():
        config: dict[str, object] = {"method": method, "model": str(head.write(tmp_path / method))}
        if method == "eagle3":
            config |= {"num_speculative_tokens": 8, "speculative_token_tree": "dynamic", "aux_hidden_layers": [0, 1, 2]}
        answer = LLM(str(tiny_llama_dir), config, dtype="fp32").generate("hello", params)
        assert answer[0].outputs[0].token_ids == plainly[0].outputs[0].token_ids
        assert answer[0].metrics.speculation.num_draft_tokens > 0
    config = {"methods": ["suffix", {"method": "eagle", "model": str(tmp_path / "eagle")}]}
    answer = LLM(str(tiny_llama_dir), config, dtype="fp32").generate("hello", params)
    assert answer[0].outputs[0].token_ids == plainly[0].outputs[0].token_ids
    assert answer[0].metrics.speculation.num_draft_tokens > 0
