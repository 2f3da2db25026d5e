"""The draft heads that come with the package, made from nothing but their target: its own prompts and answers.

    make heads
    python bench/heads.py --model smollm2-135m

Every step is a `paceline` command that goes on where it was interrupted, and does nothing once it is done; so is the
whole. Heads are trained side by side, each on its share of the processors: two threads of one training are hardly
faster than one. A core writes some 290 tokens of answers a second, 810,000 in all. Of Muon's rates 3e-3 was best for
Medusa (at 1e-2 its heads are half as often right, and it ends in a gradient that is not finite) and for EAGLE-3
(after 160 steps 0.334 of its first tokens agree, at 1.5e-3 0.316; at 5e-3 it stood still until the rate had fallen).
"""

from script import resumable

# isort: split
import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.models.shipped import EVALUATION, FOLDER

LARGEST = 12_000_000  # bytes of a head in the package
FILES = ("config.json", "model.safetensors", "provenance.json", EVALUATION)


@dataclass(frozen=True)
class Plan:
    """How much of everything: options of `paceline data generate`, of every `paceline train`, and of each method's.

    lanes: what is trained side by side, each lane one head after another.
    """

    data: tuple[str, ...] = ("--self-prompt", "4000", "--temperature", "0", "1", "--batch", "64")
    training: tuple[str, ...] = (
        *("--bf16", "--optimizer", "muon", "--lr", "3e-3", "--batch-tokens", "1024"),
        *("--hold-aside", "24", "--save-every", "50"),
    )
    lanes: tuple[tuple[tuple[str, ...], ...], ...] = (
        (("eagle3", "--epochs", "1", "--ttt-steps", "4"),),
        (("medusa", "--epochs", "1", "--num-blocks", "2"), ("early_exit", "--epochs", "0.5", "--lr", "5e-3")),
    )


def make(model: Sequence[str], name: str, work: Path, into: Path, plan: Plan) -> None:
    """Generate, train, and copy what was trained to `into`/<name>/<method>. `model`: options that name the target."""
    data, features = work / "data.jsonl", work / "features"
    in_lanes([[("data", "generate", *model, "--out", str(data), *plan.data)]])
    common = (*model, "--data", str(data), "--cache-features", str(features), *plan.training)
    in_lanes(
        [
            [("train", method, *common, "--out", str(work / method), *options) for method, *options in lane]
            for lane in plan.lanes
        ]
    )
    for lane in plan.lanes:
        for method, *_ in lane:
            ship(work / method, into / name / method)


def in_lanes(lanes: Sequence[Sequence[Sequence[str]]]) -> None:
    """`paceline` commands, those of a lane one after another, lanes side by side. A failure ends them all."""
    waiting = [list(lane) for lane in lanes]
    threads = str(max(1, torch.get_num_threads() // len(lanes)))
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while running or any(waiting):
            for number, lane in enumerate(waiting):
                if number not in running and lane:
                    command = lane.pop(0)
                    print("paceline", *command, file=sys.stderr, flush=True)
                    running[number] = subprocess.Popen(
                        [sys.executable, "-m", "paceline", *command], env={**os.environ, "OMP_NUM_THREADS": threads}
                    )
            time.sleep(0.2)
            for number, process in list(running.items()):
                if (status := process.poll()) is not None:
                    del running[number]
                    if status:
                        sys.exit(status)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


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
