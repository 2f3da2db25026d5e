"""The scripts in `bench/` as commands: Ctrl-C is a line, and a long run says how long it has still to go."""

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import script
from provenance import provenance

from paceline.drafters.registry import find, names

BENCH = Path(script.__file__).parent
SCRIPTS = sorted(path for path in BENCH.glob("*.py") if "__main__" in path.read_text())


def test_there_are_scripts() -> None:
    assert {"verify_matrix.py", "verify_law.py", "throughput.py"} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_prepared_for_ctrl_c_before_anything_else(path: Path) -> None:
    statements = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    first = statements[0]
    assert (first.module if isinstance(first, ast.ImportFrom) else first.names[0].name) == "script"


def test_ctrl_c_while_a_script_begins() -> None:
    code = (
        "import builtins, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "real = builtins.__import__\n"
        "def hooked(name, *rest):\n"
        "    if name == 'torch': signal.raise_signal(signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = hooked\n"
        f"sys.path.insert(0, {str(BENCH)!r})\n"
        f"runpy.run_path({str(BENCH / 'throughput.py')!r}, run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "interrupted\n")


def test_a_resumable_script_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, script.resumable():
        raise KeyboardInterrupt
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted; run it again to go on\n"


def test_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(script.time, "perf_counter", lambda: now)
    remaining = script.Remaining(5)
    now += 10
    assert remaining.after_one_more() == "40 s left"
    now += 50
    assert remaining.after_one_more() == "2 min left"
    now += 30_000
    assert remaining.after_one_more() == "5 h 34 min left"
    for _ in range(3):
        last = remaining.after_one_more()
    assert last == "0 s left"


def test_every_method_is_measured(tiny_llama_dir: Path) -> None:
    """On a tiny model; those that need a head are left out by name."""
    arguments = ["--model", str(tiny_llama_dir), "--first", "1", "--tokens", "12"]
    result = subprocess.run([sys.executable, str(BENCH / "methods.py"), *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = {row["method"]: row for row in json.loads(result.stdout.splitlines()[-1])["rows"]}
    left_out = {line.split()[0] for line in result.stderr.splitlines() if "left out" in line}
    assert rows.keys() | left_out == set(names()) and left_out == {n for n in names() if find(n).needs == "head"}
    assert all(row["identical"] for row in rows.values())
    assert rows["none"]["ratio"] == rows["none"]["acceptance_length"] == 1
    for name, row in rows.items():
        assert 0 < row["target_share"] < row["target_share"] + row["draft_share"] < 1, name
        drafts_with_model = name in ("draft_model", "composite")
        assert (row["model"] is not None) == drafts_with_model


def test_provenance_names_no_place_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        sys, "argv", ["script", "--log", str(tmp_path / "found.jsonl"), "bench/results", "--first", "2"]
    )
    assert provenance()["arguments"] == ["--log", "found.jsonl", "bench/results", "--first", "2"]
