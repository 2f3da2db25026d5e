"""`Engine.step`: one target pass for all running requests. Requests come and go between steps.

What a request gets depends on its prompt, its parameters and its seed alone: never on who shares the step. A step whose
target pass is interrupted or fails has changed no sequence, and can be made again.
"""

import itertools
import time
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from paceline.core.constraint import TokenConstraint
from paceline.core.logprobs import PositionLogprobs, position_logprobs
from paceline.core.params import SamplingParams
from paceline.core.path import TargetWeights
from paceline.core.proposal import Proposal, Verdict
from paceline.core.rng import Randomness, draw_seed
from paceline.core.sampling import BadLogitsError, NoTokenAllowedError
from paceline.core.stopping import cut, token_limit
from paceline.core.verify import Rule, make_rule
from paceline.drafters.base import Drafter, features
from paceline.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, Update, Usage
from paceline.engine.prefix_cache import Hit, PrefixCache
from paceline.engine.scheduler import Chunk, Scheduler, Turn
from paceline.engine.sequence import Pass, Request, Sequence
from paceline.engine.speculation import Speculation
from paceline.engine.statistics import SpeculationStatistics
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder, ForwardOutput, Segment
from paceline.models.tokenizer import Tokenizer
from paceline.ops.attention import BLOCK


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much may run at once. Raises PacelineError for a number below its least value."""

    max_model_len: int  # tokens of a request, prompt and answer
    num_kv_blocks: int  # of 64 positions, for all requests and the prefix cache together
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512  # rows of a step that still takes another prompt chunk
    prefix_cache_blocks: int = 0  # 0: prompts are not kept

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_kv_blocks"):
            if getattr(self, name) < 1:
                raise PacelineError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.prefix_cache_blocks < 0:
            raise PacelineError(f"prefix_cache_blocks is {self.prefix_cache_blocks}; it must be 0 or more")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How one request is sped up. Under a lossless rule nothing here changes what comes out."""

    speculative: bool = True
    method: str | None = None  # one of the engine's drafters; None: its own
    num_speculative_tokens: int | None = None  # None: the engine's
    rule: str | Rule = "coupled"  # by name, or with parameters of its own
    constraint: TokenConstraint | None = None


@dataclass(slots=True, eq=False)
class _Live:
    """A request in flight: its unfinished sequences, and what the others came to."""

    request: Request
    arrived: float
    sequences: list[Sequence]
    done: dict[int, CompletionOutput] = field(default_factory=dict)
    scheduled: float | None = None
    prefilled: float | None = None
    cached_tokens: int = 0
    put_back: int = 0


