"""Where a script's figures come from: the facts that `paceline bench` gives, with the script's own arguments."""

import os
import sys
from pathlib import Path
from typing import Any

from paceline.bench import provenance as facts


def provenance() -> dict[str, Any]:
    """Facts to lie beside every result."""
    return facts.provenance({}, facts.load_average()) | {"arguments": [portable(each) for each in sys.argv[1:]]}


def portable(argument: str) -> str:
    """Results are for everybody to read: of a place on this machine they name the last part alone."""
    return Path(argument).name if os.path.isabs(argument) else argument


def warn_if_busy() -> None:
    """Timings on a busy machine are worth little: say so."""
    load = facts.load_average()
    if facts.is_busy(load, os.cpu_count() or 1):
        print(f"warning: the load is {load:.2f}: timings are not to be trusted", file=sys.stderr)
