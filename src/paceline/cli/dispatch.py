"""From the words of a command line to the verb that they name."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from paceline import __version__
from paceline.cli.main import COMMANDS, EXIT_USAGE, report
from paceline.values import shown

WITHOUT_COMMAND = ("-h", "--help", "--version")


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
    for name, help_line in COMMANDS.items():
        if name == verb:
            chosen = importlib.import_module(f"paceline.cli.{name}")
            chosen.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=help_line)
    if not arguments:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    refuse_early_options(parser, arguments)
    if verb is not None and chosen is None:
        near = difflib.get_close_matches(verb, COMMANDS, n=1)
        hint = f"did you mean `paceline {near[0]}`?" if near else f"the commands are {', '.join(COMMANDS)}"
        parser.fail(f"unknown command {shown(verb)}", hint)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        subparsers.choices[args.command].refuse_unknown(unknown)
    assert chosen is not None  # argparse has refused a line without a command
    return int(chosen.run(args))


def refuse_early_options(parser: Parser, arguments: Sequence[str]) -> None:
    """`paceline --json generate`: a command's options follow it."""
    first = arguments[0]
    command = next((argument for argument in arguments if argument in COMMANDS), None)
    if first.startswith("-") and first not in WITHOUT_COMMAND and command is not None:
        parser.fail(f"option {first} stands before the command", f"put it after: `paceline {command} {first} …`")
