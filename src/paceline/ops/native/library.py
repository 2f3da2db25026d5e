"""The compiled operators, through ctypes: one library, several levels of instructions, torch's own threads.

`PACELINE_OPS` caps the level (`amx`, `avx512`, `avx2`, `portable`); `torch` turns the library off.
"""

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.ops.native.build import LIBRARY, sources_digest

LEVELS = ("portable", "avx2", "avx512", "amx")  # as `Level` in api.cpp, the better the later
VARIABLE = "PACELINE_OPS"
_POINTER, _INT, _LONG, _TYPE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint32
_BOOL, _FLOAT = ctypes.c_bool, ctypes.c_float


@dataclass(frozen=True, slots=True)
class Library:
    """functions: the C interface of api.cpp, by the name after `paceline_`. levels: those that this machine runs."""

    functions: Mapping[str, Any]
    levels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """There is no library to be used; `reason` completes "native operators …"."""

    reason: str


_SIGNATURES = {
    "start": (ctypes.c_uint, [_POINTER]),
    "packed_bytes": (_LONG, [_TYPE, _LONG, _LONG]),
    "pack": (None, [_TYPE, _LONG, _LONG, _POINTER, _POINTER, _INT]),
    "rows": (ctypes.c_bool, [_POINTER, _LONG, _POINTER, _LONG, _POINTER]),
    "linear": (
        ctypes.c_bool,
        [_INT, _POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT],
    ),
    "attention_half": (_BOOL, [_INT, *[_POINTER] * 6, _INT]),
    "mlp_half": (_BOOL, [_INT, _POINTER, _POINTER, _LONG, _POINTER, _INT]),
    "norm": (None, [_INT, _POINTER, _LONG, _LONG, _POINTER, _BOOL, _FLOAT, _POINTER, _POINTER, _INT]),
    "dense": (
        _BOOL,
        [_INT, _POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT],
    ),
    "gated": (None, [_INT, _POINTER, _LONG, _LONG, _BOOL, _POINTER, _INT]),
    "maxima": (None, [_INT, _POINTER, _LONG, _LONG, _POINTER, _INT]),
    "attention": (
        _BOOL,
        [_INT, _POINTER, _LONG, _LONG, _FLOAT, _FLOAT, _POINTER, _POINTER, _BOOL, *[_POINTER] * 4, _INT],
    ),
}


@cache
def load(path: Path = LIBRARY) -> Library | Missing:
    """The library, loaded once."""
    if not path.is_file():
        return Missing("were not built: there was no C++ compiler at installation")
    try:
        handle = ctypes.CDLL(str(path))
        built_from = ctypes.c_char_p.in_dll(handle, "paceline_sources").value or b""
        functions = {name: getattr(handle, f"paceline_{name}") for name in _SIGNATURES}
    except (OSError, ValueError, AttributeError) as error:
        return Missing(f"do not load ({error})")
    if (wanted := sources_digest()) and built_from.decode() != wanted:
        return Missing("are older than their sources: install again, or `make native`")
    for name, (result, arguments) in _SIGNATURES.items():
        functions[name].restype, functions[name].argtypes = result, arguments
    found = functions["start"](_torch_threads())
    return Library(functions, tuple(name for bit, name in enumerate(LEVELS) if found >> bit & 1))


def _torch_threads() -> int | None:
    """Address of `GOMP_parallel` in the OpenMP runtime that torch itself is linked with; None where it has another."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            return ctypes.cast(ctypes.CDLL(str(folder / name)).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def level() -> str | None:
    """The level to compute at: the best of this machine, capped by `PACELINE_OPS`; None means torch."""
    cap = os.environ.get(VARIABLE) or LEVELS[-1]
    if cap != "torch" and cap not in LEVELS:
        raise PacelineError(f"{VARIABLE}={cap} is not a level", hint=f"known: torch, {', '.join(LEVELS)}")
    library = load()
    if cap == "torch" or isinstance(library, Missing):
        return None
    return next((name for name in reversed(LEVELS[: LEVELS.index(cap) + 1]) if name in library.levels), None)


def why_not() -> str | None:
    """Why there is no level, in words that complete "native operators …"."""
    library = load()
    if isinstance(library, Missing):
        return library.reason
    return f"are turned off ({VARIABLE}=torch)" if level() is None else None
