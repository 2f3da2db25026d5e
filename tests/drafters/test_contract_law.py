"""Rules that are lossless in law: every method is taken or refused, and what it samples has the target's law.

Chi-square of the first three tokens' joint law against its enumeration, through `decode.py` (`tests/law.py`). Seeds are
fixed, so a verdict is final; with other seeds all methods together would raise a false alarm once in 10⁵ suites
(Bonferroni).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import law
import pytest
import torch
from drafters.contract import (
    CASES,
    DRAFTING,
    GREEDY,
    SEEDED,
    VOCAB,
    Case,
    Target,
    every_case,
    few_tokens,
    llama,
    prompt_of,
    rounds,
    tokens_of,
)
from drafters.watching import HandedOver, Wrapped
from engine.running import plain, run
from law_models import RealTarget
from remembered import Memory

from paceline.core.params import SamplingParams
from paceline.core.proposal import DenseDraftProbs, Proposal
from paceline.core.verify import RULES as KNOWN_RULES
from paceline.core.verify import Standard, make_rule
from paceline.decode import decode
from paceline.drafters.base import Drafter, SequenceView
from paceline.drafters.registry import RULES
from paceline.engine.engine import RequestOptions
from paceline.errors import PacelineError

DRAWS = 250
FALSE_ALARM = 1e-5 / len(CASES)
TEXT = (0, 1, 2, 0, 2, 2, 1, 0, 1, 2, 0)  # something to look up
PARAMS = SamplingParams(temperature=1.5, max_tokens=law.LENGTH + 2)
OPTIONS = {"lookahead": {"lookahead_window": 2, "lookahead_ngram": 3, "lookahead_guesses": 3}}


CONTROLS = [Case("ngram", "chain"), Case("draft_model", "chain"), Case("eagle", "tree")]


class Misannounced(Wrapped):
    """Says of all that it drafted that it was drawn from the flat distribution."""

    vocab_size = 3

    def drafts(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [self._flat(proposal) for proposal in super().drafts(sequences, budgets)]

    def _flat(self, proposal: Proposal) -> Proposal:
        parents = tuple(sorted(set(proposal.parents[: proposal.num_verified])))
        rows = torch.full((len(parents), self.vocab_size), 1 / self.vocab_size, dtype=torch.float64)
        return replace(proposal, draft_probs=DenseDraftProbs(parents, rows) if parents else None)


def law_case(target: Target, case: Case, wrapper: Callable[[Drafter], Drafter] = HandedOver) -> law.Case:
    """`HandedOver` sees at once what so few draws may not show: a sampled token dropped, or another row sent along."""
    drafter = wrapper(target.drafter(case, **OPTIONS.get(case.name, {})))
    budget = {"chain": 2, "tree": 6}[case.shape]
    return law.Case(
        str(case),
        Standard(),
        lambda: drafter,
        lambda: RealTarget(target.decoder),
        PARAMS,
        TEXT,
        num_draft_tokens=budget,
    )


@pytest.fixture(scope="module")
def few(made: Callable[..., Target]) -> Target:
    return made(few_tokens)


@pytest.fixture(scope="module")
def exact(few: Target) -> law.Law:
    return law.exact_law(RealTarget(few.decoder), TEXT, PARAMS)


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory()


@every_case
def test_sampling_under_standard_has_the_targets_law(few: Target, exact: law.Law, memory: Memory, case: Case) -> None:
    it = law_case(few, case)
    with memory.at_work():
        counted = law.tally(it, it.seeds(0, DRAWS))
    assert counted.draws == DRAWS
    # of three tokens its root has two or three as children, whatever the text: they are seldom all refused
    share = law.SHARE / 2 if case == Case("medusa", "tree") else law.SHARE
    assert not law.faults(counted, exact, FALSE_ALARM, share=share if case in DRAFTING else 0)


@pytest.mark.parametrize("case", CONTROLS, ids=str)
def test_a_drafter_that_announces_wrong_rows_is_caught(few: Target, exact: law.Law, memory: Memory, case: Case) -> None:
    it = law_case(few, case, Misannounced)
    with memory.at_work():
        counted = law.tally(it, it.seeds(0, DRAWS))
    assert law.p_value(counted.counts, exact) < law.CAUGHT


@pytest.mark.parametrize("case", [*CONTROLS, Case("early_exit", "chain"), Case("eagle3", "chain")], ids=str)
def test_what_is_looked_up_is_what_would_be_computed(few: Target, case: Case) -> None:
    """The second time nothing is computed any more."""
    it, memory, sizes = law_case(few, case), Memory(), []
    plainly = law.tally(it, it.seeds(0, 8))
    for _ in range(2):
        with memory.at_work():
            assert law.tally(it, it.seeds(0, 8)) == plainly
        sizes.append(len(memory.known))
    assert 0 < sizes[0] == sizes[1]


@pytest.mark.parametrize("rule", [name for name, rule in KNOWN_RULES.items() if rule.lossless and name != "coupled"])
@every_case
def test_a_lossless_rule_is_kept_or_refused(target: Target, drafter: Drafter, case: Case, rule: str) -> None:
    """Kept: greedy tokens are plain decoding's, and sampled drafts are handed over as they were drawn."""
    decoder, engine = target.decoder, target.engine(drafter, case)
    options = RequestOptions(rule=rule)
    if rule not in RULES[case.shape]:
        with pytest.raises(PacelineError, match="takes chains"):
            next(decode(decoder, prompt_of(9), GREEDY, drafter, case.budget, rule=make_rule(rule)))
        with pytest.raises(PacelineError, match="takes chains"):
            engine.add_request(prompt_of(9), GREEDY, options)
        return
    rounds(decoder, prompt_of(40), GREEDY, drafter, case.budget, rule=make_rule(rule))
    number = engine.add_request(prompt_of(40), GREEDY, options)
    assert run(engine).ids(number) == plain(decoder, prompt_of(40), GREEDY)
    watched = HandedOver(drafter)
    steps = list(decode(decoder, prompt_of(40), SEEDED, watched, case.budget, rule=make_rule(rule)))
    assert len(tokens_of(steps)) == SEEDED.max_tokens
    assert not engine.speculation.faults


class Dropping(Wrapped):
    def drafts(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        (whole,) = super().drafts(sequences, budgets)
        return [Proposal.chain(whole.tokens[:-1], [whole.draft_row(i - 1) for i in range(len(whole) - 1)])]


class Flat(Misannounced):
    vocab_size = VOCAB


@pytest.mark.parametrize("faulty", [Dropping, Flat])
def test_a_draft_that_is_not_handed_over_whole_is_seen(
    made: Callable[..., Target], faulty: Callable[[Drafter], Drafter]
) -> None:
    """The control: a sampled token is dropped, or another row goes along."""
    target = made(llama)
    drafter = faulty(target.drafter(Case("draft_model", "chain")))
    with pytest.raises(AssertionError):
        list(decode(target.decoder, prompt_of(40), SEEDED, HandedOver(drafter), 4, rule=make_rule("standard")))
