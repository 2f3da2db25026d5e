"""What `paceline bench` does once its arguments are known to be good."""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.answers import Arm
from paceline.bench.peers.base import Peer, Subject, is_installed, open_arms
from paceline.bench.prompts import PromptSet
from paceline.bench.provenance import OthersWatch, is_busy, load_average, provenance
from paceline.bench.report import tables
from paceline.bench.result import result, rows_of, units
from paceline.bench.run import Run, Settings, Step
from paceline.bench.specs import ArmSpec, LeftOut
from paceline.cli.answering import plural
from paceline.cli.loading import load, require_tokenizer
from paceline.cli.main import EXIT_ERROR, EXIT_INTERRUPTED
from paceline.core.params import SamplingParams
from paceline.errors import PacelineError
from paceline.models.load import LoadedModel, load_model
from paceline.models.tokenizer import Tokenizer

TEMPLATE_TOKENS = 64  # of a turn, beside what is said in it
MOST_OTHERS = 0.1  # cores that others may use before their use is worth a word


def bench(
    args: argparse.Namespace,
    specs: Sequence[ArmSpec],
    left_out: Sequence[LeftOut],
    peers: Mapping[str, Peer],
    prompts: PromptSet,
    params: SamplingParams,
    concurrencies: Sequence[int],
) -> int:
    left_out = [*left_out, *(LeftOut(name, "it is not installed") for name, p in peers.items() if not is_installed(p))]
    tell_left_out(left_out)
    present = {name: peer for name, peer in peers.items() if is_installed(peer)}
    load_before = load_average()
    if is_busy(load_before, os.cpu_count() or 1):
        print(f"warning: the load is {load_before}: timings on a busy machine are not to be trusted", file=sys.stderr)
    if peers:
        print("with other engines every answer has --max-tokens tokens: ends of text are ignored", file=sys.stderr)
    model = load(args)
    facts = provenance(vars(args), load_before, ("transformers", *(peer.distribution for peer in present.values())))
    tokenizer = require_tokenizer(model)
    if not args.raw and not tokenizer.has_chat_template:
        raise PacelineError(f"model {model.name} has no chat template", hint="--raw completes the prompts without one")
    for note in model.notes:
        print(note, file=sys.stderr)
    engines, failed = open_peers(present, model, args, longest(tokenizer, prompts, args))
    tell_left_out(failed)
    run = Run(model, specs, engines, prompts.conversations, Settings(params, args.raw))
    run.left_out += [*left_out, *failed]
    watch, interrupted = OthersWatch.start(), False
    try:
        measure(run, concurrencies)
    except KeyboardInterrupt:
        interrupted = True
        print("\ninterrupted: what follows is measured so far", file=sys.stderr)
    tell_left_out(run.left_out[len(left_out) + len(failed) :])
    return finish(args, run, facts | {"cores_used_by_others": watch.cores()}, prompts, interrupted)


def open_peers(
    present: Mapping[str, Peer], model: LoadedModel, args: argparse.Namespace, length: int
) -> tuple[list[Arm], list[LeftOut]]:
    """Those that can run the model, with room for `length` tokens."""

    def draft() -> LoadedModel:
        return load_model(args.draft_model, dtype=model.precision, device=str(model.decoder.device))

    room = min(length, model.config.max_context)
    subject = Subject(model, None if args.draft_model is None else draft, args.num_draft_tokens, room)
    engines: list[Arm] = []
    failed: list[LeftOut] = []
    for name, peer in present.items():
        try:
            engines += open_arms(peer, subject)
        except Exception as error:  # whatever another engine breaks with
            words = f"{type(error).__name__}: {error}"
            if isinstance(error, PacelineError):
                words = f"{error} ({error.hint})" if error.hint else str(error)
            failed.append(LeftOut(name, " ".join(words.split())))
    return engines, failed


def longest(tokenizer: Tokenizer, prompts: PromptSet, args: argparse.Namespace) -> int:
    """Tokens of the longest conversation. Read again, an answer may have more of them than it was written with."""
    lengths: list[int] = [
        len(tokenizer.encode("\n".join(conversation.turns), add_special=True))
        + len(conversation.turns) * (2 * args.max_tokens + TEMPLATE_TOKENS)
        for conversation in prompts.conversations
    ]
    return max(lengths)


def measure(run: Run, concurrencies: Sequence[int]) -> None:
    """With a word now and then on how far it is."""
    arms, prompts = len(run.specs) + len(run.peers), len(run.conversations)
    print(f"measuring {plural(arms, 'arm')} on {plural(prompts, 'prompt')}, after a warm-up", file=sys.stderr)
    progress = Progress()
    for step in run.steps(concurrencies):
        progress.tell(step)
    progress.end()


def finish(args: argparse.Namespace, run: Run, facts: Mapping[str, Any], prompts: PromptSet, interrupted: bool) -> int:
    """Tables, the JSON object, and the exit status."""
    rows = rows_of(run, prompts, args.seed)
    for line in tables(rows):
        print(line)
    whole = result(run, rows, facts, prompts, interrupted)
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    others = facts["cores_used_by_others"]
    if others is not None and others > MOST_OTHERS:
        print(f"warning: other processes kept {others:.2f} cores busy meanwhile", file=sys.stderr)
    for label, count in run.faults.items():
        print(f"warning: the drafter of {label} failed {plural(count, 'time')}", file=sys.stderr)
    if args.output is not None:
        everything = whole | {"units": units(run, prompts)}
        Path(args.output).write_text(json.dumps(everything, allow_nan=False) + "\n", encoding="utf-8")
    print()
    print(json.dumps(whole, allow_nan=False))
    if interrupted:
        return EXIT_INTERRUPTED
    if whole["broken_promise"]:
        print("error: answers differ from plain decoding's, which the load probe found bitwise", file=sys.stderr)
        return EXIT_ERROR
    return 0


def tell_left_out(left_out: Sequence[LeftOut]) -> None:
    for each in left_out:
        print(f"{each.name} is left out: {each.why}", file=sys.stderr)


class Progress:
    """A line a unit, written over the last one on a terminal; elsewhere one every half minute."""

    PAUSE = 30.0

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._start = time.perf_counter()
        self._told = self._start

    def tell(self, step: Step) -> None:
        now = time.perf_counter()
        if not self._terminal and now - self._told < self.PAUSE and step.done < step.total:
            return
        self._told = now
        left = in_words((step.total - step.done) * (now - self._start) / step.done)
        where = f"{step.unit.category or 'several categories'} · concurrency {step.unit.concurrency}"
        line = f"{step.done}/{step.total} · {where} · {left}"
        print(
            f"\r\033[K{line}" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def end(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min left"
