"""The command line as a whole: what it prints, when, where, and with which exit status."""

import argparse
import errno
import importlib
import os
import resource
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from paceline import __version__
from paceline.cli import dispatch
from paceline.cli import main as cli
from paceline.errors import PacelineError


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], Callable[[], int]]:
    """Installs a verb `boom` that does what it is told, and returns how to run it."""

    def install(action: Callable[[], int]) -> Callable[[], int]:
        module = types.ModuleType("boom")
        module.add_parser = lambda subparsers: subparsers.add_parser("boom")
        module.run = lambda args: action()
        monkeypatch.setitem(sys.modules, "paceline.cli.boom", module)
        monkeypatch.setitem(cli.COMMANDS, "boom", "raises")
        return lambda: cli.main(["boom"])

    return install


def raising(error: BaseException) -> Callable[[], int]:
    def action() -> int:
        raise error

    return action


def test_version() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"paceline {__version__}\n", "")


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0 and result.stderr == ""
    for name, help_line in cli.COMMANDS.items():
        assert name in result.stdout and help_line in result.stdout


def test_help_answers_at_once() -> None:
    """Under half a second of processor time: a wall clock would count the other tests on this machine."""

    def cost() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cost() for _ in range(3)) < 0.5


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in cli.COMMANDS),
        ["genrate"],
        *(
            [verb, *rest]
            for verb in ("generate", "chat")
            for rest in (
                ["--method", "ngrm"],
                ["--rule", "best"],
                ["--dtype", "int3"],
                ["--device", "cpu:7"],
                ["--threads", "1000000000000"],
                ["--model", ""],
                ["--max-tokens", "0"],
                ["--max-context", "0"],
                ["-k", "0", "--draft-model", "x"],
            )
        ),
        ["methods"],
        ["generate", ""],
        ["generate", "--logprobs", "3", "hi"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: Sequence[str]) -> None:
    code = (
        "import sys\nfrom paceline.cli.main import main\n"
        f"try: main({list(arguments)!r})\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_adds_its_own_parser(name: str) -> None:
    subparsers = dispatch.Parser(prog="paceline").add_subparsers()
    module = importlib.import_module(f"paceline.cli.{name}")
    module.add_parser(subparsers)
    assert list(subparsers.choices) == [name]
    assert callable(module.run)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["genrate"], "unknown command 'genrate'", "did you mean `paceline generate`?"),
        (["xyzzy"], "unknown command 'xyzzy'", "the commands are generate, chat, pull, models"),
        (
            ["generate", "hi", "--temperatur", "1"],
            "unknown option --temperatur",
            "did you mean --temperature?",
        ),
        (["generate", "hi", "--temp=1"], "unknown option --temp=1", "did you mean --temperature?"),
        (["generate", "hi", "--xyzzy"], "unknown option --xyzzy", "--help"),
        (["generate", "hi", "there"], "unknown argument there", "--help"),
        (["generate", "hi", "--top-p", "x"], "argument --top-p: invalid float value: 'x'", "--help"),
        (["generate", "hi", "-n", "9" * 5000], "argument --max-tokens/-n: invalid int value: '999", "--help"),
        (["generate", "hi", "9" * 5000], "unknown argument 999", "--help"),
        (["g" * 5000], "unknown command 'ggg", "the commands are"),
        (["generate", "--stop"], "argument --stop: expected one argument", "--help"),
        (["--verbose"], "COMMAND", "--help"),
        (["--json", "generate", "hi"], "option --json stands before the command", "`paceline generate --json …`"),
        (["--model", "x", "chat"], "option --model stands before the command", "`paceline chat --model …`"),
    ],
)
def test_a_usage_error_is_one_line_and_a_hint(
    arguments: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    output = capsys.readouterr()
    first, second = output.err.splitlines()
    assert first.startswith("error: ") and error in first and len(first) < 600
    assert second.startswith("hint: ") and hint in second
    assert output.out == ""


def test_no_command_shows_the_help_on_stderr() -> None:
    result = run()
    assert (result.returncode, result.stdout) == (2, "")
    assert "generate" in result.stderr


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (PacelineError("no such\nmodel", "pull it"), ["error: no such model", "hint: pull it"]),
        (PacelineError("no such model"), ["error: no such model"]),
        (
            OSError(errno.ENOSPC, "No space left on device", "model.gguf"),
            ["error: No space left on device: model.gguf", "hint: free some space on that disk, or write elsewhere"],
        ),
    ],
)
def test_a_users_error_is_one_line(
    error: Exception, lines: list[str], verb: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb(raising(error))() == 1
    output = capsys.readouterr()
    assert output.err.splitlines() == lines
    assert output.out == ""


def test_our_own_fault_says_so(verb: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb(raising(ZeroDivisionError("division by zero")))() == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: this is a fault of Paceline: ZeroDivisionError: division by zero"
    assert "PACELINE_DEBUG=1" in hint


@pytest.mark.parametrize("error", [PacelineError("no"), ZeroDivisionError("no"), KeyboardInterrupt(), OSError("no")])
def test_debug_shows_the_traceback(
    error: BaseException, verb: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    boom = verb(raising(error))
    boom()
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    boom()
    assert "Traceback" in capsys.readouterr().err


def test_interrupt(verb: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb(raising(KeyboardInterrupt()))() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_in_another_errors_clothes(verb: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """An extension module that is interrupted while it is imported may say so in its own way."""

    def action() -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("initialization failed")  # noqa: B904

    assert verb(action)() == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("module", ["argparse", "paceline.cli.generate", "paceline.core.params", "torch"])
def test_ctrl_c_in_the_first_moments(module: str) -> None:
    """It comes while `module` is being imported."""
    code = (
        "import builtins, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "real = builtins.__import__\n"
        "def hooked(name, *rest):\n"
        f"    if name == {module!r} or rest[2] and name + '.' + rest[2][0] == {module!r}: signal.raise_signal(2)\n"
        "    return real(name, *rest)\n"
        "sys.argv[1:] = ['generate', 'hi']\n"
        "from paceline.cli.main import main\n"  # the console script's own line
        "import importlib\n"
        "inner = importlib.import_module\n"
        "importlib.import_module = lambda name: hooked(name, None, None, ()) and inner(name)\n"
        "builtins.__import__ = hooked\n"
        "sys.exit(main())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_the_entry_point_imports_next_to_nothing() -> None:
    """What it imports cannot be interrupted quietly."""
    code = (
        "import sys; sys.modules.pop('argparse', None)\n"
        "import paceline.cli.main\n"
        "print(sorted({'argparse', 'dataclasses', 'difflib', 'inspect', 'traceback'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_ctrl_c_while_waiting_for_input() -> None:
    code = (
        "import signal, sys, types\n"
        "from paceline.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background shell has it ignored
        "stdin = sys.stdin\n"
        "def read(): print('waiting', file=sys.stderr, flush=True); return stdin.read()\n"
        "sys.stdin = types.SimpleNamespace(read=read, isatty=lambda: False)\n"
        "sys.exit(main(['generate', '-']))"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        assert process.stderr.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
        assert process.stdout.read() == ""
        assert process.stderr.read() == "interrupted\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    """`paceline … | head`: quiet, and the status that a shell gives a broken pipe."""
    read, write = os.pipe()
    os.close(read)
    code = (
        "import sys, paceline.cli.dispatch as dispatch, paceline.cli.main as cli\n"
        "dispatch.dispatch = lambda arguments: print('x' * 100_000) or 0\n"
        "sys.exit(cli.main([]))"
    )
    result = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


def test_the_console_script_is_main() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="paceline")
    assert script.load() is cli.main


def test_an_option_is_never_guessed_from_its_beginning() -> None:
    parser = dispatch.Parser(prog="paceline")
    parser.add_argument("--temperature")
    assert parser.parse_known_args(["--temp", "1"]) == (argparse.Namespace(temperature=None), ["--temp", "1"])


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_fault(closed: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m paceline models {closed}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "fault" not in result.stderr


def test_what_a_terminal_cannot_encode_is_replaced(tiny_llama_dir: Path) -> None:
    arguments = ["generate", "--model", str(tiny_llama_dir), "--raw", "--seed", "1", "--max-tokens", "30", "\u00e9"]
    result = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert result.returncode == 0, result.stderr
    assert b"?" in result.stdout
