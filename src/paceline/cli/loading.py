"""From options to a model that is ready, and the words about it."""

import argparse
import logging
import sys
import time

import torch

from paceline.cli.answering import plural
from paceline.core.params import SamplingParams
from paceline.core.verify import make_rule
from paceline.drafters.config import SpeculativeConfig
from paceline.errors import PacelineError
from paceline.models.home import Progress, silent
from paceline.models.load import LoadedModel, load_model
from paceline.models.progress import terminal_progress
from paceline.models.tokenizer import Tokenizer


def load(args: argparse.Namespace, packed: bool = True) -> LoadedModel:
    """`packed`: see `load_model`."""
    show_notices()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return load_model(
        args.model,
        dtype=args.dtype,
        device=("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device,
        max_context=args.max_context,
        progress=PatientProgress(terminal_progress()),
        packed=packed,
    )


def require_tokenizer(model: LoadedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise PacelineError(
            f"model {model.name} has no tokenizer", hint="put the model's tokenizer.json into its folder"
        )
    return model.tokenizer


class PatientProgress:
    """Hands on what takes longer than a second: of a start from prepared weights there is nothing to tell."""

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        self._what: str | None = None
        self._since = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if what != self._what:
            self._what, self._since = what, now
        if now - self._since > 1:
            self._inner(what, done, total)


def measuring_progress() -> Progress:
    """For a person who waits: two seconds are nothing to note in a log."""
    return PatientProgress(terminal_progress()) if sys.stderr.isatty() else silent


class Notices(logging.Formatter):
    """`warning: …`, as errors are `error: …`."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"


def show_notices() -> None:
    """What the library logs goes to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Notices())
    logging.getLogger("paceline").handlers[:] = [handler]


def method_name(speculation: SpeculativeConfig) -> str:
    """As a banner shows it."""
    if not speculation.drafts:
        return "none"
    if speculation.method == "auto":
        members = [member.method for member in speculation.methods or ()]
        return f"auto of {', '.join(members)}" if members else "auto"
    names = " then ".join(member.method for member in speculation.methods or (speculation,))
    return f"{names}, K = {speculation.num_speculative_tokens}"


def banner(model: LoadedModel, speculation: SpeculativeConfig, params: SamplingParams, rule: str) -> str:
    """One line: what runs, how it was loaded, what it promises."""
    device = str(model.decoder.device)
    if device == "cpu":
        device += f" ({plural(torch.get_num_threads(), 'thread')})"
    parts = [
        model.name,
        model.treatment,
        device,
        f"exact: {model.exactness.exact}",
        f"method: {method_name(speculation)}",
        "greedy" if params.is_greedy else f"temperature {params.temperature:g} · seed: {params.seed}",
    ]
    if not make_rule(rule).lossless:
        parts.append(f"NOT LOSSLESS: rule {rule} lets other tokens stand than the model's own")
    return " · ".join(parts)
