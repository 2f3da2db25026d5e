"""What is asked for, and whether it can be: `Intake` turns a prompt, parameters and options into a `Request`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.constraint import TokenConstraint
from paceline.core.params import SamplingParams
from paceline.core.rng import draw_seed
from paceline.core.stopping import check_end_tokens, token_limit
from paceline.core.verify import RULES, Rule, make_rule
from paceline.drafters.base import Drafter, check_rule
from paceline.drafters.config import MAX_DRAFT_TOKENS
from paceline.errors import PacelineError
from paceline.models.config import ModelConfig
from paceline.ops.attention import BLOCK
from paceline.values import is_whole, shown

# Choices that a request may ask for. All are made where its prompt ends, and wait for seats: many more than these, and
# keeping count of them takes as long as a pass of a small model (vLLM's bound is 16,384).
MAX_CHOICES = 4096


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
            check_whole(name, getattr(self, name), 1)
        check_whole("prefix_cache_blocks", self.prefix_cache_blocks, 0)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How one request is sped up. Under a lossless rule nothing here changes what comes out.

    Raises PacelineError for a value of the wrong kind; whether the engine has the method is its own to say.
    """

    speculative: bool = True
    method: str | None = None  # one of the engine's drafters; None: its own
    num_speculative_tokens: int | None = None  # None: the method's
    rule: str | Rule = "coupled"  # by name, or with parameters of its own
    constraint: TokenConstraint | None = None
    private_drafts: bool = False  # no other request drafts from its text, nor it from another's

    def __post_init__(self) -> None:
        check_flag("speculative", self.speculative)
        check_flag("private_drafts", self.private_drafts)
        if self.method is not None and not isinstance(self.method, str):
            raise PacelineError(
                f"method is {shown(self.method)}; it must be a method's name", hint="`paceline methods`"
            )
        if not isinstance(self.rule, str) and not has_methods(self.rule, "verify", "target_rows", "draft_sampler"):
            raise PacelineError(
                f"rule is {shown(self.rule)}; it must be a rule's name", hint=f"one of: {', '.join(RULES)}"
            )
        if self.constraint is not None and not has_methods(self.constraint, "start", "advance", "allowed"):
            raise PacelineError(
                f"constraint is {shown(self.constraint)}; it must be a TokenConstraint",
                hint="an object with start(), advance(state, token) and allowed(state), or None",
            )
        if self.num_speculative_tokens is not None:
            check_draft_tokens(self.num_speculative_tokens)


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request. `limit`: tokens it may generate; `stop_ids` end it; `seed` is set, drawn if need be."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    limit: int
    stop_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    rule: Rule
    drafter: Drafter | None = None  # None: it is decoded plainly
    num_draft_tokens: int = 0
    constraint: TokenConstraint | None = None
    private_drafts: bool = False
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class _Method:
    drafter: Drafter | None
    num_draft_tokens: int  # a step, where a request does not say


