"""`paceline tune`: which of the target's sublayers to leave out when it drafts for itself; which tree a head drafts."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from paceline.cli.options import DTYPE_HELP, check_num_draft_tokens
from paceline.errors import PacelineError

_SEARCHES = {"layer-skip": "paceline.cli.layer_skip_search", "tree": "paceline.cli.tree_tuning"}


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
    add = _add_common(layer_skip, max_tokens=64)
    add("--trials", type=int, default=40, metavar="N", help="sets to try in all (default: %(default)s)")
    add("--num-draft-tokens", "-k", type=int, default=6, metavar="K", help="drafted a step (default: %(default)s)")
    add("--cpu-time", action="store_true", help="count CPU time instead: steadier on a busy machine")
    tree = kinds.add_parser(
        "tree",
        help="the tree that a head's drafts grow to",
        description="Measure how often a head's first, second … guess is right at each depth, and print the static "
        "tree that keeps most tokens a pass, as speculative_config. Every prompt is written to the log: a re-run goes "
        "on from there.",
    )
    add = _add_common(tree, max_tokens=128)
    add("--method", required=True, metavar="NAME", help="medusa, eagle or eagle3")
    add("--head", required=True, metavar="NAME", help="its head: a folder or a Hub id")
    add("--depth", type=int, default=6, metavar="N", help="levels to measure (default: %(default)s)")
    add("--width", type=int, default=8, metavar="N", help="guesses a node to look at (default: %(default)s)")
    add("--num-draft-tokens", "-k", type=int, default=25, metavar="K", help="nodes of the tree (default: %(default)s)")


def _add_common(parser: argparse.ArgumentParser, max_tokens: int) -> Callable[..., argparse.Action]:
    add = parser.add_argument
    add("--prompts", required=True, metavar="FILE",
        help='a prompt a line; .jsonl: {"prompt": …} or {"turns": [user message, …]} a line')  # fmt: skip
    add("--log", required=True, metavar="FILE", help="JSON lines of what was measured; gone on with if it exists")
    add("--num-prompts", type=int, default=8, metavar="N", help="take the first N prompts (default: %(default)s)")
    add("--max-tokens", "-n", type=int, default=max_tokens, metavar="N",
        help="tokens of each answer (default: %(default)s)")  # fmt: skip
    add("--model", "-m", default="smollm2-135m", metavar="NAME", help="what to tune (default: %(default)s)")
    add("--dtype", default="auto", help=DTYPE_HELP)
    add("--threads", type=int, metavar="N", help="CPU threads (default: one a core)")
    add("--raw", action="store_true", help="complete the prompts as they are, without the chat template")
    return add


def run(args: argparse.Namespace) -> int:
    for name in ("trials", "depth", "width", "num_prompts", "max_tokens", "num_draft_tokens"):
        value = getattr(args, name, 1)
        if value < 1:
            raise PacelineError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")
    for name in ("depth", "num_draft_tokens"):
        check_num_draft_tokens(f"--{name.replace('_', '-')}", getattr(args, name, 1))
    tune = importlib.import_module(_SEARCHES[args.what]).tune
    return int(tune(args))
