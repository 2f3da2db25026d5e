"""Where a figure comes from: machine, load, versions, arguments, revision."""

import os
import platform
import subprocess
import sys
import time
from typing import Any

import torch

import paceline

BUSY = 0.3


def provenance() -> dict[str, Any]:
    """Facts to lie beside every result."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "paceline": paceline.__version__,
        "revision": _revision(),
        "arguments": sys.argv[1:],
    }


def warn_if_busy() -> None:
    """Timings on a busy machine are worth little: say so."""
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"warning: the load is {load:.2f}, above {BUSY}: timings are not to be trusted", file=sys.stderr)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _revision() -> str:
    folder = os.path.dirname(os.path.abspath(__file__))
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"
