"""Speculative decoding of one sequence, to be read first. Plain decoding is the same loop with an empty proposal.

The batched engine does the same for many sequences at once and is tested against this.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.core.constraint import TokenConstraint
from paceline.core.drafting import DraftSampler
from paceline.core.params import SamplingParams
from paceline.core.path import PathSampler, TargetWeights, rows_after
from paceline.core.proposal import Proposal, check_proposal
from paceline.core.rng import CounterNoise, GeneratorDraws, Randomness, draw_seed
from paceline.core.rows import ScannedRows
from paceline.core.stopping import check_end_tokens, cut, token_limit
from paceline.core.verify import Coupled, Rule
from paceline.drafters.base import Drafter, check_needs, check_rule, draft_budget, features, verification_segment
from paceline.errors import PacelineError
from paceline.models.cache import SequenceCache
from paceline.models.decoder import Decoder, Segment

PREFILL_ROWS = 128


@dataclass(frozen=True, slots=True)
class Step:
    """What one target pass yielded: tokens already cut at the first stop token or at the limit; never empty."""

    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_tokens: int  # of `token_ids`
    finish_reason: str | None  # "stop", "length", or None while it goes on


@dataclass(slots=True)
class SequenceState:
    """One request in flight: everything that is committed, and how its next token is drawn."""

    sampler: PathSampler
    rule: Rule
    draft_draws: GeneratorDraws
    cache: SequenceCache
    token_ids: list[int]  # prompt and output; the target has processed all but the last
    request_id: int = 0
    private_drafts: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.sampler.history.prompt)

    @property
    def draft_sampler(self) -> DraftSampler:
        return self.rule.draft_sampler(self.sampler, self.draft_draws)

    def extend(self, tokens: Sequence[int]) -> None:
        self.token_ids.extend(tokens)
        self.sampler = self.sampler.advance(*tokens)


def decode(
    target: Decoder,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    drafter: Drafter,
    num_draft_tokens: int = 4,
    *,
    rule: Rule | None = None,
    eos_token_ids: Sequence[int] | None = None,
    constraint: TokenConstraint | None = None,
    max_context: int | None = None,
    prefill_rows: int = PREFILL_ROWS,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Iterator[Step]:
    """Generate after `prompt_ids`, a step a target pass. Raises PacelineError before the first pass if it cannot.

    `rule` defaults to `coupled`; `eos_token_ids` and `max_context` to the model's own. `on_prefill(done, of)` hears of
    progress. One choice of token ids: several choices, stop strings and logprobs are the engine's.
    """
    _check(target, prompt_ids, params, num_draft_tokens, max_context, prefill_rows)
    rule = rule or Coupled()
    check_rule(rule, drafter)
    check_needs(drafter, target.config.num_layers)
    limit = token_limit(len(prompt_ids), params, max_context or target.config.max_context)
    seed = params.seed if params.seed is not None else draw_seed()
    eos = target.config.eos_token_ids if eos_token_ids is None else eos_token_ids
    check_end_tokens(eos, target.config.vocab_size)
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
    sampler = PathSampler.start(params, prompt_ids, target.config.vocab_size, CounterNoise(seed), eos, constraint)
    cache = target.new_pool(len(prompt_ids) + limit + num_draft_tokens).new_sequence()
    sequence = SequenceState(sampler, rule, GeneratorDraws(seed, stream="draft"), cache, list(prompt_ids))
    draws = GeneratorDraws(seed, stream="verify")
    needs, layers = drafter.needs, tuple(layer for layer in drafter.needs.hidden_layers if layer >= 0)
    try:
        # 1. Prefill all but the last prompt token: that one is the first step's root.
        todo = prompt_ids[:-1]
        for start in range(0, len(todo), prefill_rows):
            chunk = todo[start : start + prefill_rows]
            out = target.forward([Segment(cache, chunk)], taps=layers)
            cache.commit(range(len(chunk)))
            drafter.observe(sequence, chunk, features(target, needs, out, range(len(chunk))))
            if on_prefill is not None:
                on_prefill(start + len(chunk), len(todo))

        finish_reason = None
        while finish_reason is None:
            # 2. Draft, unless the next token is the last: that one the target's own pass yields.
            left = limit - sampler.position
            budget = draft_budget(drafter, num_draft_tokens, left)
            proposal = drafter.propose([sequence], [budget])[0] if budget > 0 else Proposal.empty()
            check_proposal(proposal, budget, target.config.vocab_size)
            # 3. One target pass over the last committed token and the drafted ones.
            rows = (sequence.token_ids[-1], *proposal.tokens)
            out = target.forward([verification_segment(sequence, proposal, needs)], taps=layers)
            logits = target.logits(out.hidden)  # [1 + N, V]
            scanned = ScannedRows(logits, target.maxima(logits))
            # 4. Verify, and cut what was accepted at the first stop token or at the limit.
            weights = TargetWeights(sampler, proposal, rows_after(scanned), stop_ids)
            verdict = weights.decided(
                rule.verify(proposal, rule.target_rows(weights), Randomness(sampler.noise, draws))
            )
            tokens, finish_reason = cut(verdict.tokens(proposal), left, stop_ids)
            # 5. Commit the rows of the tokens kept; the newest token has none yet.
            path = [0, *(node + 1 for node in verdict.path)][: len(tokens)]
            cache.commit(path)
            drafter.observe(sequence, [rows[row] for row in path], features(target, needs, out, path, logits, proposal))
            sequence.extend(tokens)
            sampler = sequence.sampler
            yield Step(tokens, proposal.num_verified, min(len(tokens), len(verdict.path)), finish_reason)
    finally:
        drafter.release(sequence)
        cache.release()


def _check(
    target: Decoder,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    num_draft_tokens: int,
    max_context: int | None,
    prefill_rows: int,
) -> None:
    vocab_size, room = target.config.vocab_size, target.config.max_context
    outside = next((token for token in prompt_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise PacelineError(f"the prompt holds token {outside} and the vocabulary has {vocab_size} tokens")
    if num_draft_tokens < 0:
        raise PacelineError(f"num_draft_tokens is {num_draft_tokens}; it must be 0 or more")
    if prefill_rows < 1:
        raise PacelineError(f"prefill_rows is {prefill_rows}; it must be 1 or more")
    if max_context is not None and not 1 <= max_context <= room:
        raise PacelineError(f"max_context is {max_context}; the model's own is {room}", hint="give 1 up to that")
    for name, asked in (("n", params.n > 1), ("stop", params.stop), ("logprobs", params.logprobs is not None)):
        if asked:
            raise PacelineError(f"decode() does not take {name}", hint="LLM.generate() does")
