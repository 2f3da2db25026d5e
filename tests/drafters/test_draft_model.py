"""The draft model: its cache's arithmetic, batches, vocabularies that differ."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from paceline.core.drafting import DraftSampler
from paceline.core.params import SamplingParams
from paceline.core.path import PathSampler
from paceline.core.rng import CounterNoise, GeneratorDraws
from paceline.core.verify import make_rule
from paceline.decode import decode
from paceline.drafters import draft_model
from paceline.drafters.base import Features
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.draft_model import DraftModelDrafter, first_difference
from paceline.drafters.none import NoDrafter
from paceline.errors import PacelineError
from paceline.models.cache import CacheFull
from paceline.models.decoder import Segment
from paceline.models.load import load_model

GREEDY = SamplingParams(temperature=0, max_tokens=40)
TARGET = tiny.tiny_decoder("llama")


@dataclass
class Request:
    token_ids: list[int]
    request_id: int
    params: SamplingParams = GREEDY
    rule: str = "coupled"

    @property
    def draft_sampler(self) -> DraftSampler:
        path = PathSampler.start(self.params, self.token_ids, 256, CounterNoise(1))
        return make_rule(self.rule).draft_sampler(path, GeneratorDraws(3, stream="draft"))


def greedy(tokens: list[int], count: int) -> list[int]:
    return [t for s in decode(TARGET, tokens, GREEDY, NoDrafter(), 0) for t in s.token_ids][:count]


def test_a_batch_is_drafted_as_each_request_alone() -> None:
    requests = [Request(tiny.prompt(n, seed=n), n) for n in (1, 5, 64, 130, 300)]
    budgets = [4, 1, 0, 6, 3]
    together = DraftModelDrafter(TARGET, 4096).propose(requests, budgets)
    for request, budget, proposal in zip(requests, budgets, together, strict=True):
        assert list(proposal.tokens) == (greedy(request.token_ids, budget) if budget else [])


def test_it_catches_up_after_any_acceptance() -> None:
    """Full, partial, none, and a text that went on without it; drafts are the cold ones every time."""
    drafter = DraftModelDrafter(TARGET, 4096)
    request = Request(tiny.prompt(30), 7)
    prompt = request.token_ids
    drafter.observe(request, prompt[:-1], Features())
    for accepted in (4, 2, 0, 4, 4, 1, 3):
        (proposal,) = drafter.propose([request], [4])
        assert list(proposal.tokens) == greedy(request.token_ids, 4)
        kept = [request.token_ids[-1], *proposal.tokens[:accepted]]
        drafter.observe(request, kept, Features())
        request.token_ids = [*request.token_ids, *proposal.tokens[:accepted], (37 * len(request.token_ids)) % 256]
    for _ in range(3):  # another method drafted these
        drafter.observe(request, [request.token_ids[-1], 9, 8], Features())
        request.token_ids = [*request.token_ids, 9, 8, 7]
    (proposal,) = drafter.propose([request], [4])
    assert list(proposal.tokens) == greedy(request.token_ids, 4)
    drafter.release(request)
    assert drafter.pool.blocks_in_use == 0


def test_a_draft_that_has_no_room_draws_nothing() -> None:
    """What is drawn must be proposed: whether there is room may hang on which tokens were drawn."""

    class Silent(Request):
        draft_sampler = None  # type: ignore[assignment]

    with pytest.raises(CacheFull):
        DraftModelDrafter(TARGET, 64).propose([Silent(tiny.prompt(64), 1)], [3])


def test_snapshots_and_forks_carry_the_cache_along() -> None:
    drafter = DraftModelDrafter(TARGET, 4096)
    request = Request(tiny.prompt(100), 1)
    drafter.propose([request], [3])
    drafter.observe(request, request.token_ids, Features())
    snapshot = drafter.snapshot(request)
    other = Request([*request.token_ids[:80], 5, 6], 2)
    drafter.restore(other, snapshot, 80)
    assert len(drafter._states[2].fed) == 80
    child = Request([*request.token_ids, 11], 3)
    drafter.fork(request, child)
    proposals = drafter.propose([request, other, child], [3, 3, 3])
    for sequence, proposal in zip((request, other, child), proposals, strict=True):
        assert list(proposal.tokens) == greedy(sequence.token_ids, 3)
    for sequence in (request, other, child):
        drafter.release(sequence)
    snapshot.cache.release()
    assert drafter.pool.blocks_in_use == 0


def test_drafts_end_where_the_draft_models_context_does() -> None:
    short = tiny.tiny_decoder("llama", max_position_embeddings=64)
    drafter = DraftModelDrafter(short, 1024)
    requests = [Request(tiny.prompt(n), n) for n in (61, 63, 64, 70)]
    assert [len(p) for p in drafter.propose(requests, [5] * 4)] == [3, 1, 0, 0]


def test_sampled_drafts_carry_the_rows_they_were_drawn_from() -> None:
    params = SamplingParams(temperature=0.7, top_k=5)
    request = Request(tiny.prompt(20), 1, params, rule="standard")
    (proposal,) = DraftModelDrafter(TARGET).propose([request], [3])
    cache = TARGET.new_pool(64).new_sequence()
    out = TARGET.forward([Segment(cache, [*request.token_ids, *proposal.tokens])])
    logits = TARGET.logits(out.hidden[-4:]).double()
    for node, token in enumerate(proposal.tokens):
        row = proposal.draft_row(node - 1)
        top = logits[node].topk(5)
        expected = torch.zeros(256, dtype=torch.float64)
        expected[top.indices] = torch.softmax(top.values / 0.7, -1)
        assert (row - expected).abs().max() < 1e-12
        assert row[token] > 0


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.7, seed=3)], ids=["greedy", "sampled"])
def test_a_draft_that_is_probably_wrong_goes_on_no_further(params: SamplingParams) -> None:
    """It ends after the token with which the product of the likeliest tokens' probabilities falls below the limit."""
    for seed in range(6):
        request = Request(tiny.prompt(30, seed=seed), seed, params)
        (whole,) = DraftModelDrafter(TARGET).propose([request], [8])
        cache = TARGET.new_pool(64).new_sequence()
        out = TARGET.forward([Segment(cache, [*request.token_ids, *whole.tokens])])
        rows = TARGET.logits(out.hidden[-9:-1]).double().softmax(-1).amax(-1)  # of the tokens that were drawn
        chances = rows.cumprod(0).tolist()
        assert len(whole) == 8
        for least in (0.0, chances[2] + 1e-6, chances[2] - 1e-6, chances[0] + 1e-6, 1.0):
            (draft,) = DraftModelDrafter(TARGET, least_chance=least).propose([request], [8])
            kept = next((i + 1 for i, chance in enumerate(chances) if chance < least), 8)
            assert draft.tokens == whole.tokens[:kept]


