"""`Engine.step`: one target pass for all running requests. Requests come and go between steps.

What a request gets depends on its prompt, its parameters and its seed alone: never on who shares the step. A step whose
target pass fails has changed no sequence, and can be made again. What goes wrong after it ends the request that it
struck, and no other. An interruption (Ctrl-C), at whatever line, ends none: whoever calls next finds all mended.
"""

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids

import torch

from paceline.core.logprobs import PositionLogprobs, position_logprobs
from paceline.core.params import SamplingParams
from paceline.core.path import TargetWeights, rows_after
from paceline.core.proposal import Proposal, Verdict
from paceline.core.rng import Randomness
from paceline.core.rows import ScannedRows
from paceline.core.sampling import BadLogitsError, NoTokenAllowedError
from paceline.core.stopping import cut
from paceline.drafters.base import NOTHING, Drafter, features, verification_segment
from paceline.drafters.registry import names
from paceline.engine.handover import Handover
from paceline.engine.outputs import RequestOutput, Update
from paceline.engine.policy import FixedBudgets, StepPolicy
from paceline.engine.prefix_cache import Hit, PrefixCache
from paceline.engine.request import (
    EngineConfig,
    Intake,
    RequestOptions,
    check_draft_tokens,
    check_kind,
    check_list,
    check_method,
    check_whole,
    has_methods,
)
from paceline.engine.results import LiveRequest
from paceline.engine.scheduler import Chunk, Scheduler, Turn
from paceline.engine.sequence import Pass, Sequence
from paceline.engine.speculation import Speculation
from paceline.engine.statistics import SpeculationStatistics
from paceline.engine.timing import StepTimes, TimeTotals
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder, ForwardOutput, Segment
from paceline.models.tokenizer import Tokenizer
from paceline.ops.attention import BLOCK
from paceline.values import shown

__all__ = ["Engine", "EngineConfig", "RequestOptions"]

logger = logging.getLogger("paceline.engine")


