"""The draft heads that come with the package, made from nothing but their target: its own prompts and answers.

    make heads
    python bench/heads.py --model smollm2-135m

Every step is a `paceline` command that goes on where it was interrupted, and does nothing once it is done; so is the
whole. A core alone writes about 330 tokens of answers a second, 410,000 in all. Muon at a rate of 1e-2 leaves Medusa's
heads half as often right as 3e-3 does, and ends in a gradient that is not finite.
"""

from script import resumable

# isort: split
import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.main import main as paceline
from paceline.models.shipped import EVALUATION, FOLDER

LARGEST = 12_000_000  # bytes of a head in the package
FILES = ("config.json", "model.safetensors", "provenance.json", EVALUATION)


@dataclass(frozen=True)
class Plan:
    """How much of everything: options of `paceline data generate`, of every `paceline train`, and of each method's."""

    data: tuple[str, ...] = ("--self-prompt", "2000", "--temperature", "0", "1", "--batch", "64")
    training: tuple[str, ...] = (
        *("--bf16", "--optimizer", "muon", "--lr", "5e-3", "--batch-tokens", "1024"),
        *("--hold-aside", "24", "--save-every", "50"),
    )
    heads: tuple[tuple[str, ...], ...] = (
        ("eagle3", "--epochs", "1.5", "--ttt-steps", "4"),
        ("medusa", "--epochs", "2", "--num-blocks", "2", "--lr", "3e-3"),
        ("early_exit", "--epochs", "1"),
    )


def make(model: Sequence[str], name: str, work: Path, into: Path, plan: Plan) -> None:
    """Generate, train, and copy what was trained to `into`/<name>/<method>. `model`: options that name the target."""
    data, features = work / "data.jsonl", work / "features"
    run("data", "generate", *model, "--out", str(data), *plan.data)
    for method, *options in plan.heads:
        out = work / method
        common = ("--data", str(data), "--out", str(out), "--cache-features", str(features), *plan.training)
        run("train", method, *model, *common, *options)
        ship(out, into / name / method)


def run(*arguments: str) -> None:
    """A `paceline` command; its failure is the script's."""
    print("paceline", *arguments, file=sys.stderr, flush=True)
    if status := paceline(list(arguments)):
        sys.exit(status)


def ship(trained: Path, place: Path) -> None:
    """Copy a head into the package, if it is small enough."""
    size = sum((trained / name).stat().st_size for name in FILES)
    if size > LARGEST:
        sys.exit(f"error: {trained} takes {size / 1e6:.1f} MB; a head in the package may take {LARGEST / 1e6:.0f}")
    place.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(trained / name, place / name)
    evaluation = json.loads((place / EVALUATION).read_text(encoding="utf-8"))
    print(json.dumps({"head": f"{place.parent.name}/{place.name}", "bytes": size, **evaluation}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the draft heads that come with the package.")
    parser.add_argument("--model", default="smollm2-135m", metavar="NAME", help="the target (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("build/heads"), metavar="FOLDER",
        help="data, features and checkpoints, some GB; gone on with if it exists (default: %(default)s)")  # fmt: skip
    args = parser.parse_args()
    with resumable():
        make(("--model", args.model, "--dtype", "bf16"), Path(args.model).stem, args.work, FOLDER, Plan())


if __name__ == "__main__":
    main()
