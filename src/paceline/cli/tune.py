"""`paceline tune layer-skip`: which of the target's own sublayers to leave out when it drafts for itself."""

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="find what makes a method fast on this machine",
        description="Find what makes a method fast, on this machine and on your own prompts.",
    )
    kinds = parser.add_subparsers(title="what", dest="what", metavar="WHAT", required=True)
    layer_skip = kinds.add_parser(
        "layer-skip",
        help="the sublayers that `layer_skip` leaves out",
        description="Try sets of sublayers to skip, keep the one with the most tokens per second, and print it as "
        "speculative_config. Tokens never change. Every trial is written to the log: a re-run goes on from there.",
    )
    add = layer_skip.add_argument
    add("--prompts", required=True, metavar="FILE",
        help='a prompt a line; .jsonl: {"prompt": …} or {"turns": [user message, …]} a line')  # fmt: skip
    add("--log", required=True, metavar="FILE", help="JSON lines of what was tried; gone on with if it exists")
    add("--trials", type=int, default=40, metavar="N", help="sets to try in all (default: %(default)s)")
    add("--num-prompts", type=int, default=8, metavar="N", help="take the first N prompts (default: %(default)s)")
    add("--max-tokens", "-n", type=int, default=64, metavar="N", help="tokens of each answer (default: %(default)s)")
    add("--num-draft-tokens", "-k", type=int, default=6, metavar="K", help="drafted a step (default: %(default)s)")
    add("--model", "-m", default="smollm2-135m", metavar="NAME", help="what to tune (default: %(default)s)")
    add("--dtype", default="auto", help="auto (the model's own), bf16, fp32 or fp64 (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: one a core)")
    add("--cpu-time", action="store_true", help="count CPU time instead: steadier on a busy machine")
    add("--raw", action="store_true", help="complete the prompts as they are, without the chat template")


def run(args: argparse.Namespace) -> int:
    from paceline.errors import PacelineError

    for name in ("trials", "num_prompts", "max_tokens", "num_draft_tokens"):
        if getattr(args, name) < 1:
            option = "--" + name.replace("_", "-")
            raise PacelineError(f"{option} is {getattr(args, name)}; it must be 1 or more")
    from paceline.cli.layer_skip_search import tune

    return tune(args)
