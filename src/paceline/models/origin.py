"""Which target a head was trained for, written into its folder: with any other it would only seldom be right."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.models.load import LoadedModel
from paceline.models.tokenizer import Tokenizer

FORMAT = 1
KEY = "paceline"
"""Of a head's config.json: what our own format says besides."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A target, by the weights as they are stored and by its tokenizer's vocabulary; `name` is for people."""

    name: str
    weights: str
    tokenizer: str | None

    @classmethod
    def of(cls, model: LoadedModel) -> "Origin":
        tokenizer = None if model.tokenizer is None else tokenizer_fingerprint(model.tokenizer)
        return cls(model.name, model.source.fingerprint(), tokenizer)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Of the tokens in id order."""
    return hashlib.sha256("\n".join(tokenizer.token_strings()).encode("utf-8", "surrogatepass")).hexdigest()


def check_origin(head: str, target: LoadedModel) -> None:
    """Refuse a head in our format that was trained for another target. Of others nobody can tell.

    Raises PacelineError.
    """
    origin = written_origin(head)
    if origin is None:
        return
    actual = Origin.of(target)
    if (origin.weights, origin.tokenizer) != (actual.weights, actual.tokenizer):
        what = "weights" if origin.weights != actual.weights else "tokenizer"
        raise PacelineError(
            f"{head} was trained for {origin.name}, and {target.name} has other {what}",
            hint=f"train one for it: `paceline train`; or load {origin.name}, in any precision",
        )


def written_origin(head: str) -> Origin | None:
    """What a head's folder says of its target; None where it says nothing."""
    path = Path(head).expanduser() / "config.json"
    try:
        own = json.loads(path.read_text(encoding="utf-8")).get(KEY)
        return None if own is None else Origin(**own["target"])
    except OSError:
        return None  # a Hub id, or no head at all: whoever reads it will say so
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise PacelineError(f"{path} does not say which target the head is for: {error}") from error


def own_settings(config: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """Our part of a head's config.json, None if it is in another format. Raises PacelineError if it is newer."""
    own = config.get(KEY)
    if own is not None and own.get("format") != FORMAT:
        raise PacelineError(
            f"{where}: the head is of format {own.get('format')}, this version reads {FORMAT}", hint="update Paceline"
        )
    return own
