"""The `paceline` command: finds the verb, runs it, and turns whatever it raises into one line.

A verb is a module with `add_parser(subparsers)`, which adds its parser, and `run(args) -> int`.
Nothing heavy may be imported at a module's top: `paceline --help` must answer at once.
"""

import argparse
import difflib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline import __version__
from paceline.errors import PacelineError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


@dataclass(frozen=True, slots=True)
class Command:
    """A verb of the command line."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("generate", "paceline.cli.generate", "answer or complete a prompt"),
    Command("pull", "paceline.cli.pull", "download a model"),
    Command("models", "paceline.cli.models", "list or delete models"),
)


class Parser(argparse.ArgumentParser):
    """argparse with our form of error: `error:` and `hint:`, one line each, exit status 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.fail(message, f"`{self.prog} --help` lists what there is")

    def fail(self, message: str, hint: str) -> NoReturn:
        report(message, hint)
        self.exit(EXIT_USAGE)

    def refuse_unknown(self, arguments: Sequence[str]) -> NoReturn:
        """Refuse the arguments that no option took, with the nearest option's name as the hint."""
        names = [name for action in self._actions for name in action.option_strings]
        for argument in arguments:
            given = argument.partition("=")[0]
            near = [name for name in names if given.startswith("--") and name.startswith(given)]
            near = near or difflib.get_close_matches(given, names, n=1, cutoff=0.7)
            if near:
                self.fail(f"unknown option {argument}", f"did you mean {near[0]}?")
        what = "option" if arguments[0].startswith("-") else "argument"
        self.error(f"unknown {what} {arguments[0]}")


def make_streams_usable() -> None:
    """A closed stdout or stderr swallows what is written; a character it cannot encode becomes a question mark."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it lives as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("PACELINE_DEBUG", "") not in ("", "0")
    make_streams_usable()
    try:
        status = dispatch(arguments)
        sys.stdout.flush()  # a closed pipe must show here, not in the interpreter's last breath
        return status
    except PacelineError as error:
        if debug:
            traceback.print_exc()
        report(str(error), error.hint)
        return EXIT_ERROR
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has left. Point stdout elsewhere, or the interpreter complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if debug:
            traceback.print_exc()
        where = f": {error.filename}" if error.filename else ""
        report(f"{error.strerror or error}{where}", None)
        return EXIT_ERROR
    except Exception as error:
        if debug:
            traceback.print_exc()
        report(
            f"this is a fault of Paceline: {type(error).__name__}: {error}",
            "run it again with PACELINE_DEBUG=1 for the traceback, and please report it",
        )
        return EXIT_ERROR


def dispatch(arguments: list[str]) -> int:
    """Run the verb that `arguments` name. Exits (SystemExit) on `--help`, `--version` and usage errors."""
    verb = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = Parser(
        prog="paceline",
        description="Lossless speculative decoding: the target model's own tokens, sooner.",
        epilog="`paceline COMMAND --help` describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    chosen = None
    for command in COMMANDS:
        if command.name == verb:
            chosen = importlib.import_module(command.module)
            chosen.add_parser(subparsers)
        else:
            subparsers.add_parser(command.name, help=command.help)
    names = [command.name for command in COMMANDS]
    if verb is not None and verb not in names:
        near = difflib.get_close_matches(verb, names, n=1)
        hint = f"did you mean `paceline {near[0]}`?" if near else f"the commands are {', '.join(names)}"
        parser.fail(f"unknown command {verb!r}", hint)
    if verb is None and not arguments:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        subparsers.choices[args.command].refuse_unknown(unknown)
    assert chosen is not None  # argparse has refused a line without a command
    return int(chosen.run(args))


def report(message: str, hint: str | None) -> None:
    """Write an error the way every command does: `error: …` and, if there is one, `hint: …`, on stderr."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    if hint:
        print(f"hint: {' '.join(hint.split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
