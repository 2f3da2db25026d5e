"""`paceline generate`: answer one prompt, streaming, and say how speculation went."""

import argparse
import sys
from pathlib import Path
from typing import Any

from paceline.cli.options import (
    add_model_options,
    add_sampling_options,
    add_speculation_options,
    check_model_options,
    option_names,
    sampling_params,
    speculative_config,
)
from paceline.errors import PacelineError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="answer or complete a prompt",
        description="Answer a prompt. The text goes to stdout as it comes, everything else to stderr.",
    )
    add = parser.add_argument
    add("prompt", nargs="?", help="the prompt; `-` or nothing reads it from stdin")
    add("--file", "-f", metavar="PATH", help="read the prompt from a file")
    add("--system", metavar="TEXT", help="system message of the chat")
    add("--raw", action="store_true", help="complete the prompt as it is, without the chat template")
    add("--json", action="store_true", help="print one JSON object at the end in place of the text")
    add("--logprobs", type=int, metavar="N",
        help="with --json: log-probabilities of the answer's tokens, and of the N likeliest beside each")  # fmt: skip
    add("--stats", action="store_true", help="print a line of statistics at the end")
    add_model_options(parser)
    add_speculation_options(parser)
    add_sampling_options(parser, max_tokens=256)


def run(args: argparse.Namespace) -> int:
    # What can be refused is refused before anything slow is imported or loaded.
    check_model_options(args)
    params = sampling_params(args)
    speculation = speculative_config(args)
    if args.logprobs is not None and not args.json:
        raise PacelineError(f"--logprobs {args.logprobs} needs --json, which is where they go", hint="add --json")
    prompt = read_prompt(args)
    from paceline.cli.generation import generate

    with option_names():
        return generate(args, prompt, params, speculation)


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt, from its argument, a file or stdin; of the latter two a last line end is dropped."""
    if args.file is not None and args.prompt is not None:
        raise PacelineError("there are two prompts: an argument and --file", hint="leave one of the two out")
    if args.raw and args.system is not None:
        raise PacelineError("--system contradicts --raw, which has no chat", hint="leave one of the two out")
    try:
        if args.file is not None:
            prompt = read_file(args.file)
        elif args.prompt in (None, "-"):
            if sys.stdin is None or sys.stdin.isatty():
                raise PacelineError("there is no prompt", hint='paceline generate "…", --file PATH, or a pipe')
            prompt = sys.stdin.read().removesuffix("\n")
        else:
            prompt = args.prompt
        for text in (prompt, args.system or "", *args.stop):
            text.encode()  # a command line that is not UTF-8 arrives as lone surrogates
    except UnicodeError as error:
        raise PacelineError(
            "the prompt, system message or stop text is not UTF-8", hint="convert it first, for instance with iconv"
        ) from error
    if not prompt.strip():
        raise PacelineError("the prompt is empty", hint='give some text: paceline generate "…"')
    return prompt


def read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise PacelineError(
            f"--file {path}: {error.strerror or error}", hint="name a text file that can be read"
        ) from error
