"""With a compiler there is a library that fits its sources; without one there is a line that says why not."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.ops.native import build, library


def test_without_a_compiler_there_is_a_line_and_no_old_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    old = tmp_path / build.LIBRARY.name
    old.write_bytes(b"old")
    with pytest.raises(build.BuildError, match=r"^no C\+\+ compiler found$"):
        build.build(library=old)
    assert not old.exists()
    missing = library.load(old)
    assert missing == library.Missing("were not built: there was no C++ compiler at installation")


@pytest.mark.parametrize(
    ("compiler", "line"), [("no-such-compiler -O1", "no-such-compiler: "), (f"{sys.executable} -c", "python")]
)
def test_a_compiler_that_fails_is_one_line(
    compiler: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(build.BuildError, match=f"^{line}[^\n]*$"):
        build.build(library=tmp_path / "none.so")


def test_a_library_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(library.load(), library.Missing):
        pytest.skip("native operators are not built")
    copy = tmp_path / build.LIBRARY.name
    copy.write_bytes(build.LIBRARY.read_bytes())
    monkeypatch.setattr(library, "sources_digest", lambda: "another")
    missing = library.load(copy)
    assert isinstance(missing, library.Missing) and "make native" in missing.reason
    copy.with_name("damaged.so").write_bytes(b"no library")
    assert isinstance(library.load(copy.with_name("damaged.so")), library.Missing)


def test_the_pool_is_torchs_own() -> None:
    """After both have computed with two threads, the process has as many as after torch alone: no second pool."""
    if isinstance(library.load(), library.Missing):
        pytest.skip("native operators are not built")
    code = (
        "import os, torch\n"
        "from paceline.ops.packed import BF16, PackedLinear, pack\n"
        "torch.set_num_threads(2)\n"
        "x = torch.ones(1 << 20); x + x\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "product = PackedLinear(pack(torch.ones(256, 64).bfloat16(), BF16, 64))\n"
        "product(torch.ones(3, 64).bfloat16())\n"
        "print(before, len(os.listdir('/proc/self/task')))"
    )
    if not Path("/proc/self/task").is_dir():
        pytest.skip("needs Linux's /proc")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, result.stdout.split())
    assert before == after >= 2


def test_who_asks_for_help_keeps_the_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object) -> list[str]:
        raise AssertionError("it was built")

    monkeypatch.setattr(build, "build", refused)
    monkeypatch.setattr(sys, "argv", ["build", "--help"])
    with pytest.raises(SystemExit) as stop:
        build.main()
    assert stop.value.code == 0 and "compiler flag" in capsys.readouterr().out
    given: list[list[str]] = []
    monkeypatch.setattr(build, "build", lambda flags: given.append(flags) or [])
    monkeypatch.setattr(sys, "argv", ["build", "-g", "-fsanitize=address,undefined"])
    assert build.main() == 0 and given == [["-g", "-fsanitize=address,undefined"]]
