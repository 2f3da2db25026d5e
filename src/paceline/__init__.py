"""Paceline: lossless speculative decoding of language models."""

from paceline.errors import PacelineError

__version__ = "0.1.0"

__all__ = ["PacelineError", "__version__"]
