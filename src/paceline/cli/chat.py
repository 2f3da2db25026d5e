"""`paceline chat`: a conversation on a terminal, or a line a turn from a pipe. stdout carries the answers alone."""

import argparse
import io
import sys
from collections.abc import Callable
from contextlib import suppress
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

PROMPT = "> "


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model. Ctrl-C stops an answer; at an empty prompt Ctrl-C and Ctrl-D leave. "
        "/help lists the commands. From a pipe, each line is a turn.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    add_model_options(parser)
    add_speculation_options(parser)
    add_sampling_options(parser, max_tokens=1024)


def run(args: argparse.Namespace) -> int:
    # What can be refused is refused before anything slow is imported or loaded.
    check_model_options(args)
    params = sampling_params(args)
    speculation = speculative_config(args)
    for text in (args.system or "", *args.stop):
        if not is_utf8(text):
            raise PacelineError("the system message or stop text is not UTF-8", hint="convert it first, with iconv")
    read = line_reader()
    from paceline.cli.conversation import open_chat

    with option_names():
        chat = open_chat(args, params, speculation)
    while not chat.ended and (line := read()) is not None:
        if is_utf8(line):
            chat.take(line.strip(), is_command=line.startswith("/"))
        else:
            print("error: this line is not UTF-8, and was not sent", file=sys.stderr)
    return 0


def is_utf8(text: str) -> bool:
    """What is not arrives as lone surrogates."""
    try:
        text.encode()
    except UnicodeError:
        return False
    return True


def line_reader() -> Callable[[], str | None]:
    """Reads the next line; None where there is no more, or where a person leaves."""
    if sys.stdin is None:
        raise PacelineError("there is nobody to talk to: stdin is closed", hint="run it on a terminal, or with a pipe")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if not sys.stdin.isatty():
        return read_pipe
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing
    return read_terminal


def read_pipe() -> str | None:
    return sys.stdin.readline() or None


def read_terminal() -> str | None:
    try:
        if sys.stdout.isatty():
            return input(PROMPT)
        print(PROMPT, end="", file=sys.stderr, flush=True)  # `input` would write it to stdout
        return read_pipe()
    except EOFError:
        leaving = True
    except KeyboardInterrupt:
        leaving = not typed()  # else the line alone is given up
    print(file=sys.stderr)
    return None if leaving else ""


def typed() -> str:
    """What stands at the prompt, as far as that is known."""
    readline = sys.modules.get("readline")
    return "" if readline is None else str(readline.get_line_buffer())
