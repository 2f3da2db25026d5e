"""A student pruned from the target: how many of its drafts are kept before training, and after distillation.

    python bench/distillation.py --data FILE [--model smollm2-135m] [--layers 6] [--steps 100] [--on-policy 0 0.5 1]

FILE is of `paceline data generate`. The student begins as some of the target's layers, evenly spread. From there it is
trained once for every share of texts that it writes itself (0: off-policy, on the target's own; 1: on-policy), with the
same packs of prompts in the same steps; the tokens that taught it are told, since its own answers may be shorter. Each
student then drafts chains of K for prompts that were held aside, greedily and at temperature 1: acceptance length, with
a 95 % interval over prompts (bootstrap). Training goes on where it was interrupted, as `paceline train` does. The last
line is one JSON object.
"""

from script import resumable

# isort: split
import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from own_layers import own_layers
from provenance import provenance

from paceline.bench.bootstrap import Paired, Ratio, ratio
from paceline.cli.main import main as paceline
from paceline.core.params import SamplingParams
from paceline.engine.llm import LLM
from paceline.models.load import LoadedModel, load_model
from paceline.models.progress import terminal_progress
from paceline.train.dataset import hold_aside, read_samples
from paceline.train.student import spread_layers

ASIDE = 32
LONGEST = 2048  # tokens of a sample


@dataclass(frozen=True, slots=True)
class Student:
    """A draft model in a folder, and the tokens that taught it."""

    name: str
    folder: Path
    tokens: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--layers", type=int, default=6, help="of the student (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of every training (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="of a step (default: %(default)s)")
    parser.add_argument("--divergence", default="forward_kl")
    parser.add_argument("--on-policy", type=float, nargs="+", default=[0.0, 0.5, 1.0], metavar="SHARE")
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K")
    parser.add_argument("--tokens", type=int, default=64, help="decoded a prompt (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("build/distillation"), metavar="FOLDER")
    parser.add_argument("--result", type=Path, help="write the JSON object here, too")
    args = parser.parse_args()

    model = load_model(args.model, dtype=args.dtype, progress=terminal_progress(), packed=False)
    _, aside = hold_aside(read_samples(args.data, LONGEST).kept, ASIDE)
    prompts = [sample.token_ids[: sample.num_prompt] for sample in aside]
    rows: list[dict[str, Any]] = []
    with resumable():
        for student in students(model, args):
            lengths = {f"temperature {t:g}": acceptance(model, student, prompts, t, args) for t in (0.0, 1.0)}
            rows.append({"student": student.name, "tokens": student.tokens}
                        | {name: asdict(found) for name, found in lengths.items()})  # fmt: skip
            figures = ", ".join(f"{name} {words(found)}" for name, found in lengths.items())
            print(f"{student.name:16} {student.tokens:8} tokens: {figures}", flush=True)
    result = {"provenance": provenance(), "model": args.model, "layers": args.layers, "steps": args.steps, "rows": rows}
    if args.result:
        args.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def students(model: LoadedModel, args: argparse.Namespace) -> Iterator[Student]:
    """Before training, and after each."""
    layers = spread_layers(model.config.num_layers, args.layers)
    yield Student("pruned", own_layers(model, layers, args.work / "pruned"))
    for share in args.on_policy:
        out = args.work / f"on-policy-{share:g}"
        command = ["train", "draft_model", "--model", args.model, "--dtype", args.dtype, "--data", str(args.data),
                   "--out", str(out), "--keep-layers", *map(str, layers), "--on-policy", str(share), "--bf16",
                   "--divergence", args.divergence, "--batch-tokens", str(args.batch_tokens), "--lr", "5e-4",
                   "--steps", str(args.steps), "--save-every", "20", "--hold-aside", str(ASIDE),
                   "--max-length", str(LONGEST), "--evaluate-tokens", str(args.tokens)]  # fmt: skip
        if status := paceline(command):
            sys.exit(status)
        tokens = json.loads((out / "provenance.json").read_text(encoding="utf-8"))["tokens"]
        yield Student("off-policy" if share == 0 else f"on-policy {share:g}", out, tokens)


def acceptance(
    model: LoadedModel,
    student: Student,
    prompts: Sequence[tuple[int, ...]],
    temperature: float,
    args: argparse.Namespace,
) -> Ratio:
    """Tokens a pass, over prompts: plain decoding takes one pass a token."""
    speculation = {
        "method": "draft_model",
        "model": str(student.folder),
        "num_speculative_tokens": args.num_draft_tokens,
        "draft_confidence_threshold": 0.0,
    }
    llm = LLM(model, speculation, max_num_seqs=8)
    params = [SamplingParams(temperature=temperature, max_tokens=args.tokens, seed=i) for i in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
    passes = [output.outputs[0].speculation for output in outputs]
    found = ratio([Paired(own.num_tokens, own.num_steps, own.num_tokens, own.num_tokens) for own in passes])
    assert found is not None
    return found


def words(found: Ratio) -> str:
    return f"{found.point:.2f}" + ("" if found.low is None else f" ({found.low:.2f} to {found.high:.2f})")


if __name__ == "__main__":
    sys.exit(main())
