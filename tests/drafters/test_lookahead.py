"""Lookahead: the window is a Jacobi iteration, its n-grams are the target's own, nothing outlives the request."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import tiny
import torch
from drafters.against_plain import GREEDY, PROMPT, SEEDED, check_identity, mild, plain, tokens_of
from engine.running import make_engine, run

from paceline.core.proposal import Proposal
from paceline.core.tree import ROOT
from paceline.decode import decode
from paceline.drafters.base import Features, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.lookahead import LookaheadDrafter, Shape
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder


@pytest.fixture(scope="module")
def target() -> Decoder:
    return mild("mistral")


@pytest.mark.parametrize(
    ("family", "shape", "k"),
    [("llama", Shape(5, 5, 3), 31), ("mistral", Shape(3, 3, 2), 4)],
)
def test_no_token_changes(family: str, shape: Shape, k: int) -> None:
    drafter = LookaheadDrafter(shape)
    check_identity(mild(family), drafter, k)
    assert not drafter._states


def test_guesses_are_accepted_and_refused() -> None:
    """An answer that falls into a cycle."""
    target = looping()
    steps = list(decode(target, PROMPT, replace(GREEDY, max_tokens=80), LookaheadDrafter(Shape(5, 5, 3)), 31))
    assert len(steps) < 45, [step.num_accepted_tokens for step in steps]
    assert {step.num_accepted_tokens for step in steps} >= {0, 4}


def looping() -> Decoder:
    """Looks at hardly more than the last token."""
    target = tiny.tiny_decoder("llama", dtype=torch.bfloat16)
    for layer in target.layers:
        layer.output.weight *= 0.002
    return target


# The window


@dataclass
class Text:
    token_ids: list[int]
    request_id: int = 1
    told: list[int] = field(default_factory=list)


def after(path: Sequence[int]) -> int:
    """A target: its arg-max after a path, by its last two tokens."""
    return (31 * path[-1] + 7 * path[-2] + 3) % 50


def step(drafter: LookaheadDrafter, text: Text, budget: int) -> Proposal:
    """One greedy pass over a proposal."""
    (proposal,) = drafter.propose([text], [budget])  # type: ignore[list-item]
    assert len(proposal) <= budget
    tokens, node = [text.token_ids[-1]], ROOT
    while True:
        token = after([*text.token_ids, *tokens[1:]])
        child = proposal.child_with(node, token)
        if child is None:
            break
        tokens.append(token)
        node = child
    scratch = [after([*text.token_ids, *proposal.path_tokens(n)]) for n in range(proposal.num_verified, len(proposal))]
    drafter.observe(text, tokens, Features(scratch_argmax=torch.tensor(scratch, dtype=torch.int64)))  # type: ignore[arg-type]
    text.token_ids = [*text.token_ids, *tokens[1:], token]
    return proposal


def test_the_window_hangs_as_the_paper_draws_it() -> None:
    drafter = LookaheadDrafter(Shape(window=3, ngram=4, guesses=2))
    proposal = step(drafter, Text([10, 11, 12, 13, 14, 15]), 20)
    assert proposal.num_verified == 0
    #   row 0: root 0 1      row 1: 2 3 4      row 2: 5 6 7
    assert proposal.parents == (ROOT, 0, ROOT, 0, 1, 2, 3, 4)
    assert proposal.tokens == (11, 12, 11, 12, 13, 12, 13, 14)  # a stretch of the text, row by row one further on


def test_every_ngram_is_the_targets_own_or_the_texts() -> None:
    drafter = LookaheadDrafter(Shape(4, 4, 50))
    text = Text([3, 1, 4, 1, 5, 9, 2, 6])
    for _ in range(12):
        proposal = step(drafter, text, 100)
        assert proposal.num_scratch == 4 * 3 - 1
    pool = drafter._states[1].pool
    texts_own = {tuple(text.token_ids[i : i + 4]) for i in range(len(text.token_ids) - 3)}
    foreseen = 0
    for first in range(50):
        for rest in pool.after(first):
            ngram = (first, *rest)
            if ngram in texts_own:
                continue
            foreseen += 1
            assert ngram[3] == after(ngram[:3])  # its last token is the target's arg-max after the others
    assert foreseen > 10


@pytest.mark.parametrize("moved", [1, 2, 3, 7])
@pytest.mark.parametrize("ran", [0, 3, 6])
def test_columns_move_on_with_the_text(ran: int, moved: int) -> None:
    """The token of row r and column i stands r + i after the last one, however many tokens were kept meanwhile."""
    drafter, text = LookaheadDrafter(Shape(6, 4, 8)), Text([0] * 9)
    drafter.propose([text], [100])  # type: ignore[list-item]
    state = drafter._states[1]
    state.columns = [[100 + row + i for row in range(3)] for i in range(6)]  # a token that tells its place
    state.in_flight = ran
    scratch = torch.tensor([0, 0, 0, *(103 + i for i in range(ran))][: 99 if ran else 0], dtype=torch.int64)
    drafter.observe(text, [100, *range(moved - 1)], Features(scratch_argmax=scratch))  # type: ignore[arg-type]
    left = max(ran - (moved - 1), 0) if ran else max(6 - moved, 0)
    assert state.columns == [[100 + moved + row + i for row in range(3)] for i in range(left)]


def test_the_first_columns_ngram_begins_with_the_token_that_the_text_took() -> None:
    """What the window had guessed there was not fed: the text's last token stood in its place."""
    drafter, text = LookaheadDrafter(Shape(2, 4, 8)), Text([0] * 9)
    drafter.propose([text], [100])  # type: ignore[list-item]
    state = drafter._states[1]
    state.columns, state.in_flight = [[66, 101, 102], [101, 102, 103]], 2
    drafter.observe(text, [100], Features(scratch_argmax=torch.tensor([103, 104])))  # type: ignore[arg-type]
    assert state.pool.after(100) == [(101, 102, 103)]
    assert state.pool.after(101) == [(102, 103, 104)]
    assert not state.pool.after(66)


