"""Typed access to a GGUF file's metadata: a value of another type than its key's is named, never used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.values import is_finite, shown

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Metadata:
    """The keys that begin with `prefix`, which errors give whole, with the file. None is an absent key."""

    path: Path
    values: Mapping[str, Any]
    prefix: str

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def text(self, key: str) -> str | None:
        value: str | None = self._typed(key, "a text", _is_text)
        return value

    def texts(self, key: str) -> list[str] | None:
        value: list[str] | None = self._typed(key, "a list of texts", _list_of(_is_text))
        return value

    def whole(self, key: str) -> int | None:
        value: int | None = self._typed(key, "a whole number", _is_whole)
        return value

    def wholes(self, key: str) -> list[int] | None:
        value: list[int] | None = self._typed(key, "a list of whole numbers", _list_of(_is_whole))
        return value

    def reals(self, key: str) -> list[float] | None:
        value: list[float] | None = self._typed(key, "a list of numbers", _list_of(_is_finite))
        return value

    def flag(self, key: str) -> bool | None:
        value: bool | None = self._typed(key, "true or false", lambda value: isinstance(value, bool))
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number that is the same for all layers; raises if absent without a default."""
        value = self._of_all_layers(key, default)
        if not _is_whole(value) or not 0 < value <= _MOST:
            raise self.refusal(key, f"is {shown(value)}, not a positive whole number")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number, likewise."""
        value = self._of_all_layers(key, default)
        if not _is_finite(value) or value <= 0:
            raise self.refusal(key, f"is {shown(value)}, not a positive number")
        return float(value)

    def required(self, key: str, value: Any) -> Any:
        """`value`, which was read from `key`; raises if there is none."""
        if not value:
            raise PacelineError(f"{self.path}: metadata key '{self.prefix}{key}' is missing")
        return value

    def refusal(self, key: str, why: str) -> PacelineError:
        return PacelineError(f"{self.path}: '{self.prefix}{key}' {why}")

    def _typed(self, key: str, kind: str, fits: Callable[[Any], bool]) -> Any:
        value = self.get(key)
        if value is not None and not fits(value):
            raise self.refusal(key, f"is {shown(value)}, not {kind}")
        return value

    def _of_all_layers(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            if default is None:
                self.required(key, None)
            return default
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise self.refusal(key, "differs between layers, which is not supported")
        return value[0]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_finite(value: Any) -> bool:
    return is_finite(value)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))
