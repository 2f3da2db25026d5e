"""How speculation is asked for: vLLM's keys, with Hugging Face's names as aliases."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import PacelineError

MAX_DRAFT_TOKENS = 128  # vLLM's bound, too

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
    num_speculative_tokens: int = 4
    """Tokens drafted a step (K); 0 is plain decoding."""
    model: str | None = None
    """The draft model: an alias, a folder, a GGUF file or a Hub id."""
    draft_dtype: str | None = None
    """The draft model's precision; None takes the target's."""
    prompt_lookup_min: int | None = None
    """Shortest n-gram looked up."""
    prompt_lookup_max: int | None = None
    """Longest n-gram looked up."""

    def __post_init__(self) -> None:
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFT_TOKENS)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1, 64)
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
            if found.get("model") is not None:
                found["method"] = "draft_model"
            elif "prompt_lookup_num_tokens" in values or {"prompt_lookup_min", "prompt_lookup_max"} & set(found):
                found["method"] = "ngram"
        return cls(**found)

    def options(self) -> set[str]:
        """The method's own keys that were set."""
        common = {"method", "num_speculative_tokens"}
        return {item.name for item in fields(self) if item.name not in common and getattr(self, item.name) is not None}


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise PacelineError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
