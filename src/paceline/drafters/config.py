"""How speculation is asked for: vLLM's keys, with Hugging Face's names as aliases."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import PacelineError

MAX_DRAFT_TOKENS = 128  # vLLM's bound, too
DEFAULT_DRAFT_TOKENS = 4
DEFAULT_SUFFIX_DEPTH = 24

ALIASES = {
    "num_draft_tokens": "num_speculative_tokens",
    "num_assistant_tokens": "num_speculative_tokens",
    "prompt_lookup_num_tokens": "num_speculative_tokens",
    "assistant_model": "model",
    "draft_model": "model",
    "max_matching_ngram_size": "prompt_lookup_max",
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """`speculative_config`, checked. Raises PacelineError naming the key, its value and its range."""

    method: str = "none"
    num_speculative_tokens: int = DEFAULT_DRAFT_TOKENS
    """Tokens drafted a step (K), at most; 0 is plain decoding. `from_dict` gives suffix its depth, as vLLM does."""
    model: str | None = None
    """The draft model: an alias, a folder, a GGUF file or a Hub id."""
    draft_dtype: str | None = None
    """The draft model's precision; None takes the target's."""
    draft_cache_tokens: int | None = None
    """Rows of all requests together that the draft model's cache may hold; None: as many as the engine can use."""
    prompt_lookup_min: int | None = None
    """Shortest n-gram looked up."""
    prompt_lookup_max: int | None = None
    """Longest n-gram looked up."""
    suffix_decoding_max_tree_depth: int | None = None
    """Most tokens of context that a suffix match looks at; None is 24."""
    suffix_decoding_max_cached_requests: int | None = None
    """Finished requests whose outputs others may draft from; 0 keeps every request to itself, None is 10,000."""
    suffix_decoding_corpus_tokens: int | None = None
    """Tokens of such outputs kept, at most; None is 200,000."""
    suffix_decoding_max_spec_factor: float | None = None
    """A match of m tokens drafts at most factor·m + offset; None is 1."""
    suffix_decoding_max_spec_offset: float | None = None
    """See the factor; None is 0."""
    suffix_decoding_min_token_prob: float | None = None
    """A draft ends before a token less likely than this, going by frequency; None is 0.1."""
    suffix_decoding_min_score: float | None = None
    """No draft of which fewer tokens are expected to be right; None is 0, or 2 if another method comes after it."""
    methods: "tuple[SpeculativeConfig, ...] | None" = None
    """The methods of `composite`, first choice first: names, or mappings like this one's with options of their own."""

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            raise PacelineError(f"method is {self.method!r}; it must be a method's name")
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFT_TOKENS)
        self._check_suffix()
        if self.methods is not None:
            object.__setattr__(self, "methods", _members(self.methods, self.num_speculative_tokens))
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1, 64)
        if self.draft_cache_tokens is not None:
            _check_integer("draft_cache_tokens", self.draft_cache_tokens, 1, 2**31)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise PacelineError(f"prompt_lookup_min is {low} but prompt_lookup_max is {high}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SpeculativeConfig":
        """From `speculative_config={…}`. An unknown key, or a key and its alias together, is refused."""
        known = {item.name for item in fields(cls)}
        found: dict[str, Any] = {}
        for key, value in values.items():
            name = ALIASES.get(key, key)
            if name not in known:
                raise PacelineError(f"speculative_config has no key {key!r}", hint=f"keys: {', '.join(sorted(known))}")
            if name in found:
                raise PacelineError(f"speculative_config gives {name} twice, once as {key!r}")
            found[name] = value
        if "method" not in found:  # as vLLM and transformers do, infer it from what was given
            if found.get("methods") is not None:
                found["method"] = "composite"
            elif found.get("model") is not None:
                found["method"] = "draft_model"
            elif "prompt_lookup_num_tokens" in values or {"prompt_lookup_min", "prompt_lookup_max"} & set(found):
                found["method"] = "ngram"
            elif any(name.startswith("suffix_decoding_") for name in found):
                found["method"] = "suffix"
        if "num_speculative_tokens" not in found:
            found.update(cls._default_draft_tokens(found))
        return cls(**found)

    @classmethod
    def _default_draft_tokens(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        """What a method drafts if it isn't told: suffix up to its depth, composite what its members do."""
        match found.get("method"):
            case "suffix":
                depth = found.get("suffix_decoding_max_tree_depth")
                depth = DEFAULT_SUFFIX_DEPTH if depth is None else depth
                _check_integer("suffix_decoding_max_tree_depth", depth, 1, MAX_DRAFT_TOKENS)
                return {"num_speculative_tokens": depth}
            case "composite" if found.get("methods") is not None:
                methods = _members(found["methods"], None)
                most = max((member.num_speculative_tokens for member in methods), default=DEFAULT_DRAFT_TOKENS)
                return {"methods": methods, "num_speculative_tokens": most}
        return {}

    @property
    def suffix_depth(self) -> int:
        """`suffix_decoding_max_tree_depth` or its default."""
        depth = self.suffix_decoding_max_tree_depth
        return DEFAULT_SUFFIX_DEPTH if depth is None else depth

    def _check_suffix(self) -> None:
        for name, low, high in (
            ("max_tree_depth", 1, MAX_DRAFT_TOKENS),
            ("max_cached_requests", 0, 2**31 - 1),
            ("corpus_tokens", 1, 2**31 - 1),
        ):
            if getattr(self, f"suffix_decoding_{name}") is not None:
                _check_integer(f"suffix_decoding_{name}", getattr(self, f"suffix_decoding_{name}"), low, high)
        for name, least, most in (
            ("max_spec_factor", 0, MAX_DRAFT_TOKENS),
            ("max_spec_offset", -MAX_DRAFT_TOKENS, MAX_DRAFT_TOKENS),
            ("min_token_prob", 0, 1),
            ("min_score", 0, MAX_DRAFT_TOKENS),
        ):
            if getattr(self, f"suffix_decoding_{name}") is not None:
                _check_real(f"suffix_decoding_{name}", getattr(self, f"suffix_decoding_{name}"), least, most)
        factor, offset = self.suffix_decoding_max_spec_factor, self.suffix_decoding_max_spec_offset
        longest = (1 if factor is None else factor) * self.suffix_depth + (offset or 0)
        if longest < 1:
            raise PacelineError(
                f"suffix_decoding_max_spec_factor {factor} and _offset {offset} leave no match a draft of one token",
                hint="factor times matched tokens plus offset is the most that is drafted",
            )
        if self.suffix_decoding_max_cached_requests == 0 and self.suffix_decoding_corpus_tokens is not None:
            raise PacelineError(
                f"suffix_decoding_corpus_tokens is {self.suffix_decoding_corpus_tokens} "
                "but suffix_decoding_max_cached_requests is 0: nothing is kept",
                hint="leave one of the two out",
            )

    def options(self) -> set[str]:
        """The method's own keys that were set."""
        common = {"method", "num_speculative_tokens"}
        return {item.name for item in fields(self) if item.name not in common and getattr(self, item.name) is not None}


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise PacelineError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")


def _check_real(name: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (number and low <= value <= high):  # type: ignore[operator]
        raise PacelineError(f"{name} is {value!r}; it must be a number from {low} to {high}")


def _members(methods: object, num_speculative_tokens: int | None) -> tuple[SpeculativeConfig, ...]:
    """The members of a composite; those given by name alone draft `num_speculative_tokens`, or their own default."""
    if isinstance(methods, str | Mapping) or not isinstance(methods, Iterable):
        raise PacelineError(f"methods is {methods!r}; it must be a list of methods", hint='["suffix", "draft_model"]')
    shared = {} if num_speculative_tokens is None else {"num_speculative_tokens": num_speculative_tokens}
    return tuple(_member(member, shared) for member in methods)


def _member(member: object, shared: Mapping[str, Any]) -> SpeculativeConfig:
    if isinstance(member, SpeculativeConfig):
        return member
    values = {"method": member} if isinstance(member, str) else member
    if not isinstance(values, Mapping):
        raise PacelineError(f"methods holds {member!r}; each must be a method's name, or a mapping")
    own = {ALIASES.get(key, key) for key in values}
    return SpeculativeConfig.from_dict({**{key: shared[key] for key in shared if key not in own}, **values})
