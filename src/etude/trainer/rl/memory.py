"""Measures the largest memory of a period of work, on the accelerator or of this process."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KERNELS = 64  # more than the shapes of one pass, so that its layers share kernels
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def bound_kernels(environment: MutableMapping[str, str]) -> None:
    """Bounds the number of oneDNN's kernels that a process keeps, one for each shape of a product: by default 1024,
    although batches hardly repeat a shape. Has no effect after the process's first product."""
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's own, and PyTorch's for it
        environment.setdefault(variable, str(_KERNELS))


def reset_peak(device: torch.device | str) -> None:
    """Begins a period. If the kernel refuses, the process's peak counts from its start on."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _RESET.write_text("5")  # proc(5): sets the peak resident size to the current one


def peak_bytes(device: torch.device | str) -> int:
    """Largest memory since `reset_peak`: allocated on the accelerator, or resident here; 0 if the system does not
    report it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return int(match[1]) * 1024 if match else 0


class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of tensors made by operations until they are freed; `peak` is the largest count.
    Works on real tensors and on those without memory: of the meta device, or in FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in inputs:
                self._made(tensor.untyped_storage())
        return out

    def _made(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = self._known[storage] = storage.nbytes()
        weakref.finalize(storage, self._freed, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _freed(self, size: int) -> None:
        self.now -= size
