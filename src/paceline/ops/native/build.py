"""Compile the C++ operators into one shared library with a plain C interface, which any Python can load.

Run at installation (`hatch_build.py`), by `make native` and `make sanitize`. Needs nothing but a C++17 compiler
($CXX, c++, g++ or clang++). Each instruction set is a file compiled for itself; one that the compiler does not know is
left out.
"""

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = Path(os.environ.get("PACELINE_OPS_LIBRARY") or FOLDER / "libpaceline_ops.so")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni", "-mfma", "-mf16c")
LEVELS = {  # beyond what every processor of the family has
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
_BASE = ("pack", "level_portable", "step_portable")


class BuildError(Exception):
    """There is no library; the message is one line."""


def sources_digest() -> str:
    """What the library is built from, in 16 hex digits; empty where the sources are not at hand (a wheel)."""
    files = sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16] if files else ""


def build(extra: Sequence[str] = (), library: Path = LIBRARY) -> list[str]:
    """Compile and link; returns the levels that were left out. Raises BuildError, and then leaves no old library."""
    library.unlink(missing_ok=True)
    compiler = _compiler()
    left_out = []
    with tempfile.TemporaryDirectory() as folder:
        objects = [_compile(compiler, name, (), extra, Path(folder)) for name in _BASE]
        definitions = [f'-DPACELINE_SOURCES="{sources_digest()}"']
        for level, flags in LEVELS.items() if platform.machine() in ("x86_64", "AMD64") else ():
            try:
                kinds = (f"level_{level}", f"step_{level}")
                objects += [_compile(compiler, name, flags, extra, Path(folder)) for name in kinds]
                definitions.append(f"-DPACELINE_WITH_{level.upper()}")
            except BuildError:
                left_out.append(level)
        objects += [_compile(compiler, name, definitions, extra, Path(folder)) for name in ("api", "step", "layer")]
        linked = Path(folder) / library.name
        needed = () if sys.platform == "darwin" else ("-Wl,--as-needed", "-static-libgcc")
        _run([*compiler, "-shared", *needed, *extra, "-o", str(linked), *map(str, objects)])
        partial = library.with_suffix(".part")
        shutil.copyfile(linked, partial)
        partial.replace(library)  # a process that has the old one mapped keeps it
    return left_out


def _compiler() -> list[str]:
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise BuildError("no C++ compiler found")


def _compile(compiler: list[str], name: str, flags: Sequence[str], extra: Sequence[str], folder: Path) -> Path:
    out = folder / f"{name}.o"
    _run([*compiler, *FLAGS, *flags, *extra, "-c", str(FOLDER / f"{name}.cpp"), "-o", str(out)])
    return out


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from error
    if result.returncode:
        if os.environ.get("PACELINE_DEBUG"):
            print(result.stderr, file=sys.stderr)
        lines = [line for line in result.stderr.splitlines() if "error" in line] or ["failed"]
        raise BuildError(f"{Path(command[0]).name}: {lines[0].strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(usage="python -m paceline.ops.native.build [compiler flag …]", description=__doc__)
    _, flags = parser.parse_known_args()
    try:
        left_out = build(flags)
    except BuildError as error:
        print(f"native operators not built: {error}", file=sys.stderr)
        return 1
    print(f"built {LIBRARY.name}" + (f" without {', '.join(left_out)}" if left_out else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
