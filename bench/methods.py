"""Every drafting method on the same prompts, arms in turn, plain decoding among them.

    python bench/methods.py [--model smollm2-135m] [--draft-model NAME] [--head METHOD=FOLDER …] [--method NAME …]

Prompts are those of `prompts.py`, or of a file of lines {"turns": [text, …]}; greedy, EOS ignored, one request at a
time, each method with its own defaults. One that needs a draft model or a head is left out, by name, if none is given.
Times leave out the first token of each answer (its prompt's). Draft share: of the time, what the drafter took to
observe and to propose. Ratio: of tokens per second, to plain decoding's.
"""

import script  # noqa: F401 - Ctrl-C is one line from here on

# isort: split
import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prompts import PROMPTS
from provenance import provenance, warn_if_busy

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.decode import decode
from paceline.drafters.base import Drafter, Features, SequenceView, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.registry import find, names
from paceline.models.decoder import Decoder
from paceline.models.load import load_model
from paceline.models.progress import terminal_progress


class Timed:
    """A drafter, and the time spent in it."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name, self.needs = inner, inner.name, inner.needs
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        start = time.perf_counter()
        self.inner.observe(sequence, tokens, features)
        self.seconds += time.perf_counter() - start

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        start = time.perf_counter()
        proposals = self.inner.propose(sequences, budgets)
        self.seconds += time.perf_counter() - start
        return proposals


@dataclass
class Arm:
    """A method, and what it took, summed over the prompts."""

    config: SpeculativeConfig
    drafter: Timed
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    outputs: list[list[int]] = field(default_factory=list)

    def answer(self, target: Decoder, prompt: Sequence[int], tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        steps = decode(target, prompt, params, self.drafter, self.config.num_speculative_tokens)
        out = list(next(steps).token_ids)
        first, before, start = len(out), self.drafter.seconds, time.perf_counter()
        for step in steps:
            out.extend(step.token_ids)
            self.passes += 1
            self.drafted += step.num_draft_tokens
            self.accepted += step.num_accepted_tokens
        self.seconds += time.perf_counter() - start
        self.draft_seconds += self.drafter.seconds - before
        self.tokens += len(out) - first
        self.outputs.append(out)

    def row(self, plain: "Arm") -> dict[str, Any]:
        speed = self.tokens / self.seconds
        return {
            "method": self.config.method,
            "num_draft_tokens": self.config.num_speculative_tokens,
            "tokens_per_second": speed,
            "acceptance_length": self.tokens / self.passes,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else None,
            "draft_share": self.draft_seconds / self.seconds,
            "ratio": speed / (plain.tokens / plain.seconds),
            "identical": self.outputs == plain.outputs,
        }


def configs(chosen: Sequence[str], draft_model: str | None, heads: Mapping[str, str]) -> Iterator[SpeculativeConfig]:
    """Of each method that can run."""
    for name in chosen:
        method = find(name)
        values: dict[str, Any] = {"method": name}
        if method.needs_model:
            model = heads.get(name, draft_model if method.needs == "model" else None)
            if model is None:
                print(f"{name} is left out: no {method.needs} was given", file=sys.stderr)
                continue
            values["model"] = model
        if method.needs == "methods":
            values |= {"methods": ["suffix", "draft_model"], "model": draft_model}
            if draft_model is None:
                values = {"methods": ["suffix", "token_recycling"]}
        yield SpeculativeConfig.from_dict(values)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"{'method':16} {'K':>3} {'tokens/s':>9} {'ratio':>6} {'length':>7} {'rate':>6} {'draft share':>12}  outputs")
    for row in rows:
        rate = "-" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}"
        print(
            f"{row['method']:16} {row['num_draft_tokens']:3} {row['tokens_per_second']:9.2f} {row['ratio']:6.3f} "
            f"{row['acceptance_length']:7.2f} {rate:>6} {row['draft_share']:12.1%}  "
            f"{'identical' if row['identical'] else 'DIFFERENT'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model")
    parser.add_argument("--head", action="append", default=[], metavar="METHOD=FOLDER")
    parser.add_argument("--method", nargs="+", default=None, help="default: every one there is")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--first", type=int, default=20, help="how many prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--log", type=Path, help="append the result here as one JSON line")
    args = parser.parse_args()

    warn_if_busy()
    facts = provenance()
    model = load_model(args.model, dtype=args.dtype, progress=terminal_progress())
    assert model.tokenizer is not None
    chosen = ["none", *(name for name in args.method or names() if name != "none")]
    heads = dict(head.split("=", 1) for head in args.head)
    arms = [Arm(own, Timed(create_drafter(own, model))) for own in configs(chosen, args.draft_model, heads)]
    lines = args.prompts.read_text().splitlines() if args.prompts else []
    texts = ([json.loads(line)["turns"][0] for line in lines] or list(PROMPTS))[: args.first]
    prompts = [model.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    warm_up = model.tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}])
    for arm in arms:
        Arm(arm.config, arm.drafter).answer(model.decoder, warm_up, 8)
    for number, prompt in enumerate(prompts):
        turn = number % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            arm.answer(model.decoder, prompt, args.tokens)
        print(f"{number + 1}/{len(prompts)}", file=sys.stderr, flush=True)

    rows = [arm.row(arms[0]) for arm in arms]
    show(rows)
    result = {
        "provenance": facts,
        "model": args.model,
        "precision": model.precision,
        "exact": model.exact,
        "prompts": len(prompts),
        "tokens": args.tokens,
        "rows": rows,
    }
    print(json.dumps(result))
    if args.log:
        with args.log.open("a") as file:
            print(json.dumps(result), file=file)
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
