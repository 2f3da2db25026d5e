"""`paceline bench`: how fast each drafting method is here, beside plain decoding and other engines."""

import argparse
from pathlib import Path
from typing import Any

from paceline.cli.options import (
    HINTS,
    add_model_options,
    check_model_options,
    check_num_draft_tokens,
    option_names,
)
from paceline.errors import PacelineError
from paceline.values import whole_of

MOST_AT_ONCE = 256


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure the drafting methods, plain decoding and other engines",
        description="Measure drafting methods on the same prompts, arm by arm in turn, plain decoding always among "
        "them. Tables go to stdout, and one JSON object as its last line; progress goes to stderr. docs/bench.md "
        "says what each figure means. Ctrl-C ends it with what is measured so far.",
    )
    add = parser.add_argument_group("what is measured").add_argument
    add("--methods", metavar="A,B,…",
        help="drafting methods, several in one joined by +, as in suffix+draft_model; none: plain decoding a second "
        "time, for the noise (default: every method that has what it needs)")  # fmt: skip
    add("--method-config", action="append", default=[], metavar="JSON",
        help='one more arm: a speculative_config, and "label" if you like; may be repeated')  # fmt: skip
    add("--draft-model", metavar="NAME", help="a smaller model with the same vocabulary, for methods that take one")
    add("--head", action="append", default=[], metavar="METHOD=FOLDER", help="a draft head; may be repeated")
    add("--num-draft-tokens", "-k", type=int, metavar="K", help="tokens drafted a step (default: each method's own)")
    add("--peer", action="append", default=[], metavar="NAME",
        help="another engine, if it is installed, with and without its own speculation: transformers, llama.cpp, "
        "vllm; may be repeated")  # fmt: skip
    add = parser.add_argument_group("on what").add_argument
    add("--prompts", metavar="FILE",
        help='JSONL: {"turns": [user message, …], "category": …} a line (default: a small set of our own)')  # fmt: skip
    add("--limit", type=int, metavar="N", help="take the first N prompts of each category")
    add("--raw", action="store_true", help="complete the prompts as they are, without the chat template")
    add("--concurrency", default="1", metavar="N,M,…", help="prompts answered at a time (default: %(default)s)")
    add("--max-tokens", "-n", type=int, default=128, metavar="N", help="most tokens an answer (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="go on where the model would end; always so with --peer")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of sampling and of the intervals (default: %(default)s)")
    add("--output", metavar="FILE", help="write the JSON object here too, with every single measurement in it")
    add_model_options(parser)
    parser.set_defaults(rule="coupled")


def run(args: argparse.Namespace) -> int:
    # What can be refused is refused before anything slow is imported or loaded.
    check_model_options(args)
    if args.limit is not None and args.limit < 1:
        raise PacelineError(f"--limit is {args.limit}; it must be 1 or more", hint="leave it out to take every prompt")
    if args.num_draft_tokens is not None:
        check_num_draft_tokens("--num-draft-tokens", args.num_draft_tokens)
    from paceline.bench.peers.base import find_peer
    from paceline.bench.prompts import read_prompts
    from paceline.bench.specs import arm_specs

    concurrencies = parse_concurrency(args.concurrency)
    peers = {name: find_peer(name) for name in args.peer}
    if peers and args.temperature > 0:
        raise PacelineError(
            f"--temperature {args.temperature} contradicts --peer {args.peer[0]}: engines are compared greedily",
            hint="leave one of the two out",
        )
    check_output(args.output)
    with option_names():
        params = sampling(args)
        specs, left_out = arm_specs(wanted(args))
    prompts = read_prompts(args.prompts, args.limit)
    if args.raw and (long := next((c for c in prompts.conversations if len(c.turns) > 1), None)) is not None:
        raise PacelineError(
            f"prompt {long.id} of {prompts.source} has {len(long.turns)} turns, and --raw completes a single text",
            hint="leave --raw out, or give prompts of one turn",
        )
    from paceline.cli.benching import bench

    with option_names():
        return bench(args, specs, left_out, peers, prompts, params, concurrencies)


def wanted(args: argparse.Namespace) -> Any:
    from paceline.bench.specs import Wanted

    methods = None if args.methods is None else [name for name in args.methods.split(",") if name]
    if methods == []:
        raise PacelineError("--methods names none", hint="for instance --methods ngram,suffix")
    heads = {}
    for head in args.head:
        method, separator, folder = head.partition("=")
        if not separator or not folder:
            raise PacelineError(f"--head {head} is not METHOD=FOLDER", hint="for instance --head eagle3=./head")
        heads[method] = folder
    shared = "transformers" in args.peer
    return Wanted(methods, args.method_config, args.draft_model, heads, args.num_draft_tokens, shared)


def sampling(args: argparse.Namespace) -> Any:
    from paceline.core.params import SamplingParams

    if args.max_tokens < 2:
        raise PacelineError(f"max_tokens is {args.max_tokens}; it must be 2 or more", hint=HINTS["max_tokens"])
    return SamplingParams(
        temperature=args.temperature,
        seed=args.seed,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos or bool(args.peer),
    )


def parse_concurrency(text: str) -> list[int]:
    counts = [whole_of(word.strip()) or 0 for word in text.split(",")]
    if not all(1 <= count <= MOST_AT_ONCE for count in counts):
        raise PacelineError(
            f"--concurrency {text} is no list of whole numbers from 1 to {MOST_AT_ONCE}",
            hint="for instance --concurrency 1,4,16",
        )
    return list(dict.fromkeys(counts))


def check_output(path: str | None) -> None:
    """A run of an hour must not end at a file that cannot be written."""
    if path is None:
        return
    file = Path(path)
    try:
        existed = file.exists()
        file.open("a", encoding="utf-8").close()
        if not existed:
            file.unlink()
    except OSError as error:
        raise PacelineError(f"--output {path}: {error.strerror or error}", hint="name a file to write") from error
