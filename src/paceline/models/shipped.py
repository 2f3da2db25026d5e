"""Heads that come with the package, each for one target and in any precision of it: `heads/<model>/<method>/`.

Which target a head is for is what its folder says of it; the folders' names are for people.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a command line that only reads its arguments does without torch
    from paceline.models.config import ModelConfig
    from paceline.models.head_search import FoundHead
    from paceline.models.load import LoadedModel

FOLDER = Path(__file__).parents[1] / "heads"
EVALUATION = "evaluation.json"  # beside a head: how it did when it was trained


def shipped_methods() -> frozenset[str]:
    """Methods that there is a head for, whosever it is. Reads names alone."""
    return frozenset(path.parent.name for path in FOLDER.glob("*/*/config.json"))


def heads_for(config: "ModelConfig", weights: Callable[[], str]) -> list["FoundHead"]:
    """Heads for the target whose weights have this fingerprint, which is asked for only where shapes fit."""
    from paceline.models.head_search import find_heads
    from paceline.models.origin import written_origin

    of_its_shape = [head for head in find_heads(sorted(FOLDER.glob("*")), config) if head.misfit is None]
    if not of_its_shape:
        return []
    own = weights()
    origins = ((head, written_origin(str(head.path))) for head in of_its_shape)
    return [head for head, origin in origins if origin is not None and origin.weights == own]


def shipped_heads(target: "LoadedModel") -> Mapping[str, str]:
    """The folder of each method's head for this very target; none for any other, nor with another tokenizer."""
    from paceline.models.origin import Origin, written_origin

    heads = heads_for(target.config, target.source.fingerprint)
    own = Origin.of(target) if heads else None
    return {
        head.kind: str(head.path)
        for head in heads
        if own is not None and (origin := written_origin(str(head.path))) and origin.tokenizer == own.tokenizer
    }


def shipped_head(method: str, target: "LoadedModel") -> str | None:
    """The folder of the method's head for this target, if the package has one."""
    return shipped_heads(target).get(method) if method in shipped_methods() else None


def evaluated_acceptance(head: str) -> tuple[float, ...]:
    """How often each token of its chains was accepted, those before it being right; () if nobody has looked."""
    try:
        value = json.loads((Path(head) / EVALUATION).read_text(encoding="utf-8"))
        return tuple(min(1.0, max(0.0, float(rate))) for rate in value["acceptance_by_position"])
    except (OSError, ValueError, TypeError, KeyError):
        return ()
