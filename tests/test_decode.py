"""The loop: whatever is drafted, the tokens are plain decoding's."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import tiny
import torch
from drafters.scripted import Script, ScriptedDrafter, bush, garbage, oracle

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.core.sampling import BadLogitsError
from paceline.decode import Step, decode
from paceline.drafters.base import Drafter, Features, SequenceView
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.none import NoDrafter
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder, Segment

VOCAB = 256
PROMPT = tiny.prompt(50, seed=7)
GREEDY = SamplingParams(temperature=0, max_tokens=48)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=48)
FULL = SamplingParams(
    temperature=0.7,
    top_k=40,
    min_p=0.02,
    seed=3,
    max_tokens=48,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias={5: 3.0, 7: -100.0},
    bad_words=((9,), (12, 13)),
    min_tokens=20,
    stop_token_ids=tuple(range(30, 36)),
)


def tokens_of(steps: Iterator[Step] | Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def plain(target: Decoder, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """One row at a time, prompt included."""
    return tokens_of(decode(target, prompt, params, NoDrafter(), 0, prefill_rows=1))


@pytest.fixture(scope="module", params=["llama", "mistral"])
def target(request: pytest.FixtureRequest) -> Decoder:
    return tiny.tiny_decoder(request.param, dtype=torch.bfloat16)


def drafters(target: Decoder, text: list[int]) -> dict[str, Drafter]:
    cycle = itertools.cycle(range(9))
    scripts: dict[str, Script] = {
        "always right": oracle(lambda: 99, VOCAB),
        "always wrong": oracle(lambda: 0, VOCAB),
        "every length": oracle(lambda: next(cycle), VOCAB),
        "garbage trees": garbage(VOCAB),
        "good trees": bush(VOCAB),
    }
    other = tiny.tiny_decoder("llama", seed=1, dtype=torch.bfloat16)
    return {
        "ngram": NgramDrafter(1, 4),
        "itself": DraftModelDrafter(target),
        "a stranger": DraftModelDrafter(other),
        **{name: ScriptedDrafter(text, script) for name, script in scripts.items()},
    }


@pytest.mark.parametrize("params", [GREEDY, SEEDED, FULL], ids=["greedy", "seeded", "every parameter"])
def test_no_token_changes(target: Decoder, params: SamplingParams) -> None:
    expected = plain(target, PROMPT, params)
    assert len(set(expected)) > 10, "an answer that never changes would prove nothing"
    for name, drafter in drafters(target, PROMPT + expected).items():
        for k in (1, 3, 8):
            got = tokens_of(decode(target, PROMPT, params, drafter, k))
            assert got == expected, (name, k)


def test_the_trees_and_the_stranger_are_really_verified(target: Decoder) -> None:
    """Acceptances and rejections both occur, at every position."""
    expected = plain(target, PROMPT, SEEDED)
    all_drafters = drafters(target, PROMPT + expected)
    steps = list(decode(target, PROMPT, SEEDED, all_drafters["good trees"], 12))
    assert {step.num_accepted_tokens for step in steps} >= {0, 1, 2, 3}
    steps = list(decode(target, PROMPT, SEEDED, all_drafters["every length"], 8))
    assert {step.num_accepted_tokens for step in steps} >= set(range(5))
    wrong = list(decode(target, PROMPT, SEEDED, all_drafters["always wrong"], 8))
    assert sum(step.num_accepted_tokens for step in wrong) == 0
    assert len(wrong) == 48


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_target_as_its_own_drafter_is_always_accepted(target: Decoder, params: SamplingParams, k: int) -> None:
    steps = list(decode(target, PROMPT, params, DraftModelDrafter(target), k))
    assert all(step.num_accepted_tokens == step.num_draft_tokens for step in steps[:-1])
    assert len(steps) == -(-48 // (k + 1))


class Overwriting(DraftModelDrafter):
    """Every third round one drafted token is replaced after the fact."""

    def __init__(self, decoder: Decoder, position: int) -> None:
        super().__init__(decoder)
        self.position, self.round, self.spoilt = position, 0, set[int]()

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        (proposal,) = super().propose(sequences, budgets)
        self.round += 1
        if self.round % 3 or self.position >= len(proposal):
            return [proposal]
        self.spoilt.add(self.round - 1)
        tokens = list(proposal.tokens)
        tokens[self.position] = (tokens[self.position] + 1) % VOCAB
        return [Proposal.chain(tokens)]


@pytest.mark.parametrize("position", [0, 1, 3])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_acceptance_is_back_in_the_round_after_a_spoilt_one(
    target: Decoder, params: SamplingParams, position: int
) -> None:
    drafter = Overwriting(target, position)
    steps = list(decode(target, PROMPT, params, drafter, 4))
    assert tokens_of(steps) == plain(target, PROMPT, params)
    assert len(drafter.spoilt) >= 3
    for number, step in enumerate(steps[:-1]):
        assert step.num_accepted_tokens == (position if number in drafter.spoilt else step.num_draft_tokens)


class Pausing(DraftModelDrafter):
    """Sits out most rounds: what it missed is caught up from what it is told and shown."""

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        if len(sequences[0].token_ids) % 7:
            return [Proposal.empty()]
        return super().propose(sequences, budgets)


def test_a_drafter_that_sat_out_is_right_at_once(target: Decoder) -> None:
    steps = list(decode(target, PROMPT, SEEDED, Pausing(target), 3))
    drafted = [step for step in steps[:-1] if step.num_draft_tokens]
    assert len(drafted) >= 5
    assert all(step.num_accepted_tokens == step.num_draft_tokens for step in drafted)


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("name", ["itself", "a stranger", "ngram", "good trees"])
def test_greedy_is_plain_under_the_other_rules_too(target: Decoder, rule: str, name: str) -> None:
    from paceline.core.verify import make_rule

    expected = plain(target, PROMPT, GREEDY)
    drafter = drafters(target, PROMPT + expected)[name]
    if rule == "block" and name == "good trees":
        with pytest.raises(PacelineError, match="takes chains"):
            list(decode(target, PROMPT, GREEDY, drafter, 5, rule=make_rule(rule)))
        return
    assert tokens_of(decode(target, PROMPT, GREEDY, drafter, 5, rule=make_rule(rule))) == expected


# Ends of an answer


def test_max_tokens_is_exact_for_every_block_length(target: Decoder) -> None:
    text = PROMPT + plain(target, PROMPT, GREEDY)
    for limit in range(1, 21):
        for right in range(6):
            drafter = ScriptedDrafter(text, oracle(lambda right=right: right, VOCAB))
            params = SamplingParams(temperature=0, max_tokens=limit)
            steps = list(decode(target, PROMPT, params, drafter, 5))
            assert PROMPT + tokens_of(steps) == text[: len(PROMPT) + limit]
            assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + ["length"]


def test_a_stop_token_ends_the_answer_at_every_position_of_a_block(target: Decoder) -> None:
    answer = plain(target, PROMPT, SEEDED)
    text = PROMPT + answer
    for position in range(20):
        stop = answer[position]
        first = answer.index(stop)
        for drafter in (ScriptedDrafter(text, oracle(lambda: 99, VOCAB)), ScriptedDrafter(text, bush(VOCAB))):
            params = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=48)
            steps = list(decode(target, PROMPT, params, drafter, 8, eos_token_ids=[stop]))
            assert tokens_of(steps) == answer[: first + 1]
            assert steps[-1].finish_reason == "stop"
            assert steps[-1].num_accepted_tokens <= len(steps[-1].token_ids)
            # the drafter was told of all but the newest token, and of nothing behind the stop
            assert drafter.told == [*PROMPT, *answer[:first]]


def test_eos_can_be_ignored_and_min_tokens_bans_it(target: Decoder) -> None:
    answer = plain(target, PROMPT, GREEDY)
    eos = [answer[1]]
    ignoring = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    drafter = ScriptedDrafter(PROMPT + answer, oracle(lambda: 99, VOCAB))
    assert tokens_of(decode(target, PROMPT, ignoring, drafter, 8, eos_token_ids=eos)) == answer
    for minimum in range(1, 11):
        params = SamplingParams(temperature=0, max_tokens=48, min_tokens=minimum)
        expected = tokens_of(decode(target, PROMPT, params, NoDrafter(), 0, eos_token_ids=eos))
        assert eos[0] not in expected[:minimum]
        drafter = ScriptedDrafter(PROMPT + expected, oracle(lambda: 99, VOCAB))
        assert tokens_of(decode(target, PROMPT, params, drafter, 8, eos_token_ids=eos)) == expected


@pytest.mark.parametrize("length", range(59, 64))
def test_the_context_is_filled_to_its_last_position(length: int) -> None:
    target = tiny.tiny_decoder(
        "llama", max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    prompt = tiny.prompt(length)
    for limit in (None, 1000):
        params = SamplingParams(temperature=0, max_tokens=limit)
        for drafter in (DraftModelDrafter(target), NgramDrafter(1, 3)):
            steps = list(decode(target, prompt, params, drafter, 5))
            assert len(tokens_of(steps)) == 64 - length
            assert steps[-1].finish_reason == "length"
    with pytest.raises(PacelineError, match="64 tokens but the context holds 64"):
        list(decode(target, tiny.prompt(64), GREEDY, NoDrafter(), 5))


def test_an_empty_prompt_is_refused(target: Decoder) -> None:
    with pytest.raises(PacelineError, match="prompt is empty"):
        list(decode(target, [], GREEDY, NoDrafter()))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 48])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_prompt_chunks_change_nothing(target: Decoder, length: int, rows: int) -> None:
    prompt = tiny.prompt(length, seed=5)
    params = SamplingParams(temperature=0, max_tokens=12)
    steps = list(decode(target, prompt, params, DraftModelDrafter(target), 4, prefill_rows=rows))
    assert tokens_of(steps) == plain(target, prompt, params)
    assert all(step.num_accepted_tokens == step.num_draft_tokens for step in steps[:-1])


# Faults


def test_a_nan_row_is_that_requests_error() -> None:
    target = tiny.tiny_decoder("llama")
    target.norm = torch.full_like(target.norm, torch.nan)
    with pytest.raises(BadLogitsError, match="position 0"):
        list(decode(target, PROMPT, SEEDED, NgramDrafter(1, 3), 4))


def with_a_poisoned_token(family: str, token: int, dtype: torch.dtype) -> Decoder:
    """Every hidden state, key and value at `token` is NaN; no logit is, as long as nothing sees them."""
    target = tiny.tiny_decoder(family, dtype=dtype, tie_word_embeddings=False)
    target.embedding = target.embedding.clone()
    target.embedding[token] = torch.nan
    return target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_nan_row_of_a_rejected_draft_harms_nobody(family: str, shape: str, dtype: torch.dtype) -> None:
    sound = tiny.tiny_decoder(family, dtype=dtype, tie_word_embeddings=False)
    expected = plain(sound, PROMPT, SEEDED)
    token = next(token for token in range(VOCAB) if token not in PROMPT + expected)

    def script(truth: list[int], budget: int) -> Proposal:
        if shape == "chain":
            return Proposal.chain([*truth[:2], token, token][:budget])
        return Proposal((token, *truth[:1], token, *truth[1:2])[:budget], (-1, -1, 1, 1)[:budget])

    drafter = ScriptedDrafter(PROMPT + expected, script)
    steps = list(decode(with_a_poisoned_token(family, token, dtype), PROMPT, SEEDED, drafter, 4))
    assert tokens_of(steps) == expected
    assert {step.num_accepted_tokens for step in steps[:-2]} == {2}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_nan_row_that_is_seen_is_not_hidden(family: str) -> None:
    """Also as a value alone: keys and scores are sound there."""
    target = with_a_poisoned_token(family, PROMPT[20], torch.float64)
    with pytest.raises(BadLogitsError):
        list(decode(target, PROMPT, SEEDED, NoDrafter(), 0))
    target = tiny.tiny_decoder(family, dtype=torch.float64)
    cache = target.new_pool(128).new_sequence()
    target.forward([Segment(cache, PROMPT)])
    cache.commit(range(len(PROMPT)))
    cache.pool.values[0, cache.blocks[0], :, 45] = torch.nan
    parents = (-1, 0, 0)
    assert target.forward([Segment(cache, (1, 2, 3), parents)]).hidden.isnan().any(-1).all()
    assert target.forward([Segment(cache, (1, 2, 3))]).hidden.isnan().any(-1).all()


def test_nothing_is_asked_after_an_accepted_stop_token(target: Decoder) -> None:
    """Its row may be NaN, or a grammar may be at its end: plain decoding would have finished."""
    expected = plain(target, PROMPT, SEEDED)
    stop = expected[9]
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=48, stop_token_ids=[stop])
    answer = expected[: expected.index(stop) + 1]
    logits = target.logits

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat((logits(hidden[:-1]), torch.full_like(logits(hidden[-1:]), torch.nan)))

    drafter = ScriptedDrafter(PROMPT + answer, oracle(lambda: 99, VOCAB))
    steps, got = decode(target, PROMPT, params, drafter, len(answer)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "logits", spoilt)  # the row after the drafted stop token
        got = tokens_of(steps)
    assert got == answer


def test_what_decode_cannot_do_is_refused(target: Decoder) -> None:
    for arguments, message in (
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"prefill_rows": -1}, "prefill_rows is -1"),
        ({"max_context": 0}, "max_context is 0"),
        ({"max_context": 10**9}, "the model's own is"),
        ({"prompt_ids": [3, VOCAB]}, f"token {VOCAB} and the vocabulary has {VOCAB}"),
        ({"prompt_ids": [-1]}, "token -1"),
        ({"params": SamplingParams(n=2)}, "does not take n"),
        ({"params": SamplingParams(stop="a")}, "does not take stop"),
        ({"params": SamplingParams(logprobs=1)}, "does not take logprobs"),
    ):
        given = {"prompt_ids": PROMPT, "params": GREEDY, **arguments}
        with pytest.raises(PacelineError, match=message):
            next(decode(target, drafter=NoDrafter(), **given))  # type: ignore[arg-type]


@pytest.mark.parametrize("proposal", [Proposal.chain([1, 2, 3, 4]), Proposal.chain([VOCAB])], ids=["long", "foreign"])
def test_a_bad_proposal_is_the_drafters_fault(target: Decoder, proposal: Proposal) -> None:
    with pytest.raises(ValueError, match="drafted"):
        list(decode(target, PROMPT, GREEDY, ScriptedDrafter([], lambda *_: proposal), 3))


def test_a_huge_k_is_no_more_than_the_answer(target: Decoder) -> None:
    steps = list(decode(target, PROMPT, GREEDY, DraftModelDrafter(target), 10**9))
    assert len(steps) == 1 and len(steps[0].token_ids) == 48


@pytest.mark.parametrize("end", ["finished", "closed", "failed"])
def test_nothing_is_left_behind(target: Decoder, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    new_pool: Callable[[int], object] = target.new_pool
    monkeypatch.setattr(target, "new_pool", lambda n: pools.append(new_pool(n)) or pools[-1])
    drafter = DraftModelDrafter(target)
    steps = decode(target, PROMPT, SEEDED, drafter, 4)
    next(steps)
    assert pools[0].blocks_in_use and pools[1].blocks_in_use
    match end:
        case "finished":
            list(steps)
        case "closed":
            steps.close()
        case "failed":
            monkeypatch.setattr(drafter, "propose", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                list(steps)
    assert [pool.blocks_in_use for pool in pools] == [0, 0]
    assert not drafter._states


def test_features_are_those_of_the_observed_tokens(target: Decoder) -> None:
    """Hidden states reach the drafter with the right token beside them, from prompts, chains and trees alike."""
    from paceline.drafters.base import Needs

    answer = plain(target, PROMPT, SEEDED)
    drafter = ScriptedDrafter(PROMPT + answer, bush(VOCAB))
    drafter.needs = Needs(hidden_layers=(0, 1, -1), top_tokens=3)
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: [], -1: []}
    tops: list[torch.Tensor] = []
    observe = drafter.observe

    def recording(sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        observe(sequence, tokens, features)
        for layer, rows in seen.items():
            rows.append(features.hidden[layer])
        if features.top_tokens is not None:
            tops.append(features.top_tokens)

    drafter.observe = recording  # type: ignore[method-assign]
    list(decode(target, PROMPT, SEEDED, drafter, 9, prefill_rows=16))
    told = drafter.told
    out = target.forward([Segment(target.new_pool(512).new_sequence(), told)], taps=(0, 1))
    assert torch.equal(torch.cat(seen[0]), out.taps[0]) and torch.equal(torch.cat(seen[1]), out.taps[1])
    assert torch.equal(torch.cat(seen[-1]), target.final_hidden(out.hidden))
    expected = target.logits(out.hidden)[len(PROMPT) - 1 :].topk(3).indices
    assert torch.equal(torch.cat(tops), expected)
