"""A row of NaN, or one that leaves no token, ends an answer where plain decoding ends it, and shifts no chance before.

A rule that began anew from the root after meeting one would draw tokens with a bad row behind them too rarely.
"""

from collections import Counter

import pytest
import torch
from law import Case, p_value, probabilities
from law_cases import PLAIN_CASES, TARGET, VOCAB
from law_models import Table, Tokens

from paceline.core.sampling import BadLogitsError
from paceline.decode import decode

DRAWS = 1_500
FALSE_ALARM = 1e-5 / len(PLAIN_CASES)
LAST = 3  # nothing follows this token


def broken(context: Tokens) -> torch.Tensor:
    row = TARGET.logits(context)
    return torch.full_like(row, torch.nan) if context[-1] == LAST else row


def answer(case: Case) -> Tokens:
    """All that comes, and the error if it comes to that."""
    tokens: Tokens = ()
    try:
        for step in decode(BROKEN.decoder, case.prompt, case.params, case.drafter(), 6, rule=case.rule):
            tokens += step.token_ids
    except BadLogitsError:
        assert tokens[-1] == LAST
        return tokens
    assert LAST not in tokens[:-1]
    return tokens


BROKEN = Table(broken, VOCAB)


@pytest.mark.parametrize("case", PLAIN_CASES, ids=lambda case: case.name)
def test_the_token_before_a_bad_row_is_drawn_as_often_as_any(case: Case) -> None:
    counts: Counter[Tokens] = Counter()
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr("paceline.decode.draw_seed", iter(case.seeds(0, DRAWS)).__next__)
        for _ in range(DRAWS):
            tokens = answer(case)
            assert LAST not in tokens[:-1]
            counts[tokens[:1]] += 1
    row = probabilities(TARGET.logits(case.prompt).tolist(), case.params.temperature, case.params.top_p)
    assert row[LAST] > 0.1
    assert p_value(counts, {(token,): p for token, p in enumerate(row)}) > FALSE_ALARM
