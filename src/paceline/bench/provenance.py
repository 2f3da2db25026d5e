"""Where a figure comes from: machine, load, versions, arguments, revision."""

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import paceline

LEAST_BUSY = 0.3  # a load that is too much, on any machine
BUSY_SHARE = 0.05  # of the cores


def provenance(arguments: Mapping[str, Any], load: float | None, packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Facts to lie beside every result. load: before the run; packages: distributions whose versions matter as well."""
    cores = os.cpu_count() or 1
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": _processor(),
        "system": platform.platform(),
        "cores": cores,
        "memory_bytes": _memory(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": load,
        "busy": is_busy(load, cores),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "versions": {"paceline": paceline.__version__, "torch": torch.__version__} | _versions(packages),
        "revision": revision(Path(paceline.__file__).parent),
        "arguments": dict(arguments),
    }


def load_average() -> float | None:
    """Runnable processes, averaged over the last minute; None where the system does not tell."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def is_busy(load: float | None, cores: int) -> bool:
    """Whether timings are worth little."""
    return load is not None and load > max(LEAST_BUSY, BUSY_SHARE * cores)


@dataclass(frozen=True, slots=True)
class OthersWatch:
    """How many cores other processes kept busy meanwhile."""

    busy_s: float | None
    own_s: float
    wall_s: float

    @classmethod
    def start(cls) -> "OthersWatch":
        return cls(_busy_seconds(), _own_seconds(), time.perf_counter())

    def cores(self) -> float | None:
        """Since the start, on average; None where the system does not tell."""
        busy = _busy_seconds()
        if busy is None or self.busy_s is None:
            return None
        others = (busy - self.busy_s) - (_own_seconds() - self.own_s)
        return round(max(0.0, others) / max(time.perf_counter() - self.wall_s, 1e-9), 3)


def revision(package: Path) -> str | None:
    """Of the checkout that the package runs from; None for an installed one, wherever that lies."""
    found = _git(package, "rev-parse", "--show-toplevel")
    if found is None or Path(found).resolve() / "src" / package.name != package.resolve():
        return None
    return _git(package, "describe", "--always", "--dirty")


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


def _busy_seconds() -> float | None:
    """Of all cores since the system began, whoever used them (a hypervisor's other guests too)."""
    try:
        with open("/proc/stat", encoding="utf-8") as lines:
            ticks = [int(word) for word in lines.readline().split()[1:9]]
        user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
