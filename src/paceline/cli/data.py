"""`paceline data`: training data that the target writes."""

import argparse
from typing import Any

from paceline.cli.options import add_model_options, check_model_options
from paceline.errors import PacelineError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "data", help="have a model write what its drafter is trained on", description="Build training data."
    )
    kinds = parser.add_subparsers(title="what", dest="what", metavar="WHAT", required=True)
    generate = kinds.add_parser(
        "generate",
        help="answers of the model, to prompts from a file or of its own",
        description="Have the model answer prompts, many at once, and write token ids and which of them are its own. "
        "Interrupted, it goes on where it stopped, and writes what it would have.",
    )
    # fmt: off
    add = generate.add_argument
    add("--prompts", metavar="FILE", help='a prompt a line; .jsonl: {"turns": [user message, …], "id": …} a line')
    add("--self-prompt", type=int, metavar="N",
        help="have the model write N prompts itself: what it samples after the opening of a user's turn")
    add("--out", "-o", required=True, metavar="FILE", help="JSON lines to write; gone on with if it exists")
    add("--exclude", action="append", default=[], metavar="FILE",
        help="prompts of an evaluation: none with the same id or text is answered; may be repeated")
    add("--limit", type=int, metavar="N", help="take the first N prompts")
    add("--max-tokens", "-n", type=int, default=256, metavar="N", help="of each answer (default: %(default)s)")
    add("--temperature", type=float, nargs="+", default=[1.0], metavar="T",
        help="several are taken in turn, prompt by prompt; 0 is greedy (default: 1)")
    add("--top-p", type=float, default=1.0, metavar="P", help="as in `paceline generate` (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="the same seed, the same data (default: %(default)s)")
    add("--batch", type=int, default=16, metavar="N", help="requests that run at once (default: %(default)s)")
    # fmt: on
    add_model_options(generate)
    generate.set_defaults(draft_model=None, rule="coupled")


def run(args: argparse.Namespace) -> int:
    check_model_options(args)
    if (args.prompts is None) == (args.self_prompt is None):
        raise PacelineError(
            "give either --prompts or --self-prompt", hint="a file of prompts, or how many the model is to write"
        )
    for name in ("self_prompt", "limit", "max_tokens", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise PacelineError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")
    from paceline.cli.data_generation import generate
    from paceline.cli.options import option_names

    with option_names():
        return generate(args)
