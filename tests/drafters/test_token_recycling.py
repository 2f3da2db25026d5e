"""Token recycling: what the target thought likely comes back as a tree."""

import itertools
from dataclasses import dataclass, replace

import pytest
import tiny
import torch
from drafters.against_plain import GREEDY, PROMPT, plain
from drafters.test_lookahead import looping
from engine.running import make_engine, run

from paceline.core.tree import ROOT, depths
from paceline.decode import decode
from paceline.drafters.base import Features, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.token_recycling import RANKS, TokenRecyclingDrafter, shape


@dataclass
class Text:
    token_ids: list[int]
    request_id: int = 1


def test_drafts_are_accepted_to_different_lengths() -> None:
    steps = list(decode(looping(), PROMPT, replace(GREEDY, max_tokens=80), TokenRecyclingDrafter(), 24))
    assert {step.num_accepted_tokens for step in steps} >= {0, 2, 4}


def test_no_request_knows_another() -> None:
    target, drafter = looping(), TokenRecyclingDrafter()
    alone = [list(decode(target, PROMPT, GREEDY, drafter, 24)) for _ in range(2)]
    assert alone[0] == alone[1]
    engine = make_engine(target, {"it": drafter}, num_draft_tokens=24, prefix_cache_blocks=20)
    for _ in range(2):
        numbers = [engine.add_request(prompt, GREEDY) for prompt in (PROMPT, tiny.prompt(70), PROMPT)]
        result = run(engine)
        assert result.ids(numbers[1]) == plain(target, tiny.prompt(70), GREEDY)
        for number in (numbers[0], numbers[2]):
            assert result.outputs[number].metrics.speculation.num_steps == len(alone[0])
    assert not drafter._states


def test_the_tree_is_filled_from_what_was_seen_last() -> None:
    drafter = TokenRecyclingDrafter(3)
    text = Text([1, 2, 1, 3])
    drafter.observe(text, [1, 2, 1], Features())  # type: ignore[arg-type]
    drafter.observe(text, [3], Features(top_tokens=torch.tensor([[2, 1, 7]])))  # type: ignore[arg-type]
    text.token_ids.append(2)
    (proposal,) = drafter.propose([text], [40])  # type: ignore[list-item]
    paths = {proposal.path_tokens(node) for node in range(len(proposal))}
    assert paths >= {(1,), (1, 3), (1, 2), (1, 3, 2), (1, 3, 1), (1, 3, 7), (1, 2, 1)}
    assert (2,) not in paths  # nothing but 1 has ever followed 2
    drafter.observe(text, [2], Features(top_tokens=torch.tensor([[9, 1, 8]])))  # type: ignore[arg-type]
    text.token_ids = [*text.token_ids[:-1], 2, 1, 2]
    (proposal,) = drafter.propose([text], [40])  # type: ignore[list-item]
    assert [proposal.tokens[node] for node in proposal.children(ROOT)] == [1, 9, 8]


@pytest.mark.parametrize("width", [1, 3, 8, 12])
def test_the_shape_is_the_best_of_its_size(width: int) -> None:
    for size in (0, 1, 2, 7, 24, 60):
        places = shape(size, width)
        parents = [place.parent for place in places]
        assert len(places) == size
        assert list(depths(parents)) == sorted(depths(parents))
        assert len(set(places)) == size
        assert all(
            place.rank == 0 or (place.parent, place.rank - 1) in {(p.parent, p.rank) for p in places}
            for place in places
        )


def test_the_shape_equals_an_exhaustive_search() -> None:
    """All nodes down to depth 7, the likeliest first."""
    values = sorted(
        (
            -torch.tensor([RANKS[rank] for rank in path], dtype=torch.float64).prod().item()
            for depth in range(1, 8)
            for path in itertools.product(range(4), repeat=depth)
        ),
    )
    for size in (1, 5, 9):
        reach: list[float] = []
        for place in shape(size, 4):
            reach.append((1.0 if place.parent == ROOT else reach[place.parent]) * RANKS[place.rank])
        assert sum(reach) == pytest.approx(-sum(values[:size]))


def test_more_successors_than_there_are_tokens() -> None:
    target, prompt = tiny.tiny_decoder("llama", vocab_size=16), tiny.prompt(20, vocab_size=16)
    steps = list(decode(target, prompt, GREEDY, TokenRecyclingDrafter(40), 24))
    assert [token for step in steps for token in step.token_ids] == plain(target, prompt, GREEDY)
    assert any(step.num_accepted_tokens for step in steps)


def test_configured_as_asked() -> None:
    config = SpeculativeConfig.from_dict({"method": "token_recycling", "recycled_successors": 4})
    assert config.num_speculative_tokens == 24
    assert create_drafter(config, None).needs.top_tokens == 4  # type: ignore[arg-type]
