"""The most memory that a stretch of work has taken: of the accelerator, or of this process."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: str) -> None:
    """Begin a stretch. A kernel that refuses lets the process's peak count from its start on."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _RESET.write_text("5")  # proc(5): sets the peak resident size to the current one


def peak_bytes(device: str) -> int:
    """Since `reset_peak`: allocated on the accelerator, or resident here; 0 where the system does not report it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def resident_bytes() -> int:
    """Memory of this process now; 0 where the system does not report it."""
    return _status("VmRSS")


def _status(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return int(match[1]) * 1024 if match else 0