class Engine:
    """Runs requests on one target. `drafters` by name; `method` is used where a request names none.

    The tokenizer gives the text; without one outputs have ids alone, and stop strings are refused.
    """

    def __init__(
        self,
        target: Decoder,
        config: EngineConfig,
        drafters: Mapping[str, Drafter] | None = None,
        method: str = "none",
        num_draft_tokens: int = 4,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Ids[int] | None = None,
    ) -> None:
        self.target = target
        self.config = config
        self.tokenizer = tokenizer
        self.method, self.num_draft_tokens = method, num_draft_tokens
        self.eos_token_ids = tuple(target.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.pool = target.new_pool(config.num_kv_blocks * BLOCK)
        self.prefix_cache = PrefixCache(self.pool, config.prefix_cache_blocks)
        self.scheduler = Scheduler(self.pool, self.prefix_cache, config.max_num_seqs, config.max_num_batched_tokens)
        self.speculation = Speculation(drafters or {}, self.prefix_cache, target.config.vocab_size)
        self.statistics = SpeculationStatistics()  # of all requests that have ended
        self._live: dict[int, _Live] = {}
        self._request_ids = itertools.count()
        self._sequence_ids = itertools.count()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def add_request(
        self,
        prompt_ids: Ids[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        prompt: str | None = None,
    ) -> int:
        """Queue a request; its id. Raises PacelineError, and queues nothing, if it can never be answered."""
        sequence = self._checked(prompt_ids, params, options or RequestOptions(), prompt)
        self._live[sequence.request.request_id] = _Live(sequence.request, time.perf_counter(), [sequence])
        self.scheduler.add(sequence)
        return sequence.request.request_id

    def check_request(
        self, prompt_ids: Ids[int], params: SamplingParams, options: RequestOptions | None = None
    ) -> None:
        """Raise what `add_request` would raise."""
        self._checked(prompt_ids, params, options or RequestOptions(), None)

    def _checked(
        self, prompt_ids: Ids[int], params: SamplingParams, options: RequestOptions, prompt: str | None
    ) -> Sequence:
        limit = token_limit(len(prompt_ids), params, self.config.max_model_len)
        vocab_size = self.target.config.vocab_size
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
            strange = next(token for token in prompt_ids if not 0 <= token < vocab_size)
            raise PacelineError(f"the prompt holds token {strange} and the vocabulary has {vocab_size} tokens")
        needed = -(-(len(prompt_ids) + limit - 1) // BLOCK)  # the newest token has no row
        if needed > self.config.num_kv_blocks:
            raise PacelineError(
                f"the request may need {needed} KV blocks, but there are {self.config.num_kv_blocks} of them",
                hint="lower max_tokens, shorten the prompt, or give the KV cache more memory",
            )
        if params.stop and self.tokenizer is None:
            raise PacelineError("stop strings need a tokenizer, and the model has none", hint="use stop_token_ids")
        drafter = self._drafter(options)
        count = self.num_draft_tokens if options.num_speculative_tokens is None else options.num_speculative_tokens
        if count < 0:
            raise PacelineError(f"num_speculative_tokens is {count}; it must be 0 or more")
        request = Request(
            request_id=next(self._request_ids),
            prompt_ids=tuple(prompt_ids),
            params=params,
            seed=draw_seed() if params.seed is None else params.seed,
            limit=limit,
            stop_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else frozenset(self.eos_token_ids)),
            eos_token_ids=self.eos_token_ids,
            rule=make_rule(options.rule) if isinstance(options.rule, str) else options.rule,
            num_draft_tokens=count,
            constraint=options.constraint,
            prompt=prompt,
        )
        sequence = Sequence.start(request, next(self._sequence_ids), self.pool, vocab_size, self.tokenizer)
        sequence.drafter = drafter if count > 0 else None
        return sequence

    def _drafter(self, options: RequestOptions) -> Drafter | None:
        name = options.method or self.method
        if not options.speculative or name == "none":
            return None
        if name not in self.speculation.drafters:
            known = ", ".join(("none", *self.speculation.drafters))
            raise PacelineError(f"method {name!r} is not loaded", hint=f"this engine has: {known}")
        return self.speculation.drafters[name]

    def step(self) -> list[Update]:
        """Advance every scheduled request by one target pass; what it added to each."""
        schedule = self.scheduler.schedule()
        for sequence in schedule.put_back:
            self.speculation.begin(sequence, Hit())
        for admission in schedule.admitted:
            self._begin(admission.sequence, admission.hit.num_tokens)
            if admission.hit.num_tokens:
                self.speculation.begin(admission.sequence, admission.hit)
        proposals = self.speculation.propose(schedule.turns)

        segments = [_segment(turn, proposal) for turn, proposal in zip(schedule.turns, proposals, strict=True)]
        segments += [Segment(chunk.sequence.cache, chunk.token_ids) for chunk in schedule.chunks]
        parts = self._forward(segments)
        decoded = parts[: len(proposals)]

        updates = [
            self._advance(turn.sequence, proposal, part, logits)
            for turn, proposal, part, logits in zip(
                schedule.turns, proposals, decoded, self._logits(decoded), strict=True
            )
        ]
        for chunk, part in zip(schedule.chunks, parts[len(proposals) :], strict=True):
            self._prefill(chunk, part)
        for sequence in list(self.scheduler.running):
            if sequence.forks_due and sequence.num_to_prefill == 0:
                self._fork(sequence)
        return updates

    def cancel(self, request_id: int) -> RequestOutput | None:
        """End a request now, wherever it stands; what it had so far. None if it has ended already."""
        live = self._live.get(request_id)
        if live is None:
            return None
        for sequence in list(live.sequences):
            sequence.end("abort")
            self._finish(sequence)
        return self._close(live)

    def reset_prefix_cache(self) -> None:
        """Forget all kept prompts and answers."""
        self.prefix_cache.clear()

    # One step, part by part

    def _begin(self, sequence: Sequence, num_cached: int) -> None:
        live = self._live[sequence.request.request_id]
        if live.scheduled is None:
            live.scheduled, live.cached_tokens = time.perf_counter(), num_cached

    def _forward(self, segments: Ids[Segment]) -> list[ForwardOutput]:
        """One pass over all rows; what came out of each segment (views)."""
        if not segments:
            return []
        counts = [len(segment.token_ids) for segment in segments]
        out = self.target.forward(segments, taps=self.speculation.taps)
        hidden = torch.split(out.hidden, counts)
        taps = {layer: torch.split(rows, counts) for layer, rows in out.taps.items()}
        return [ForwardOutput(own, {layer: rows[i] for layer, rows in taps.items()}) for i, own in enumerate(hidden)]

    def _logits(self, parts: Ids[ForwardOutput]) -> list[torch.Tensor]:
        """Logits [1 + N, V] of each sequence that decodes; a prompt's rows need none."""
        if not parts:
            return []
        rows = self.target.logits(torch.cat([part.hidden for part in parts]))
        return list(torch.split(rows, [len(part.hidden) for part in parts]))

    def _prefill(self, chunk: Chunk, out: ForwardOutput) -> None:
        sequence, rows = chunk.sequence, range(len(chunk.token_ids))
        sequence.cache.commit(rows)
        self.speculation.observe(
            sequence, chunk.token_ids, lambda drafter: features(self.target, drafter.needs, out, rows)
        )
        if sequence.num_to_prefill == 0:
            self._keep(sequence)

    def _fork(self, sequence: Sequence) -> None:
        """The other choices begin at the prompt's end, on the same rows."""
        sequence.forks_due = False
        live = self._live[sequence.request.request_id]
        for choice in range(1, sequence.request.params.n):
            child = sequence.fork(choice, next(self._sequence_ids), self.tokenizer)
            self.speculation.fork(sequence, child)
            live.sequences.append(child)
            self.scheduler.add(child)

    def _advance(self, sequence: Sequence, proposal: Proposal, out: ForwardOutput, logits: torch.Tensor) -> Update:
        """Verify, cut, commit, tell the drafter. `logits` [1 + N, V]: row 0 follows the last committed token."""
        live = self._live[sequence.request.request_id]
        live.prefilled = live.prefilled or time.perf_counter()
        try:
            verdict = self._verify(sequence, proposal, logits)
        except (BadLogitsError, NoTokenAllowedError) as error:
            sequence.end("error", str(error))
            return self._ended(sequence)
        tokens, finish_reason = cut(verdict.tokens(proposal), sequence.num_left, sequence.request.stop_ids)
        kept = sequence.cut(tokens, finish_reason)
        # The rows of the tokens kept; the newest of them has none yet.
        path = [0, *(node + 1 for node in verdict.path)][: max(kept, 0)]
        drafted = (sequence.token_ids[-1], *proposal.tokens)
        sequence.cache.commit(path)
        self.speculation.observe(
            sequence,
            [drafted[row] for row in path],
            lambda drafter: features(self.target, drafter.needs, out, path, logits, proposal),
        )
        if kept > 0:
            done = Pass(kept, len(proposal), min(kept, len(verdict.path)))
            sequence.extend(tokens[:kept], done, _logprobs(sequence.request.params, logits, path, tokens))
        else:
            sequence.take_back(-kept)
        return sequence.take_update() if sequence.finish_reason is None else self._ended(sequence)

    def _verify(self, sequence: Sequence, proposal: Proposal, logits: torch.Tensor) -> Verdict:
        try:
            return _verdict(sequence, proposal, logits)
        except (BadLogitsError, NoTokenAllowedError):
            if not proposal.tokens:
                raise
        except Exception as error:  # a proposal that the rule cannot take
            if not proposal.tokens:
                raise
            self.speculation.fail(sequence, error)
        return _verdict(sequence, Proposal.empty(), logits)  # as far as plain decoding would have come

    # The end of a request

    def _ended(self, sequence: Sequence) -> Update:
        """A sequence's last update; the request's output goes with it if it was the last to end."""
        update = sequence.take_update()
        self._finish(sequence)
        live = self._live[sequence.request.request_id]
        return update if live.sequences else replace(update, output=self._close(live))

    def _finish(self, sequence: Sequence) -> None:
        """Keep its rows for the next request, tell its drafter, give back its blocks."""
        cache = sequence.cache
        cache.truncate(min(cache.length, len(sequence.token_ids) - 1))
        if sequence.error is None and sequence.num_to_prefill == 0:
            self._keep(sequence)
            self._keep_drafter(sequence)
        self.speculation.release(sequence)
        self.scheduler.remove(sequence)
        live = self._live[sequence.request.request_id]
        live.sequences.remove(sequence)
        live.done[sequence.choice] = sequence.output()
        live.put_back += sequence.num_put_back

    def _keep(self, sequence: Sequence) -> None:
        cache = sequence.cache
        self.prefix_cache.insert(sequence.token_ids[: cache.length], cache.blocks)

    def _keep_drafter(self, sequence: Sequence) -> None:
        drafter, state = sequence.drafter, self.speculation.snapshot(sequence)
        if drafter is not None and state is not None:
            self.prefix_cache.attach(sequence.token_ids[: sequence.cache.length], drafter, state)

    def _close(self, live: _Live) -> RequestOutput:
        """The request's output; choices that never began are empty."""
        del self._live[live.request.request_id]
        request = live.request
        never = CompletionOutput(0, "", (), None, "abort", None, None, SpeculationStatistics())
        outputs = tuple(live.done.get(i, replace(never, index=i)) for i in range(request.params.n))
        statistics = SpeculationStatistics()
        for output in outputs:
            statistics.merge(output.speculation)
        self.statistics.merge(statistics)
        now = time.perf_counter()
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_ids,
            outputs=outputs,
            seed=request.seed,
            usage=Usage(
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=sum(len(output.token_ids) for output in outputs),
                cached_tokens=live.cached_tokens,
            ),
            metrics=RequestMetrics(
                queued_s=_span(live.arrived, live.scheduled),
                prefill_s=_span(live.scheduled, live.prefilled),
                decode_s=_span(live.prefilled, now),
                num_put_back=live.put_back,
                speculation=statistics,
            ),
            lossless=request.rule.lossless,
        )


def _segment(turn: Turn, proposal: Proposal) -> Segment:
    """The last committed token, and the drafted nodes under it."""
    tokens = (turn.sequence.token_ids[-1], *proposal.tokens)
    return Segment(turn.sequence.cache, tokens, (-1, *(parent + 1 for parent in proposal.parents)))


def _verdict(sequence: Sequence, proposal: Proposal, logits: torch.Tensor) -> Verdict:
    rule = sequence.request.rule
    target = TargetWeights(sequence.sampler, proposal, partial(_row_after, logits))
    randomness = Randomness(sequence.sampler.noise, sequence.verify_draws)
    return rule.verify(proposal, rule.target_rows(target), randomness)


def _row_after(logits: torch.Tensor, node: int) -> torch.Tensor:
    """The target's row after a node of the proposal; row 0 is the root's (node −1)."""
    return logits[node + 1]


def _logprobs(params: SamplingParams, logits: torch.Tensor, path: Ids[int], tokens: Ids[int]) -> list[PositionLogprobs]:
    if params.logprobs is None:
        return []
    return [position_logprobs(logits[row], token, params.logprobs) for row, token in zip(path, tokens, strict=False)]


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
