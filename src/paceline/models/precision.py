"""What a precision may be called. Pure data: nothing here imports torch."""

from paceline.errors import PacelineError
from paceline.values import shown

NAMES = ("bf16", "fp32", "fp64", "file", "int8", "int4")
SPELLINGS = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
AUTO = "auto"  # whatever suits


def precision_of(dtype: object, what: str = "dtype") -> str | None:
    """The precision's own name, None for "auto". `what`: the argument's name in the PacelineError for anything else."""
    name = SPELLINGS.get(dtype, dtype) if isinstance(dtype, str) else None
    if name not in (AUTO, *NAMES):
        raise PacelineError(f"unknown {what} {shown(dtype)}", hint=f"known: {AUTO}, {', '.join(NAMES)}")
    return None if name == AUTO else name