class Intake:
    """Knows what the engine has to offer: a model, room, a tokenizer or none, and drafting methods by name."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, eos_token_ids: tuple[int, ...], has_text: bool, method: str
    ) -> None:
        if config.max_model_len > model.max_context:
            raise PacelineError(
                f"max_model_len is {shown(config.max_model_len)}, and the model has {model.max_context} positions",
                hint="lower max_model_len",
            )
        check_end_tokens(eos_token_ids, model.vocab_size)
        self._vocab_size = model.vocab_size
        self._config = config
        self._eos_token_ids = eos_token_ids
        self._has_text = has_text
        self._default = method
        self._methods = {"none": _Method(None, 0)}

    def check_offer(self, name: str, num_draft_tokens: int) -> None:
        """Raise PacelineError for a name that no request could give, or a K that cannot be."""
        check_kind("method", name, str, "a method's name")
        if name in ("", "none") or name != name.strip() or not name.isprintable():
            raise PacelineError(
                f"method {shown(name)} cannot be a drafter's name",
                hint='one line without spaces around it; "none" is plain decoding',
            )
        check_draft_tokens(num_draft_tokens)

    def offer(self, name: str, drafter: Drafter, num_draft_tokens: int) -> None:
        """From now on requests may name this method."""
        self._methods[name] = _Method(drafter, num_draft_tokens)

    def request(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        prompt: str | None,
    ) -> Request:
        """Raises PacelineError, one line, for what can never be answered."""
        check_list("prompt_ids", prompt_ids)
        check_kind("the sampling parameters", params, SamplingParams, "SamplingParams")
        check_kind("the options", options, RequestOptions, "RequestOptions")
        check_kind("prompt", prompt, str | None, "the prompt's text, or None")
        limit = token_limit(len(prompt_ids), params, self._config.max_model_len)
        self._check_prompt(prompt_ids)
        if params.n > MAX_CHOICES:
            raise PacelineError(
                f"n is {shown(params.n)}; it must be at most {MAX_CHOICES}", hint="ask for more in several requests"
            )
        self._check_room(len(prompt_ids) + limit)
        params.check_vocabulary(self._vocab_size)
        if params.stop and not self._has_text:
            raise PacelineError("stop strings need a tokenizer, and the model has none", hint="use stop_token_ids")
        method = self._method(options)
        count = options.num_speculative_tokens
        count = method.num_draft_tokens if count is None else count
        drafter = method.drafter if count else None
        eos = frozenset() if params.ignore_eos else frozenset(self._eos_token_ids)
        return Request(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            seed=draw_seed() if params.seed is None else params.seed,
            limit=limit,
            stop_ids=frozenset(params.stop_token_ids) | eos,
            eos_token_ids=self._eos_token_ids,
            rule=_checked_rule(options.rule, drafter),
            drafter=drafter,
            num_draft_tokens=count,
            constraint=options.constraint,
            private_drafts=options.private_drafts,
            prompt=prompt,
        )

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        for token in prompt_ids:
            if not is_whole(token):
                raise PacelineError(f"the prompt holds {shown(token)}", hint="give token ids: whole numbers, as int")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocab_size:
            strange = next(token for token in prompt_ids if not 0 <= token < self._vocab_size)
            raise PacelineError(
                f"the prompt holds token {shown(strange)} and the vocabulary has {self._vocab_size} tokens"
            )

    def _check_room(self, num_tokens: int) -> None:
        needed = -(-(num_tokens - 1) // BLOCK)  # the newest token has no row
        if needed > self._config.num_kv_blocks:
            raise PacelineError(
                f"the request may need {needed} KV blocks, but there are {self._config.num_kv_blocks} of them",
                hint="lower max_tokens, shorten the prompt, or give the KV cache more memory",
            )

    def _method(self, options: RequestOptions) -> _Method:
        name = options.method
        if name is None:
            name = self._default if options.speculative else "none"
        if name not in self._methods:
            raise PacelineError(
                f"method {shown(name)} is not loaded", hint=f"this engine has: {', '.join(self._methods)}"
            )
        return self._methods[name if options.speculative else "none"]


def check_whole(name: str, value: object, least: int) -> None:
    """Raise PacelineError unless a setting is a whole number of at least `least`."""
    if not is_whole(value):
        raise PacelineError(f"{name} is {shown(value)}; it must be a whole number", hint=f"{least} or more")
    if value < least:
        raise PacelineError(f"{name} is {shown(value)}; it must be {least} or more")


def check_kind(name: str, value: object, kind: Any, words: str) -> None:
    """Raise PacelineError unless a setting is of a kind; `words` tell a person which."""
    if not isinstance(value, kind):
        raise PacelineError(
            f"{name} is {shown(value)}; it must be {words}", hint=f"it is of type {type(value).__name__}"
        )


def check_method(name: object, known: Sequence[str]) -> None:
    """Raise PacelineError unless a setting is a method's name, one of those known."""
    check_kind("method", name, str, "a method's name")
    if name not in known:
        raise PacelineError(f"unknown method {shown(name)}", hint=f"one of: {', '.join(dict.fromkeys(known))}")


def check_list(name: str, value: object) -> None:
    """Raise PacelineError unless a setting is a list or its like; what it holds is another question."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise PacelineError(f"{name} is {shown(value)}; it must be a list", hint="of token ids: whole numbers, as int")


def check_flag(name: str, value: object) -> None:
    """Raise PacelineError unless a setting is True or False."""
    if not isinstance(value, bool):
        raise PacelineError(f"{name} is {shown(value)}; it must be True or False")


def check_draft_tokens(count: object) -> None:
    if not is_whole(count) or not 0 <= count <= MAX_DRAFT_TOKENS:
        raise PacelineError(
            f"num_speculative_tokens is {shown(count)}; it must be a whole number from 0 to {MAX_DRAFT_TOKENS}"
        )


def has_methods(value: object, *names: str) -> bool:
    """An object that has them, not a class of such objects."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in names)


def _checked_rule(rule: str | Rule, drafter: Drafter | None) -> Rule:
    rule = make_rule(rule) if isinstance(rule, str) else rule
    if drafter is not None:
        check_rule(rule, drafter)
    return rule
