"""Paceline: lossless speculative decoding of language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.core.params import SamplingParams
    from paceline.engine.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "PacelineError", "SamplingParams", "__version__"]

# Imported when asked for: the command line must start without torch.
_LAZY = {"LLM": "paceline.engine.llm", "SamplingParams": "paceline.core.params"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
