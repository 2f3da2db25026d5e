"""Where a script's figures come from: the facts that `paceline bench` gives, with the script's own arguments."""

import os
import sys
from typing import Any

from paceline.bench import provenance as facts


def provenance() -> dict[str, Any]:
    """Facts to lie beside every result."""
    return facts.provenance({}, facts.load_average()) | {"arguments": sys.argv[1:]}


def warn_if_busy() -> None:
    """Timings on a busy machine are worth little: say so."""
    load = facts.load_average()
    if facts.is_busy(load, os.cpu_count() or 1):
        print(f"warning: the load is {load:.2f}: timings are not to be trusted", file=sys.stderr)
