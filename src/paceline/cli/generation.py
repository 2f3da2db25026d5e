"""What `paceline generate` does once its arguments are known to be good."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch

from paceline.cli.main import EXIT_INTERRUPTED
from paceline.core.params import SamplingParams
from paceline.core.rng import draw_seed
from paceline.core.stopping import token_limit
from paceline.decode import Step, decode
from paceline.drafters.base import METHODS, Drafter, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.engine.detokenize import IncrementalDetokenizer
from paceline.engine.statistics import SpeculationStatistics
from paceline.errors import PacelineError
from paceline.models.home import Progress
from paceline.models.load import LoadedModel, load_model
from paceline.models.progress import terminal_progress
from paceline.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished or interrupted answer, cut at its stop string if it met one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop", "length" or "interrupted"
    num_prompt_tokens: int
    prefill_s: float
    decode_s: float
    statistics: SpeculationStatistics

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.decode_s if self.decode_s else 0.0


def generate(args: argparse.Namespace, prompt: str, params: SamplingParams, speculation: SpeculativeConfig) -> int:
    for member in (speculation, *(speculation.methods or ())):
        check_method(member.method)
    if args.threads is not None:
        set_threads(args.threads)
    model = load_model(
        args.model,
        dtype=args.dtype,
        device=default_device() if args.device == "auto" else args.device,
        max_context=args.max_context,
        progress=PatientProgress(terminal_progress()),
    )
    tokenizer = require_tokenizer(model)
    prompt_ids = encode_prompt(tokenizer, prompt, args.system, args.raw)
    token_limit(len(prompt_ids), params, model.config.max_context)  # refuse a long prompt before loading a draft model
    if speculation.num_speculative_tokens == 0:
        speculation = SpeculativeConfig(method="none", num_speculative_tokens=0)
    drafter = create_drafter(speculation, model)
    params = replace(params, seed=draw_seed() if params.seed is None else params.seed)

    for line in (*model.notes, banner(model, speculation, params)):
        print(line, file=sys.stderr)
    show = hide if args.json else write
    answer = decode_text(model, tokenizer, prompt_ids, params, drafter, speculation.num_speculative_tokens, show)
    if args.json:
        print(json.dumps(as_json(answer, model, params)))
    else:
        print(flush=True)
    if args.stats:
        print(statistics_line(answer), file=sys.stderr)
    if answer.finish_reason == "interrupted":
        print(f"interrupted after {len(answer.token_ids)} tokens", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def check_method(method: str) -> None:
    """Refuse an unknown method before a model is loaded for it."""
    if method not in METHODS:
        near = get_close_matches(method, METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise PacelineError(f"unknown method {method!r}", hint=f"{hint}the methods are {', '.join(METHODS)}")


def set_threads(count: int) -> None:
    if count < 1:
        raise PacelineError(f"--threads is {count}; it must be 1 or more")
    torch.set_num_threads(count)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_tokenizer(model: LoadedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise PacelineError(
            f"model {model.name} has no tokenizer", hint="put the model's tokenizer.json into its folder"
        )
    return model.tokenizer


def encode_prompt(tokenizer: Tokenizer, prompt: str, system: str | None, raw: bool) -> list[int]:
    if raw:
        return tokenizer.encode(prompt, add_special=True)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}])


def decode_text(
    model: LoadedModel,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    drafter: Drafter,
    num_draft_tokens: int,
    show: Callable[[str], None],
) -> Answer:
    """Decode, showing the text as it settles. Ctrl-C ends the answer, not the program."""
    detokenizer = IncrementalDetokenizer(tokenizer, params.stop)
    steps: list[Step] = []
    progress = PrefillProgress()
    start = time.perf_counter()
    try:
        for step in decode(model.decoder, prompt_ids, params, drafter, num_draft_tokens, on_prefill=progress):
            steps.append(step)
            show(detokenizer.push(step.token_ids))
            if detokenizer.match is not None:
                break
        finish_reason = "stop" if detokenizer.match is not None else steps[-1].finish_reason or "length"
    except KeyboardInterrupt:
        finish_reason = "interrupted"
    end = time.perf_counter()
    show(detokenizer.flush())
    match = detokenizer.match
    if match is not None:  # it may have come to light only now, at the end
        finish_reason = "stop"
        steps = cut_steps(steps, match.num_tokens)
    prefilled = progress.finished or start
    return Answer(
        text=detokenizer.text,
        token_ids=tuple(token for step in steps for token in step.token_ids),
        finish_reason=finish_reason,
        num_prompt_tokens=len(prompt_ids),
        prefill_s=prefilled - start,
        decode_s=end - prefilled,
        statistics=count(steps),
    )


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


class PrefillProgress:
    """Tells a person at a terminal how far a long prompt is, and notes when it was done."""

    def __init__(self) -> None:
        self.finished: float | None = None
        self._start = time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        slow = time.perf_counter() - self._start > 1
        if slow and sys.stderr.isatty():
            print(
                f"\rprompt: {done} of {total} tokens",
                end="\r\n" if done == total else "",
                file=sys.stderr,
                flush=True,
            )
        if done == total:
            self.finished = time.perf_counter()


def cut_steps(steps: Sequence[Step], num_tokens: int) -> list[Step]:
    """The steps that yielded the first `num_tokens` tokens, the last one cut to fit."""
    kept: list[Step] = []
    for step in steps:
        if num_tokens == 0:
            break
        ids = step.token_ids[:num_tokens]
        kept.append(replace(step, token_ids=ids, num_accepted_tokens=min(step.num_accepted_tokens, len(ids))))
        num_tokens -= len(ids)
    return kept


def count(steps: Sequence[Step]) -> SpeculationStatistics:
    statistics = SpeculationStatistics()
    for step in steps:
        statistics.add(len(step.token_ids), step.num_draft_tokens, step.num_accepted_tokens)
    return statistics


def banner(model: LoadedModel, speculation: SpeculativeConfig, params: SamplingParams) -> str:
    """One line: what runs, how it was loaded, what it promises."""
    device = str(model.decoder.device)
    if device == "cpu":
        device += f" ({torch.get_num_threads()} threads)"
    method = " then ".join(member.method for member in speculation.methods or (speculation,))
    if speculation.method != "none":
        method += f", K = {speculation.num_speculative_tokens}"
    parts = [
        model.name,
        f"{model.precision} weights and activations",
        device,
        f"exact: {model.exactness.exact}",
        f"method: {method}",
        f"seed: {params.seed}",
    ]
    return " · ".join(parts)


def statistics_line(answer: Answer) -> str:
    statistics = answer.statistics
    parts = [
        f"{len(answer.token_ids)} tokens",
        f"{answer.tokens_per_second:.1f} tokens/s",
        f"acceptance length {statistics.mean_acceptance_length:.2f}",
        f"acceptance rate {100 * statistics.draft_acceptance_rate:.0f} % "
        f"({statistics.num_accepted_tokens} of {statistics.num_draft_tokens})",
        f"{statistics.num_steps} passes",
        answer.finish_reason,
    ]
    return " · ".join(parts)


def as_json(answer: Answer, model: LoadedModel, params: SamplingParams) -> dict[str, Any]:
    statistics = answer.statistics
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": len(answer.token_ids),
            "total_tokens": answer.num_prompt_tokens + len(answer.token_ids),
        },
        "timings": {
            "load_s": model.load_seconds,
            "prefill_s": answer.prefill_s,
            "decode_s": answer.decode_s,
            "tokens_per_second": answer.tokens_per_second,
        },
        "exact": model.exactness.exact,
        "seed": params.seed,
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": statistics.mean_acceptance_length,
                "draft_acceptance_rate": statistics.draft_acceptance_rate,
                "num_spec_steps": statistics.num_steps,
                "num_draft_tokens": statistics.num_draft_tokens,
                "num_accepted_draft_tokens": statistics.num_accepted_tokens,
                "acceptance_histogram": statistics.acceptance_histogram,
            }
        },
    }


def write(text: str) -> None:
    print(text, end="", flush=True)


def hide(text: str) -> None:
    pass
