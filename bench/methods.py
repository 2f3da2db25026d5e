"""Every drafting method on the same prompts, arms in turn, plain decoding among them.

    python bench/methods.py [--model smollm2-135m] [--draft-model NAME] [--head METHOD=FOLDER …] [--method NAME …]

Prompts are those of `prompts.py`, or of a file of lines {"turns": [text, …]}; greedy, EOS ignored, one request at a
time, each method with its own defaults. Without a draft model the target's first layers are one. A method whose head is
not given is left out, by name. Times leave out the first token of each answer (its prompt's). Shares of the time:
draft, what the drafter took to observe and to propose; target, the target's passes and its output layer; the rest is
sampling, verification and bookkeeping. Length: tokens a target pass. Ratio: of tokens per second, to plain decoding's.
The last line is one JSON object.
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
from typing import Any, cast

from prompts import PROMPTS
from provenance import provenance, warn_if_busy
from timed import TimedDrafter, TimedTarget

from paceline.core.params import SamplingParams
from paceline.decode import decode
from paceline.drafters.base import Drafter, create_drafter
from paceline.drafters.composite import CompositeDrafter, Member, member_configs
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.registry import find, names
from paceline.models.decoder import Decoder
from paceline.models.load import LoadedModel, load_model
from paceline.models.progress import terminal_progress

DRAFT_LAYERS = 10
OWN = f"the target's first {DRAFT_LAYERS} layers"  # the draft model, where none is given


@dataclass
class Arm:
    """A method, and what it took, summed over the prompts."""

    config: SpeculativeConfig
    drafter: TimedDrafter
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    outputs: list[list[int]] = field(default_factory=list)

    def answer(self, target: TimedTarget, prompt: Sequence[int], tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        decoder = cast(Decoder, target)
        steps = decode(decoder, prompt, params, self.drafter, self.config.num_speculative_tokens)
        out = list(next(steps).token_ids)
        first, start = len(out), time.perf_counter()
        drafted, passed = self.drafter.seconds, target.seconds
        for step in steps:
            out.extend(step.token_ids)
            self.passes += 1
            self.drafted += step.num_draft_tokens
            self.accepted += step.num_accepted_tokens
        self.seconds += time.perf_counter() - start
        self.draft_seconds += self.drafter.seconds - drafted
        self.target_seconds += target.seconds - passed
        self.tokens += len(out) - first
        self.outputs.append(out)

    def row(self, plain: "Arm") -> dict[str, Any]:
        speed = self.tokens / self.seconds
        return {
            "method": self.config.method,
            "model": self.config.model,
            "members": [member.method for member in self.config.methods or ()],
            "num_draft_tokens": self.config.num_speculative_tokens,
            "tokens_per_second": speed,
            "acceptance_length": self.tokens / self.passes,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else None,
            "draft_share": self.draft_seconds / self.seconds,
            "target_share": self.target_seconds / self.seconds,
            "ratio": speed / (plain.tokens / plain.seconds),
            "identical": self.outputs == plain.outputs,
        }


def configs(chosen: Sequence[str], draft_model: str | None, heads: Mapping[str, str]) -> Iterator[SpeculativeConfig]:
    """Of each method that can run."""
    for name in chosen:
        needs, model = find(name).needs, heads.get(name)
        if needs in ("model", "methods"):
            model = draft_model or (OWN if name in ("draft_model", "composite") else None)
        if needs != "nothing" and model is None:
            print(f"{name} is left out: no {needs} was given", file=sys.stderr)
            continue
        members = {"methods": ["suffix", "draft_model"]} if name == "composite" else {}
        yield SpeculativeConfig.from_dict({"method": name, "model": model, **members})


def build(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    """As the engine does, but that a draft model may be the target's own first layers."""
    if config.model != OWN:
        return create_drafter(config, target)
    if config.method == "composite":
        members = member_configs(config)
        return CompositeDrafter([Member(build(member, target), member.num_speculative_tokens) for member in members])
    return DraftModelDrafter(target.decoder.first_layers(min(DRAFT_LAYERS, target.config.num_layers - 1)))


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        f"{'method':16} {'K':>3} {'tokens/s':>9} {'ratio':>6} {'length':>7} {'rate':>6} "
        f"{'draft':>6} {'target':>6}  outputs"
    )
    for row in rows:
        rate = "-" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}"
        print(
            f"{row['method']:16} {row['num_draft_tokens']:3} {row['tokens_per_second']:9.2f} {row['ratio']:6.3f} "
            f"{row['acceptance_length']:7.2f} {rate:>6} {row['draft_share']:6.1%} {row['target_share']:6.1%}  "
            f"{'identical' if row['identical'] else 'DIFFERENT'}"
        )
    for row in rows:
        with_what = " and ".join(row["members"] or [row["method"]])
        if row["model"] is not None:
            print(f"{row['method']}: {with_what} with {row['model']}")


def _head(text: str) -> tuple[str, str]:
    method, _, folder = text.partition("=")
    if not folder or find(method).needs != "head":
        raise argparse.ArgumentTypeError(f"{text!r} must be METHOD=FOLDER, of a method that needs a head")
    return method, folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model", help=f"default: {OWN}")
    parser.add_argument("--head", action="append", default=[], type=_head, metavar="METHOD=FOLDER")
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
    heads = dict(args.head)
    target = TimedTarget(model.decoder)
    arms = [Arm(own, TimedDrafter(build(own, model))) for own in configs(chosen, args.draft_model, heads)]
    lines = args.prompts.read_text().splitlines() if args.prompts else []
    texts = ([json.loads(line)["turns"][0] for line in lines] or list(PROMPTS))[: args.first]
    prompts = [model.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    warm_up = model.tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}])
    for arm in arms:
        Arm(arm.config, arm.drafter).answer(target, warm_up, 8)
    for number, prompt in enumerate(prompts):
        turn = number % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            arm.answer(target, prompt, args.tokens)
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
