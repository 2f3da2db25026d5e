"""The `paceline` command: runs a verb, and turns whatever it raises into one line and an exit status.

Nothing that takes time is imported at the top: Ctrl-C in the first moments must find `main` at work, and end quietly.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence

from paceline.errors import PacelineError
from paceline.values import one_line

# A verb is a module `paceline.cli.NAME` with `add_parser(subparsers)`, which adds its parser, and `run(args) -> int`.
# Nothing heavy may be imported at its top: `paceline --help` must answer at once.
COMMANDS = {
    "generate": "answer or complete a prompt",
    "chat": "talk with a model",
    "pull": "download a model",
    "models": "list or delete models",
    "methods": "list the drafting methods, and what a model has for each",
    "bench": "measure the drafting methods, plain decoding and other engines",
    "quality": "what a weight layout costs: KL, top-1 agreement, perplexity",
    "tune": "find what makes a method fast on this machine",
    "data": "have a model write what its drafter is trained on",
    "train": "train a drafter for a model",
    "export": "write a drafter for another engine",
}

_NO_RIGHT = "you need the right to use that path: check its owner and mode, or name another"
HINTS = {  # what to do about an error of the system
    errno.ENOSPC: "free some space on that disk, or write elsewhere",
    errno.EDQUOT: "your quota is used up: delete something, or write elsewhere",
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EROFS: "that disk cannot be written to: name another place",
    errno.EMFILE: "too many files are open: raise the limit (`ulimit -n`)",
    errno.ENOMEM: "there is not enough memory: close other programs, or use a smaller model or context",
    errno.EIO: "the disk or the terminal failed: try another",
}

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    try:
        make_streams_usable()
        from paceline.cli.dispatch import dispatch

        status = dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # a closed pipe must show here, not in the interpreter's last breath
        return status
    except PacelineError as error:
        show_traceback()
        report(str(error), error.hint)
        return EXIT_ERROR
    except BrokenPipeError:
        # The reader has left. Point stdout elsewhere, or the interpreter complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        show_traceback()
        where = f": {error.filename}" if error.filename else ""
        report(f"{error.strerror or error}{where}", HINTS.get(error.errno or 0))
        return EXIT_ERROR
    except (Exception, KeyboardInterrupt) as error:
        show_traceback()
        if was_interrupted(error):
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        report(
            f"this is a fault of Paceline: {type(error).__name__}: {error}",
            "run it again with PACELINE_DEBUG=1 for the traceback, and please report it",
        )
        return EXIT_ERROR


def make_streams_usable() -> None:
    """A closed stdout or stderr swallows what is written; a character it cannot encode becomes a question mark."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it lives as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: a library that it hits while being imported may raise another one."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def report(message: str, hint: str | None) -> None:
    """Write an error the way every command does: `error: …` and, if there is one, `hint: …`, on stderr."""
    print(f"error: {one_line(message, 500)}", file=sys.stderr)
    if hint:
        print(f"hint: {' '.join(hint.split())}", file=sys.stderr)


def show_traceback() -> None:
    """For whoever asked for it."""
    if os.environ.get("PACELINE_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
