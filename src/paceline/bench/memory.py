"""How much memory an arm took at its highest, of a process that holds all of them."""

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> int | None:
    """Bytes of this process that lie in memory now; None where the system does not tell."""
    return _field("VmRSS:")


def reset_peak(device: torch.device) -> bool:
    """Begin to watch the highest use; False where it cannot be watched."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text("5")  # Linux: the high-water mark falls to what is in use
    except OSError:
        return False
    return True


def peak(device: torch.device) -> int | None:
    """Bytes at the highest since `reset_peak`: of the process, or on CUDA of torch's tensors on the device."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _field("VmHWM:")


def _field(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
    except (OSError, ValueError, StopIteration):
        return None
