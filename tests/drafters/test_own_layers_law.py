"""Sampling under `standard` has the target's law, whatever the target's own layers or logits draft.

Chi-square of the first three tokens' joint law against its enumeration, seeds fixed; with other seeds all cases
together would raise a false alarm once in 10⁵ suites.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice

import pytest
import tiny
import torch
from law import CAUGHT, LENGTH, exact_law, p_value

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.core.verify import Standard
from paceline.decode import decode
from paceline.drafters.base import Drafter, SequenceView
from paceline.drafters.early_exit import EarlyExitDrafter
from paceline.drafters.layer_skip import LayerSkipDrafter
from paceline.drafters.lookahead import LookaheadDrafter, Shape
from paceline.drafters.token_recycling import TokenRecyclingDrafter
from paceline.models.decoder import Decoder, Segment

DRAWS, FALSE_ALARM = 400, 1e-5 / 4
PROMPT = (2, 4, 2, 0, 1, 2)


class Target:
    """Two layers, five tokens; its logits one row at a time."""

    def __init__(self) -> None:
        self.decoder = tiny.tiny_decoder(
            "llama",
            dtype=torch.float64,
            vocab_size=5,
            num_hidden_layers=2,
            hidden_size=16,
            intermediate_size=24,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        )
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, context: tuple[int, ...]) -> torch.Tensor:
        if context not in self.known:
            out = self.decoder.forward([Segment(self.decoder.new_pool(64).new_sequence(), context)])
            self.known[context] = self.decoder.logits(out.hidden)[-1]
        return self.known[context]


class WrongRows(LayerSkipDrafter):
    """Announces to have drawn from the flat distribution."""

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        flat = torch.full((5,), 0.2, dtype=torch.float64)
        return [Proposal.chain(p.tokens, [flat] * len(p)) for p in super().propose(sequences, budgets)]


DRAFTERS: dict[str, Callable[[Decoder], Drafter]] = {
    "layer_skip": lambda decoder: LayerSkipDrafter(decoder, [1], [], 0.5),
    "early_exit": lambda decoder: EarlyExitDrafter(decoder, 1, 0.5),
    "lookahead": lambda decoder: LookaheadDrafter(Shape(2, 3, 3)),
    "token_recycling": lambda decoder: TokenRecyclingDrafter(3),
}


def p_of(make: Callable[[Decoder], Drafter]) -> float:
    target, params = the_target(), SamplingParams(temperature=1.5, max_tokens=LENGTH + 2)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = rejected = 0
    for seed in range(DRAWS):
        drafter = make(target.decoder)
        seeded = SamplingParams(temperature=1.5, max_tokens=LENGTH + 2, seed=seed)
        steps = list(decode(target.decoder, PROMPT, seeded, drafter, 6, rule=Standard()))
        counts[tuple(islice((token for step in steps for token in step.token_ids), LENGTH))] += 1
        accepted += any(step.num_accepted_tokens for step in steps[:2])
        rejected += any(step.num_accepted_tokens < step.num_draft_tokens for step in steps[:2])
    assert accepted > DRAWS / 5 and rejected > DRAWS / 5
    return p_value(counts, exact_law(target, PROMPT, params))


@cache
def the_target() -> Target:
    return Target()


@pytest.mark.parametrize("name", DRAFTERS)
def test_decode_has_the_targets_law(name: str) -> None:
    assert p_of(DRAFTERS[name]) > FALSE_ALARM


def test_wrong_rows_are_caught() -> None:
    assert p_of(lambda decoder: WrongRows(decoder, [1], [], 0)) < CAUGHT