class Engine:
    """Runs requests on one target. `drafters` by name; `method` is used where a request names none: one of
    them, or a name of the registry that `add_method` is to bring.

    The tokenizer gives the text; without one outputs have ids alone, and stop strings are refused. `clock`: seconds.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not has_methods(target, "forward", "logits", "new_pool"):
            raise PacelineError(
                f"the target is {shown(target)}; it must be a decoder", hint="that of a loaded model, say"
            )
        check_kind("the engine's config", config, EngineConfig, "an EngineConfig")
        check_kind("the tokenizer", tokenizer, Tokenizer | None, "that of a loaded model, or None")
        check_kind("drafters", drafters, Mapping | None, "drafters by name")
        check_kind("the clock", clock, Callable, "a function that gives seconds")
        check_draft_tokens(num_draft_tokens)
        check_method(method, ("none", *(drafters or {}), *names()))
        eos = target.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        check_list("eos_token_ids", eos)
        self.target = target
        self.config = config
        self.tokenizer = tokenizer
        self.pool = target.new_pool(config.num_kv_blocks * BLOCK)
        self.prefix_cache = PrefixCache(self.pool, config.prefix_cache_blocks)
        self._live: dict[int, LiveRequest] = {}  # in order of arrival
        self.scheduler = Scheduler(
            self._live, self.pool, self.prefix_cache, config.max_num_seqs, config.max_num_batched_tokens
        )
        self.speculation = Speculation(self.prefix_cache, target)
        self.times = TimeTotals()  # of all steps
        self.policy: StepPolicy = FixedBudgets()
        self._clock = clock
        self._intake = Intake(target.config, config, tuple(eos), tokenizer is not None, method)
        self._handover = Handover(self._live, self.prefix_cache, self.speculation)
        self._whole = True  # what was begun last came to its end
        self._taking: Sequence | None = None  # whose tokens and rows are changing
        self._request_ids = itertools.count()
        self._sequence_ids = itertools.count()
        for name, drafter in (drafters or {}).items():
            self.add_method(name, drafter, num_draft_tokens)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything left to `step` for."""
        return bool(self._live) or self._handover.has_updates

    @property
    def statistics(self) -> SpeculationStatistics:
        """Of all requests that have ended."""
        return self._handover.statistics

    def add_method(self, name: str, drafter: Drafter, num_draft_tokens: int) -> None:
        """Let requests name a method. Raises PacelineError for a bad name, or a drafter that asks for too much."""
        self._intake.check_offer(name, num_draft_tokens)
        self.speculation.add(name, drafter)
        self._intake.offer(name, drafter, num_draft_tokens)

    def add_request(
        self,
        prompt_ids: Ids[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        prompt: str | None = None,
    ) -> int:
        """Queue a request; its id. Raises PacelineError, and queues nothing, if it can never be answered."""
        options = RequestOptions() if options is None else options
        request = self._intake.request(next(self._request_ids), prompt_ids, params, options, prompt)
        vocab_size = self.target.config.vocab_size
        sequence = Sequence.start(request, next(self._sequence_ids), self.pool, vocab_size, self.tokenizer)
        live = LiveRequest(request, [sequence])
        return self._live.setdefault(request.request_id, live).request.request_id  # from here on its caller has it

    def check_request(
        self, prompt_ids: Ids[int], params: SamplingParams, options: RequestOptions | None = None
    ) -> None:
        """Raise what `add_request` would raise."""
        self._intake.request(-1, prompt_ids, params, RequestOptions() if options is None else options, None)

    def step(self) -> list[Update]:
        """Advance every scheduled request by one target pass; what it added to each."""
        self._mend()
        self._whole = False
        start = self._clock()
        schedule = self.scheduler.schedule()
        for sequence in schedule.put_back:
            self.speculation.begin(sequence, Hit())
        for sequence in self.scheduler.running:
            self._begin(sequence)
        shape = schedule.shape
        self.policy.before(shape)
        drafting = self._clock()
        proposals = self.speculation.propose(schedule.turns)

        running = self._clock()
        segments = [_segment(turn, proposal) for turn, proposal in zip(schedule.turns, proposals, strict=True)]
        segments += [Segment(chunk.sequence.cache, chunk.token_ids) for chunk in schedule.chunks]
        parts = self._forward(segments)
        decoded, prompts = parts[: len(proposals)], parts[len(proposals) :]
        logits = self._logits(decoded)

        verifying = self._clock()
        num_tokens = -sum(turn.sequence.num_output for turn in schedule.turns)
        for turn, proposal, part, own in zip(schedule.turns, proposals, decoded, logits, strict=True):
            self._take(turn.sequence, proposal, part, own)
        num_tokens += sum(turn.sequence.num_output for turn in schedule.turns)
        for chunk, part in zip(schedule.chunks, prompts, strict=True):
            self._prefill(chunk, part)
        for sequence in self.scheduler.running:
            if sequence.forks_due and sequence.num_to_prefill == 0:
                self._fork(sequence)
        rest = (drafting - start) + (self._clock() - verifying)
        self._tell(
            StepTimes(shape, sum(map(len, proposals)), num_tokens, running - drafting, verifying - running, rest)
        )
        self._whole = True
        return self._handover.take()

    def _tell(self, step: StepTimes) -> None:
        self.times.add(step)
        self.policy.after(step)

    def cancel(self, request_id: int) -> RequestOutput | None:
        """End a request now, wherever it stands; what it had so far. None if it has ended already, or never was."""
        check_whole("the request's id", request_id, 0)
        self._mend()
        live = self._live.get(request_id)
        if live is None:
            return None
        self._whole = False
        return self._handover.cancel(live)

    def reset_prefix_cache(self) -> None:
        """Forget all kept prompts and answers."""
        self._mend()
        self._whole = False
        self.prefix_cache.clear()
        self._whole = True

    def _mend(self) -> None:
        """After an interruption nothing is lost, and no block is held by nobody. Can be interrupted, too."""
        if self._whole:
            return
        self.speculation.mend()
        self.prefix_cache.mend()
        sequences = [*self.scheduler.running, *self.scheduler.waiting]
        self.pool.recount([self.prefix_cache.held(), *(sequence.cache.blocks for sequence in sequences)])
        struck = self._taking
        if struck is not None and not struck.ended:  # its tokens stand; rows and drafter follow from them
            struck.reread()
            self.scheduler.put_back(struck)
        self._handover.mend()
        self._taking, self._whole = None, True

    # One step, part by part

    def _begin(self, sequence: Sequence) -> None:
        """Of one that was just admitted: its request and its drafter hear of the prefix that was found."""
        hit = sequence.hit
        if hit is None:
            return
        self._live[sequence.request.request_id].begin(hit.num_tokens)
        if hit.num_tokens or sequence.num_put_back:
            self.speculation.begin(sequence, hit)
        sequence.hit = None

    def _forward(self, segments: Ids[Segment]) -> list[ForwardOutput]:
        """One pass over all rows; what came out of each segment (views)."""
        if not segments:
            return []
        counts = [len(segment.token_ids) for segment in segments]
        out = self.target.forward(segments, taps=self.speculation.taps)
        hidden = torch.split(out.hidden, counts)
        taps = {layer: torch.split(rows, counts) for layer, rows in out.taps.items()}
        return [ForwardOutput(own, {layer: rows[i] for layer, rows in taps.items()}) for i, own in enumerate(hidden)]

    def _logits(self, parts: Ids[ForwardOutput]) -> list[ScannedRows]:
        """Logits [1 + N, V] of each sequence that decodes; a prompt's rows need none."""
        if not parts:
            return []
        logits = self.target.logits(torch.cat([part.hidden for part in parts]))
        rows = ScannedRows(logits, self.target.maxima(logits))
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)  # verification waits for them anyway, and the clock sees it
        return rows.split([len(part.hidden) for part in parts])

    def _prefill(self, chunk: Chunk, out: ForwardOutput) -> None:
        sequence, rows = chunk.sequence, range(len(chunk.token_ids))
        self._taking = sequence
        sequence.cache.commit(rows)
        self.speculation.observe(
            sequence, chunk.token_ids, lambda drafter: features(self.target, drafter.needs, out, rows)
        )
        self._taking = None
        if sequence.num_to_prefill == 0:
            self._handover.keep(sequence)

    def _fork(self, sequence: Sequence) -> None:
        """The other choices begin at the prompt's end, on the same rows. It waits there until all have."""
        live = self._live[sequence.request.request_id]
        begun = live.begun()
        for choice in range(1, sequence.request.params.n):
            if choice not in begun:
                child = sequence.fork(choice, next(self._sequence_ids), self.tokenizer)
                live.sequences.append(child)
                self.speculation.fork(sequence, child)
        sequence.forks_due = False

    def _take(self, sequence: Sequence, proposal: Proposal, out: ForwardOutput, logits: ScannedRows) -> None:
        """What a pass adds to a sequence. A fault on the way (a constraint's, say) is its end, alone."""
        self._taking = sequence
        try:
            self._advance(sequence, proposal, out, logits)
        except (BadLogitsError, NoTokenAllowedError) as error:
            sequence.finish("error", str(error))
        except Exception as error:
            logger.exception("request %d has failed", sequence.request.request_id)
            sequence.finish("error", f"{type(error).__name__}: {error}")
        self._taking = None
        self._handover.show(sequence)

    def _advance(self, sequence: Sequence, proposal: Proposal, out: ForwardOutput, logits: ScannedRows) -> None:
        """Verify, cut, commit, tell the drafter. `logits` [1 + N, V]: row 0 follows the last committed token."""
        self._live[sequence.request.request_id].decodes()
        verdict = self._verify(sequence, proposal, logits)
        tokens, finish_reason = cut(verdict.tokens(proposal), sequence.num_left, sequence.request.stop_ids)
        kept, end = sequence.cut(tokens, finish_reason)
        if kept > 0:
            # The rows of the tokens kept; the newest of them has none yet.
            path = [0, *(node + 1 for node in verdict.path)][:kept]
            drafted = (sequence.token_ids[-1], *proposal.tokens)
            sequence.cache.commit(path)
            self.speculation.observe(
                sequence,
                [drafted[row] for row in path],
                lambda drafter: features(self.target, drafter.needs, out, path, logits.values, proposal),
            )
            done = Pass(kept, proposal.num_verified, min(kept, len(verdict.path)))
            sequence.extend(tokens[:kept], done, _logprobs(sequence.request.params, logits.values, path, tokens), end)
        else:
            sequence.take_back(-kept, end)

    def _verify(self, sequence: Sequence, proposal: Proposal, logits: ScannedRows) -> Verdict:
        try:
            return _verdict(sequence, proposal, logits)
        except (BadLogitsError, NoTokenAllowedError):
            raise
        except Exception as error:
            if not proposal.tokens:
                raise
            verdict = _verdict(sequence, Proposal.empty(), logits)
            self.speculation.fail(sequence, error)  # a proposal that the rule cannot take
            return verdict


def _segment(turn: Turn, proposal: Proposal) -> Segment:
    drafter = turn.sequence.drafter
    return verification_segment(turn.sequence, proposal, NOTHING if drafter is None else drafter.needs)


def _verdict(sequence: Sequence, proposal: Proposal, logits: ScannedRows) -> Verdict:
    rule, stop_ids = sequence.request.rule, sequence.request.stop_ids
    target = TargetWeights(sequence.sampler, proposal, rows_after(logits), stop_ids)
    randomness = Randomness(sequence.sampler.noise, sequence.verify_draws)
    return target.decided(rule.verify(proposal, rule.target_rows(target), randomness))


def _logprobs(params: SamplingParams, logits: torch.Tensor, path: Ids[int], tokens: Ids[int]) -> list[PositionLogprobs]:
    if params.logprobs is None:
        return []
    return [position_logprobs(logits[row], token, params.logprobs) for row, token in zip(path, tokens, strict=False)]
