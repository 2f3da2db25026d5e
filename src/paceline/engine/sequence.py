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


@dataclass(frozen=True, slots=True)
class End:
    """How a sequence ended. No reason: it goes on."""

    reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


GOES_ON = End()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. Its cache holds the first rows of `token_ids`; the last one is never among them.

    A put-back sequence is the same object with an empty cache: its tokens, its noise and its draws stay.
    What belongs together changes in one assignment, so that no interruption can part it; the text follows (`reread`).
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
    end: End = GOES_ON
    end_shown: bool = False
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
    def ended(self) -> bool:
        return self.end.reason is not None

    @property
    def private_drafts(self) -> bool:
        return self.request.private_drafts

    def cut(self, tokens: Ids[int], finish_reason: str | None) -> tuple[int, End]:
        """How many tokens of a pass are kept, and whether they end the answer: for this reason, or at a stop string.

        A stop string cuts after the token that completed it. It may come to light late, when text was held back for
        one that began before it: then tokens of earlier passes go too, and the number is negative.
        """
        by_token = finish_reason == "stop" and tokens[-1] in self.request.params.stop_token_ids
        end = End(finish_reason, tokens[-1] if by_token else None)
        if self.detokenizer is None:
            return len(tokens), end
        self._unshown.append(self.detokenizer.push(tokens))
        if finish_reason is not None:
            self._unshown.append(self.detokenizer.flush())
        match = self.detokenizer.match
        if match is None:
            return len(tokens), end
        return match.num_tokens - self.num_output, End("stop", match.stop)

    def extend(self, tokens: Ids[int], done: Pass, logprobs: Ids[PositionLogprobs], end: End) -> None:
        """Take what is kept of a pass."""
        sampler = self.sampler.advance(*tokens)  # a constraint may raise
        ids, known, passes = self.token_ids, self.logprobs, self.passes
        n, k, p = len(ids), len(known), len(passes)
        ids[n:], known[k:], passes[p:], self.sampler, self.end = tokens, logprobs, (done,), sampler, end

    def take_back(self, num_tokens: int, end: End) -> None:
        """Forget the newest tokens, and the passes and logprobs that were theirs."""
        left = self.num_output - num_tokens
        first, passes = self.num_prompt_tokens + left, self._first_passes(left)
        self.token_ids[first:], self.logprobs[left:], self.passes, self.end = (), (), passes, end

    def _first_passes(self, num_tokens: int) -> list[Pass]:
        passes: list[Pass] = []
        for done in self.passes:
            kept = min(done.num_tokens, num_tokens)
            num_tokens -= kept
            if kept > 0:
                passes.append(Pass(kept, done.num_draft_tokens, min(kept, done.num_accepted_tokens)))
        return passes

    def finish(self, reason: str, error: str | None = None) -> None:
        """End it from outside, in whatever state a fault has left it: the tokens that it has taken stand.

        A stop string that was still in question counts, and then there was no fault.
        """
        self.reread()
        kept, end = self.cut((), reason)
        self.take_back(-kept, end if end.stop_reason is not None else End(reason, error=error))

    def reread(self) -> None:
        """The text anew from the tokens: whatever was cut short may have left it behind them, or ahead."""
        if self.detokenizer is not None:
            detokenizer = self.detokenizer.fresh()
            text = detokenizer.push(self.token_ids[self.num_prompt_tokens :])
            text += detokenizer.flush() if self.ended else ""
            self.detokenizer, self._unshown = detokenizer, [text[self._num_chars_shown :]]

    def show(self, updates: list[Update]) -> None:
        """Add what has not been shown yet and can be: tokens that a stop string may still take back wait."""
        upto, end = self.num_output, self.end
        if self.detokenizer is not None and not self.ended:
            upto = min(upto, self.detokenizer.num_settled)
        start, upto = self._num_shown, max(self._num_shown, upto)
        text = "".join(self._unshown)
        first = self.num_prompt_tokens
        update = Update(
            request_id=self.request.request_id,
            index=self.choice,
            text=text,
            token_ids=tuple(self.token_ids[first + start : first + upto]),
            logprobs=self._logprobs(start, upto),
            finish_reason=end.reason,
            stop_reason=end.stop_reason,
            error=end.error,
        )
        n, chars, over = len(updates), self._num_chars_shown + len(text), self.ended
        updates[n:], self._num_shown, self._num_chars_shown, self._unshown, self.end_shown = (
            [update],
            upto,
            chars,
            [],
            over,
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
            finish_reason=self.end.reason or "abort",
            stop_reason=self.end.stop_reason,
            error=self.end.error,
            speculation=statistics,
        )

    def _logprobs(self, start: int, stop: int) -> tuple[PositionLogprobs, ...] | None:
        return None if self.request.params.logprobs is None else tuple(self.logprobs[start:stop])
