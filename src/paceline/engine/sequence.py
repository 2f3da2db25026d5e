"""`Sequence`: one choice of a request in flight, with all that is known of it."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace

from paceline.core.drafting import DraftSampler
from paceline.core.logprobs import PositionLogprobs
from paceline.core.path import PathSampler
from paceline.core.rng import CounterNoise, GeneratorDraws
from paceline.drafters.base import Drafter
from paceline.engine.detokenize import IncrementalDetokenizer
from paceline.engine.outputs import CompletionOutput, Update
from paceline.engine.prefix_cache import Hit
from paceline.engine.request import Request
from paceline.engine.statistics import SpeculationStatistics
from paceline.models.cache import KVPool, SequenceCache
from paceline.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Pass:
    """What one target pass yielded."""

    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. Its cache holds the first rows of `token_ids`; the last one is never among them.

    A put-back sequence is the same object with an empty cache: its tokens, its noise and its draws stay.
    """

    request: Request
    choice: int
    request_id: int  # as drafters know it: each choice has its own
    token_ids: list[int]  # prompt and output
    cache: SequenceCache
    sampler: PathSampler
    draft_draws: GeneratorDraws
    verify_draws: GeneratorDraws
    detokenizer: IncrementalDetokenizer | None
    drafter: Drafter | None = None  # None: it is decoded plainly
    forks_due: bool = False  # other choices begin where its prompt ends
    runs: bool = False  # it has a seat; else it waits for one
    hit: Hit | None = None  # the prefix that was found for it, until it begins
    num_put_back: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    passes: list[Pass] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    _num_shown: int = 0
    _num_chars_shown: int = 0
    _unshown: list[str] = field(default_factory=list)

    @classmethod
    def start(
        cls, request: Request, request_id: int, pool: KVPool, vocab_size: int, tokenizer: Tokenizer | None
    ) -> "Sequence":
        """The first choice. Raises PacelineError if a parameter names a token outside the vocabulary."""
        params, prompt, noise = request.params, request.prompt_ids, CounterNoise(request.seed)
        sampler = PathSampler.start(params, prompt, vocab_size, noise, request.eos_token_ids, request.constraint)
        return cls(
            request=request,
            choice=0,
            request_id=request_id,
            token_ids=list(prompt),
            cache=pool.new_sequence(),
            sampler=sampler,
            draft_draws=GeneratorDraws(request.seed, stream="draft"),
            verify_draws=GeneratorDraws(request.seed, stream="verify"),
            detokenizer=None if tokenizer is None else IncrementalDetokenizer(tokenizer, params.stop),
            drafter=request.drafter,
            forks_due=params.n > 1,
        )

    def fork(self, choice: int, request_id: int, tokenizer: Tokenizer | None) -> "Sequence":
        """Another choice, at the prompt's end: the same rows, noise of its own."""
        seed = self.request.seed
        return Sequence(
            request=self.request,
            choice=choice,
            request_id=request_id,
            token_ids=list(self.request.prompt_ids),
            cache=self.cache.fork(),
            sampler=replace(self.sampler, noise=CounterNoise(seed, choice)),
            draft_draws=GeneratorDraws(seed, choice, stream="draft"),
            verify_draws=GeneratorDraws(seed, choice, stream="verify"),
            detokenizer=None if tokenizer is None else IncrementalDetokenizer(tokenizer, self.request.params.stop),
        )

    @property
    def draft_sampler(self) -> DraftSampler:
        return self.request.rule.draft_sampler(self.sampler, self.draft_draws)

    @property
    def arrival(self) -> tuple[int, int]:
        """Who came first, and so who goes first."""
        return self.request.request_id, self.choice

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Tokens that it may still generate."""
        return self.request.limit - self.num_output

    @property
    def num_to_prefill(self) -> int:
        """Rows it lacks before it can be decoded: all tokens but the last have one then."""
        return len(self.token_ids) - 1 - self.cache.length

    @property
    def decodes(self) -> bool:
        """Whether its next pass yields a token: the prompt is done, and the other choices have begun."""
        return self.num_to_prefill == 0 and not self.forks_due

    @property
    def private_drafts(self) -> bool:
        return self.request.private_drafts

    def cut(self, tokens: Ids[int], finish_reason: str | None) -> int:
        """How many tokens of a pass are kept; they end the answer if there is a reason, or if a stop string is met.

        A stop string cuts after the token that completed it. It may come to light late, when text was held back for
        one that began before it: then tokens of earlier passes go too, and the result is negative.
        """
        self.finish_reason = finish_reason
        if finish_reason == "stop" and tokens[-1] in self.request.params.stop_token_ids:
            self.stop_reason = tokens[-1]
        if self.detokenizer is None:
            return len(tokens)
        self._unshown.append(self.detokenizer.push(tokens))
        if finish_reason is not None:
            self._unshown.append(self.detokenizer.flush())
        match = self.detokenizer.match
        if match is None:
            return len(tokens)
        self.finish_reason, self.stop_reason = "stop", match.stop
        return match.num_tokens - self.num_output

    def extend(self, tokens: Ids[int], done: Pass, logprobs: Ids[PositionLogprobs]) -> None:
        """Take what is kept of a pass."""
        self.sampler = self.sampler.advance(*tokens)  # a constraint may raise
        self.passes.append(done)
        self.logprobs.extend(logprobs)
        self.token_ids.extend(tokens)  # last: nothing else may lack what belongs to a token

    def take_back(self, num_tokens: int) -> None:
        """Forget the newest tokens, and the passes and logprobs that were theirs."""
        del self.token_ids[len(self.token_ids) - num_tokens :]
        del self.logprobs[self.num_output :]
        surplus = sum(done.num_tokens for done in self.passes) - self.num_output
        while surplus > 0:
            last = self.passes.pop()
            kept = last.num_tokens - surplus
            surplus = -kept
            if kept > 0:
                self.passes.append(Pass(kept, last.num_draft_tokens, min(kept, last.num_accepted_tokens)))

    def end(self, reason: str, error: str | None = None) -> None:
        """End it from outside: the text so far stands, cut at a stop string that was still in question."""
        kept = self.cut((), reason)
        self.take_back(-kept)
        if self.stop_reason is None:
            self.error = error

    def fail(self, error: str) -> None:
        """End it after the last token that it has taken, in whatever state a fault has left the rest."""
        self.stop_reason = None
        if self.detokenizer is not None:
            self.detokenizer = self.detokenizer.fresh()
            text = self.detokenizer.push(self.token_ids[self.num_prompt_tokens :])
            self._unshown = [text[self._num_chars_shown :]]
        self.end("error", error)

    def take_update(self) -> Update:
        """What has not been shown yet and can be: tokens that a stop string may still take back wait."""
        upto = self.num_output
        if self.finish_reason is None and self.detokenizer is not None:
            upto = min(upto, self.detokenizer.num_settled)
        start, self._num_shown = self._num_shown, max(self._num_shown, upto)
        text = "".join(self._unshown)
        self._unshown.clear()
        self._num_chars_shown += len(text)
        first = self.num_prompt_tokens
        return Update(
            request_id=self.request.request_id,
            index=self.choice,
            text=text,
            token_ids=tuple(self.token_ids[first + start : first + self._num_shown]),
            logprobs=self._logprobs(start, self._num_shown),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )

    def output(self) -> CompletionOutput:
        """The finished choice."""
        statistics = SpeculationStatistics()
        for done in self.passes:
            statistics.add(done.num_tokens, done.num_draft_tokens, done.num_accepted_tokens)
        return CompletionOutput(
            index=self.choice,
            text="" if self.detokenizer is None else self.detokenizer.text,
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            logprobs=self._logprobs(0, self.num_output),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            error=self.error,
            speculation=statistics,
        )

    def _logprobs(self, start: int, stop: int) -> tuple[PositionLogprobs, ...] | None:
        return None if self.request.params.logprobs is None else tuple(self.logprobs[start:stop])