def test_the_true_future_is_foreseen() -> None:
    """Jacobi's fixed point: a window of right tokens yields right n-grams, and they are accepted."""
    accepted = []
    drafter, text = LookaheadDrafter(Shape(8, 4, 8)), Text([3, 1, 4, 1, 5, 9, 2, 6])
    for _ in range(30):
        before = len(text.token_ids)
        step(drafter, text, 100)
        accepted.append(len(text.token_ids) - before - 1)
    assert sum(accepted) >= 8
    seen = text.token_ids
    assert all(seen[i] == after(seen[:i]) for i in range(8, len(seen)))


@pytest.mark.parametrize("budget", range(40))
def test_the_budget_is_kept_and_used(budget: int) -> None:
    drafter, text = LookaheadDrafter(Shape(4, 4, 5)), Text([1, 2, 3, 4] * 6)
    sizes = []
    for _ in range(8):
        proposal = step(drafter, text, budget)
        sizes.append(len(proposal))
        assert proposal.num_verified <= 15 and proposal.num_scratch <= 11
    if budget >= 2:
        assert max(sizes) > 0
    state = drafter._states[1]
    assert all(len(column) == 3 for column in state.columns)


def test_guesses_that_begin_alike_share_nodes_and_the_newest_come_first() -> None:
    drafter = LookaheadDrafter(Shape(1, 4, 3))
    text = Text([9, 1, 2, 3, 9, 1, 2, 4, 9, 5, 6, 7, 9, 8, 8, 8, 9])
    (proposal,) = drafter.propose([text], [9])  # type: ignore[list-item]
    # the window of one column takes two nodes; of the four n-grams after 9 the oldest is out
    assert proposal.num_scratch == 2
    assert proposal.tokens[:7] == (8, 8, 8, 5, 6, 7, 1)
    assert proposal.parents[:7] == (ROOT, 0, 1, ROOT, 3, 4, ROOT)
    text = Text([9, 1, 2, 3, 9, 1, 2, 4, 9], request_id=2)
    (proposal,) = drafter.propose([text], [9])  # type: ignore[list-item]
    assert proposal.tokens[: proposal.num_verified] == (1, 2, 4, 3)
    assert proposal.parents[: proposal.num_verified] == (ROOT, 0, 1, 1)


# From one request to the next


def test_no_request_knows_another(target: Decoder) -> None:
    drafter = LookaheadDrafter(Shape(4, 4, 4))
    alone = [list(decode(target, prompt, SEEDED, drafter, 30)) for prompt in (PROMPT, tiny.prompt(30))]
    again = [list(decode(target, prompt, SEEDED, drafter, 30)) for prompt in (PROMPT, tiny.prompt(30))]
    assert alone == again
    assert not drafter._states
    engine = make_engine(target, {"it": drafter}, num_draft_tokens=30)
    numbers = [engine.add_request(prompt, SEEDED) for prompt in (PROMPT, tiny.prompt(30))]
    result = run(engine)
    for number, steps in zip(numbers, alone, strict=True):
        assert result.ids(number) == tokens_of(steps)
        statistics = result.outputs[number].metrics.speculation
        assert statistics.num_steps == len(steps)
        # what can be accepted counts as drafted: of 30 nodes, the guesses' 12 at most
        assert statistics.num_draft_tokens == sum(step.num_draft_tokens for step in steps)
        assert 0 < max(step.num_draft_tokens for step in steps) <= 12
    assert not drafter._states


def test_a_put_back_request_begins_again(target: Decoder) -> None:
    engine = make_engine(target, {"it": LookaheadDrafter(Shape(4, 4, 4))}, num_draft_tokens=30, num_kv_blocks=5)
    prompts = [tiny.prompt(50, seed=n) for n in range(4)]
    params = replace(SEEDED, max_tokens=40)
    numbers = [engine.add_request(prompt, params) for prompt in prompts]
    result = run(engine)
    assert sum(output.metrics.num_put_back for output in result.outputs.values()) > 0
    assert [result.ids(number) for number in numbers] == [plain(target, prompt, params) for prompt in prompts]
    assert not engine.speculation.faults


def test_configured_as_asked() -> None:
    config = SpeculativeConfig.from_dict({"method": "lookahead"})
    assert config.num_speculative_tokens == 31
    drafter = create_drafter(config, None)  # type: ignore[arg-type]
    assert drafter.shape == Shape(5, 5, 3)  # type: ignore[attr-defined]
    config = SpeculativeConfig.from_dict({"method": "lookahead", "max_window_size": 2, "lookahead_ngram": 3})
    assert config.num_speculative_tokens == 9
    with pytest.raises(PacelineError, match="lookahead_ngram is 2; it must be a whole number from 3"):
        SpeculativeConfig.from_dict({"method": "lookahead", "lookahead_ngram": 2})
