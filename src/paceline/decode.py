"""Speculative decoding of one sequence, to be read first. Plain decoding is the same loop with an empty proposal.

The batched engine does the same for many sequences at once and is tested against this.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from paceline.core.constraint import TokenConstraint
from paceline.core.drafting import DraftSampler
from paceline.core.params import SamplingParams
from paceline.core.path import PathSampler, TargetWeights
from paceline.core.proposal import Proposal
from paceline.core.rng import CounterNoise, GeneratorDraws, Randomness, draw_seed
from paceline.core.stopping import cut, token_limit
from paceline.core.verify import Coupled, Rule
from paceline.drafters.base import Drafter, features
from paceline.errors import PacelineError
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
    token_ids: list[int]  # prompt and output; the target has processed all but the last
    request_id: int = 0

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

    `rule` defaults to `coupled`; `eos_token_ids` to the model's own. `on_prefill(done, of)` hears of progress.
    """
    rule = rule or Coupled()
    limit = token_limit(len(prompt_ids), params, max_context or target.config.max_context)
    seed = params.seed if params.seed is not None else draw_seed()
    eos = target.config.eos_token_ids if eos_token_ids is None else eos_token_ids
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
    sampler = PathSampler.start(params, prompt_ids, target.config.vocab_size, CounterNoise(seed), eos, constraint)
    sequence = SequenceState(sampler, rule, GeneratorDraws(seed, stream="draft"), list(prompt_ids))
    draws = GeneratorDraws(seed, stream="verify")
    cache = target.new_pool(len(prompt_ids) + limit + num_draft_tokens).new_sequence()
    needs, layers = drafter.needs, tuple(layer for layer in drafter.needs.hidden_layers if layer >= 0)
    if needs.early_layer is not None:
        raise PacelineError(f"decode() cannot resume at layer {needs.early_layer}, which {drafter.name!r} needs")
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
            # 2. Draft. The last token of all is never worth drafting: the target's own pass yields it.
            left = limit - sampler.position
            budget = min(num_draft_tokens, left - 1)
            proposal = drafter.propose([sequence], [budget])[0] if budget > 0 else Proposal.empty()
            # 3. One target pass over the last committed token and the drafted ones.
            rows = (sequence.token_ids[-1], *proposal.tokens)
            out = target.forward([Segment(cache, rows, (-1, *(p + 1 for p in proposal.parents)))], taps=layers)
            logits = target.logits(out.hidden)  # [1 + N, V]
            # 4. Verify, and cut what was accepted at the first stop token or at the limit.
            weights = TargetWeights(sampler, proposal, partial(row_after, logits))
            verdict = rule.verify(proposal, rule.target_rows(weights), Randomness(sampler.noise, draws))
            tokens, finish_reason = cut(verdict.tokens(proposal), left, stop_ids)
            # 5. Commit the rows of the tokens kept; the newest token has none yet.
            path = [0, *(node + 1 for node in verdict.path)][: len(tokens)]
            cache.commit(path)
            drafter.observe(sequence, [rows[row] for row in path], features(target, needs, out, path, logits, proposal))
            sequence.extend(tokens)
            sampler = sequence.sampler
            yield Step(tokens, len(proposal), min(len(tokens), len(verdict.path)), finish_reason)
    finally:
        drafter.release(sequence)
        cache.release()


def row_after(logits: torch.Tensor, node: int) -> torch.Tensor:
    """The target's row after a node of the proposal; row 0 is the root's (node −1)."""
    return logits[node + 1]
