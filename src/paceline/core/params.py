"""What a request may ask of sampling: vLLM's names and defaults, every value checked when it is given."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.errors import PacelineError
from paceline.values import elements, is_finite, is_whole, shown

ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "eos_token_id": "stop_token_ids",
    "stop_strings": "stop",
    "bad_words_ids": "bad_words",
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. A bad value raises PacelineError with its name, value and range."""

    temperature: float = 1.0
    """0 is greedy: the arg-max, whatever top_p, top_k and min_p say."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens that hold this share of the probability; 1 is off."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 and -1 are off, 1 is greedy."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest; 0 is off."""
    seed: int | None = None
    """None: one is drawn for the request and returned."""
    n: int = 1
    """Number of choices."""
    max_tokens: int | None = None
    """None: up to the context's end."""
    min_tokens: int = 0
    """No stop token before this many tokens."""
    stop: Sequence[str] = ()
    """Strings that end the text; one string or several."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the text, besides the model's own."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-sequence tokens."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to a token's logit, -100 to 100."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token already generated."""
    frequency_penalty: float = 0.0
    """Taken off once for each time the token was generated."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it (multiplied where negative)."""
    bad_words: Sequence[str | Sequence[int]] = ()
    """What must not be generated: texts (their tokens, at a text's start and after a space) or token sequences."""
    logprobs: int | None = None
    """Report the chosen token's log-probability and this many of the likeliest; None is off."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop)
        words = tuple(
            word if isinstance(word, str) else _listed("bad_words: a word", word)
            for word in ((self.bad_words,) if isinstance(self.bad_words, str) else _listed("bad_words", self.bad_words))
        )
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "bad_words", words)
        object.__setattr__(self, "logit_bias", _mapped("logit_bias", self.logit_bias))
        self._check_numbers()
        self._check_tokens()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise PacelineError(f"min_tokens is {shown(self.min_tokens)} but max_tokens is {shown(self.max_tokens)}")
        if self.n > 1 and self.is_greedy:
            raise PacelineError(
                f"n is {shown(self.n)} but the request is greedy: all choices would be equal",
                hint="set temperature above 0 (and top_k to 0 or above 1), or n to 1",
            )

    @property
    def is_greedy(self) -> bool:
        """True when the next token is the arg-max: temperature 0, or equivalently top_k 1."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """True when a distribution depends on which tokens came before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def bad_word_ids(self) -> tuple[tuple[int, ...], ...]:
        """The token sequences among `bad_words`; `with_bad_words` makes all of them that."""
        return tuple(tuple(word) for word in self.bad_words if not isinstance(word, str))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """From JSON, say: these names or Hugging Face's. Raises PacelineError for another, or for one given twice."""
        if not isinstance(values, Mapping):
            raise PacelineError(
                f"sampling parameters are {shown(values)}; they must be a mapping", hint='{"temperature": 0}'
            )
        given: dict[str, Any] = {}
        for key, value in values.items():
            name = ALIASES.get(key, key)
            if name in given:
                raise PacelineError(f"{name} is given twice: {key} is another name for it")
            given[name] = [value] if key == "eos_token_id" and isinstance(value, int) else value
        sampling = given.pop("do_sample", True)
        if not isinstance(sampling, bool):
            raise PacelineError(f"do_sample is {shown(sampling)}; it must be true or false")
        known = [field.name for field in fields(cls)]
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise PacelineError(
                f"unknown sampling parameter {shown(unknown)}",
                hint=f"known: {', '.join([*known, *ALIASES, 'do_sample'])}",
            )
        if not sampling:
            temperature = given.get("temperature")
            if temperature is not None:
                _check_real("temperature", temperature, 0, math.inf)
            if temperature:
                raise PacelineError(f"do_sample is false and temperature is {shown(temperature)}: leave one out")
            given["temperature"] = 0.0
        return cls(**given)

    def with_bad_words(self, token_ids: Callable[[str], Sequence[Sequence[int]]]) -> "SamplingParams":
        """The same, with the token sequences of each text in `bad_words` in its place."""
        words = (token_ids(word) if isinstance(word, str) else (word,) for word in self.bad_words)
        return replace(self, bad_words=[ids for spellings in words for ids in spellings])

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise PacelineError if a parameter names a token id outside the model's vocabulary, or still a text."""
        text = next((word for word in self.bad_words if isinstance(word, str)), None)
        if text is not None:
            raise PacelineError(
                f"bad_words holds the text {shown(text)} and there is no tokenizer", hint="give token ids"
            )
        named = {
            "logit_bias": list(self.logit_bias),
            "stop_token_ids": list(self.stop_token_ids),
            "bad_words": [token for word in self.bad_word_ids for token in word],
        }
        for name, ids in named.items():
            if ids and max(ids) >= vocab_size:
                raise PacelineError(f"{name} names token {shown(max(ids))} and the vocabulary has {vocab_size} tokens")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise PacelineError(f"logprobs is {shown(self.logprobs)} and the vocabulary has {vocab_size} tokens")

    def _check_numbers(self) -> None:
        _check_real("temperature", self.temperature, 0, math.inf)
        _check_real("top_p", self.top_p, 0, 1, above=True)
        _check_real("min_p", self.min_p, 0, 1)
        _check_real("presence_penalty", self.presence_penalty, -2, 2)
        _check_real("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_real("repetition_penalty", self.repetition_penalty, 0, math.inf, above=True)
        _check_integer("top_k", self.top_k, -1)
        _check_integer("n", self.n, 1)
        _check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**64 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise PacelineError(f"ignore_eos is {shown(self.ignore_eos)}; it must be true or false")

    def _check_tokens(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise PacelineError(f"stop holds {shown(text)}; each must be a string, not an empty one")
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids: a token id", token, 0)
        for token, bias in self.logit_bias.items():
            _check_integer("logit_bias: a token id", token, 0)
            _check_real(f"logit_bias of token {shown(token)}", bias, -100, 100)
        for word in self.bad_words:
            if not word:
                raise PacelineError("bad_words holds an empty word; each must have one token or more")
            for token in () if isinstance(word, str) else word:
                _check_integer("bad_words: a token id", token, 0)


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """A copy nobody else holds; None, which is vLLM's way to say nothing, is empty."""
    if value is None:
        return ()
    if (listed := elements(value)) is None:
        raise PacelineError(f"{name} is {shown(value)}; it must be a list")
    return listed


def _mapped(name: str, value: Any) -> dict[Any, Any]:
    try:
        return {} if value is None else dict(value)
    except (TypeError, ValueError):
        raise PacelineError(f"{name} is {shown(value)}; it must map token ids to numbers") from None


def _check_real(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    """`low` to `high`, `low` itself excluded where `above`; infinity is never a value."""
    if is_finite(value) and low <= value <= high and not (above and value == low):
        return
    lower = f"above {low}" if above else f"at least {low}"
    upper = "" if high == math.inf else f" and at most {high}"
    raise PacelineError(f"{name} is {shown(value)}; it must be a number {lower}{upper}")


def _check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if is_whole(value) and value >= low and (high is None or value <= high):
        return
    upper = "" if high is None else f" and at most {high}"
    raise PacelineError(f"{name} is {shown(value)}; it must be a whole number, at least {low}{upper}")