def test_the_limit_is_configured(tmp_path: Path) -> None:
    model = tiny.hf_model(tiny.hf_config("llama"))
    model.save_pretrained(tmp_path)
    target = load_model(str(tmp_path), dtype="fp32")
    for threshold, least in ((None, 0.5), (0.0, 0.0), (0.8, 0.8)):
        config = SpeculativeConfig("draft_model", model=str(tmp_path), draft_confidence_threshold=threshold)
        assert draft_model.create(config, target).least_chance == least  # type: ignore[attr-defined]


@pytest.mark.parametrize(("target_vocab", "draft_vocab"), [(256, 320), (320, 256)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabularies_of_another_size_work(target_vocab: int, draft_vocab: int, temperature: float) -> None:
    """The draft's padding rows are biased to be its arg-max: no id that the target lacks may reach the target."""
    target = tiny.tiny_decoder("qwen2", vocab_size=target_vocab)
    draft = tiny.tiny_decoder("qwen2", vocab_size=draft_vocab, seed=0)
    draft.head.weight[250:] *= 50
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=30)
    expected = [t for s in decode(target, tiny.prompt(20), params, NoDrafter(), 0) for t in s.token_ids]
    steps = list(decode(target, tiny.prompt(20), params, DraftModelDrafter(draft), 4))
    assert [t for s in steps for t in s.token_ids] == expected
    assert sum(s.num_draft_tokens for s in steps) > 0


@pytest.mark.parametrize("rule", ["coupled", "standard"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reduced_draft_vocabulary_changes_no_token(rule: str, temperature: float) -> None:
    """Nothing beyond it is drafted; what the draft drew from says so, and what comes out is plain decoding's."""
    drafter = DraftModelDrafter(TARGET.with_vocabulary(100))
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=30)
    request = Request(tiny.prompt(20), 1, params, rule)
    for length in range(10, 20):
        request.token_ids = tiny.prompt(length)
        (proposal,) = drafter.propose([request], [4])
        assert len(proposal) == 4 and max(proposal.tokens) < 100
        row = proposal.draft_row(-1)
        if row is not None:
            assert len(row) == 256 and row[100:].sum() == 0
            full = torch.softmax(
                TARGET.logits(
                    TARGET.forward([Segment(TARGET.new_pool(64).new_sequence(), request.token_ids)]).hidden[-1:]
                )[0].double(),
                -1,
            )
            assert (row[:100] - full[:100] / full[:100].sum()).abs().max() < 1e-6
    drafter.release(request)
    if rule == "coupled" or temperature == 0:
        expected = [t for s in decode(TARGET, tiny.prompt(20), params, NoDrafter(), 0) for t in s.token_ids]
        steps = list(decode(TARGET, tiny.prompt(20), params, drafter, 4, rule=make_rule(rule)))
        assert [t for s in steps for t in s.token_ids] == expected
    assert drafter.pool.blocks_in_use == 0


def test_the_output_layer_itself_is_smaller() -> None:
    reduced = TARGET.with_vocabulary(100)
    assert reduced.head.weight.shape[0] == 100
    assert TARGET.head.weight.shape[0] == 256
    assert reduced.head.weight.data_ptr() == TARGET.head.weight.data_ptr()


def vocabulary(**changes: int) -> "FakeTokenizer":
    strings = [f"t{i}" for i in range(10)]
    for name, index in changes.items():
        strings[index] = name
    return FakeTokenizer(strings)


class FakeTokenizer:
    def __init__(self, strings: list[str]) -> None:
        self.strings = strings
        Backend(models.WordLevel({s: i for i, s in enumerate(strings)}, unk_token=strings[0]))

    def token_strings(self) -> list[str]:
        return self.strings


def test_the_first_token_that_differs_is_named() -> None:
    same = vocabulary()
    assert first_difference(same, vocabulary()) is None  # type: ignore[arg-type]
    swapped = vocabulary(a=3, b=4)
    assert first_difference(same, swapped) == "token 3 is 't3' in the target and 'a' in the draft model"  # type: ignore[arg-type]
    longer = FakeTokenizer([*vocabulary().strings, "<extra>"])
    assert first_difference(same, longer) == "token 10 ('<extra>') is known to the draft model alone"  # type: ignore[arg-type]
    assert first_difference(longer, same) == "token 10 ('<extra>') is known to the target alone"  # type: ignore[arg-type]


def test_a_draft_model_with_another_tokenizer_is_refused_before_its_weights_are_read(monkeypatch) -> None:
    target = SimpleNamespace(
        name="big", precision="fp32", tokenizer=vocabulary(a=0, b=1), decoder=SimpleNamespace(device="cpu")
    )

    def load(name, dtype, device, accept):
        accept(None)  # a model without a tokenizer may draft
        accept(vocabulary(a=0, b=1))
        accept(vocabulary(a=0, c=1))
        pytest.fail("weights were read")

    monkeypatch.setattr(draft_model, "load_model", load)
    with pytest.raises(PacelineError, match=r"draft model small has another tokenizer than the target big: token 1 is"):
        draft_model.create(SpeculativeConfig("draft_model", model="small"), target)


def test_more_draft_tokens_than_the_draft_model_has_are_refused(tiny_llama_dir: Path) -> None:
    target = load_model(str(tiny_llama_dir), dtype="fp32")
    size = target.config.vocab_size
    draft_model.create(SpeculativeConfig("draft_model", model=str(tiny_llama_dir), draft_vocab_size=size), target)
    with pytest.raises(
        PacelineError, match=f"draft_vocab_size is {size + 1}, and the draft model .* has {size} tokens"
    ):
        draft_model.create(
            SpeculativeConfig("draft_model", model=str(tiny_llama_dir), draft_vocab_size=size + 1), target
        )
