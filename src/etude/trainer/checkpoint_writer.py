"""Writes checkpoints on a thread of its own, from a copy in the host's memory, while the next step trains."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from secrets import token_hex

import torch
from torch import Tensor

from etude.errors import RunFailed, UserError
from etude.trainer import checkpoint
from etude.trainer.checkpoint import Part
from etude.weights.ranks import Ranks

WRITE_SECONDS = 3600.0
_TRIES = 2  # consecutive failures that end the run


class CheckpointWriter:
    """Keeps the newest `keep` checkpoints in `folder`. One is written at a time: `start` waits for the previous one. A
    failure is reported at once and the run goes on, since it can resume from an earlier checkpoint; a second
    consecutive failure is raised. Host memory: one copy of the saved tensors, reused by the next checkpoint."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks | None = None):
        self._folder, self._keep = folder, keep
        self._ranks = ranks or Ranks(0, 1, token_hex(8))
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the last checkpoint; None: it was written
        self._failures = 0  # consecutive
        self.started = -1  # version of the newest begun checkpoint

    def start(
        self,
        version: int,
        parts: Mapping[str, Part],
        protect: Collection[int] = (),
        about: Mapping[str, str] | None = None,
    ) -> None:
        """Copies this rank's part of a checkpoint and begins to write it. Checkpoints in `protect` are not deleted for
        it. Raises UserError after two consecutive failures, RunFailed after an hour."""
        self.wait()
        if self._error is not None and (self._failures >= _TRIES or not isinstance(self._error, UserError)):
            raise self._error
        copied = self._copied(parts)
        arguments = (version, copied, frozenset(protect), dict(about or {}))
        self.started = version
        # A daemon: if the process ends, the folder never gets its final name.
        self._thread = threading.Thread(target=self._write, args=arguments, name=f"checkpoint-{version}", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the last ended checkpoint could not be written."""
        return self._error is not None

    def wait(self) -> float:
        """Waits until none is being written. Returns the seconds of the wait. Raises RunFailed after an hour."""
        began = time.monotonic()
        if self._thread is not None:
            self._thread.join(WRITE_SECONDS)
            if self._thread.is_alive():
                raise RunFailed(
                    f"checkpoint {self.started} was not written to {self._folder} within an hour; check the disk and "
                    "resume"
                )
        return time.monotonic() - began

    def close(self) -> None:
        """Waits for the last checkpoint, and raises its error."""
        self.wait()
        if self._error is not None:
            raise self._error

    def _copied(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        copies: dict[str, Tensor] = {}
        for name, part in parts.items():
            rows, old = part.rows.detach(), self._copies.get(name)
            fits = old is not None and old.shape == rows.shape and old.dtype == rows.dtype
            # Not pinned: PyTorch rounds pinned memory up to a power of two.
            copy = old if old is not None and fits else torch.empty(rows.shape, dtype=rows.dtype)
            copies[name] = copy.copy_(rows)
        self._copies = copies
        return {name: Part(copies[name], part.first, part.total) for name, part in parts.items()}

    def _write(self, version: int, parts: dict[str, Part], protect: frozenset[int], about: dict[str, str]) -> None:
        try:
            checkpoint.write(self._folder, version, parts, self._ranks, about)
            if self._ranks.rank == 0:
                checkpoint.prune(self._folder, self._keep, protect)
        except BaseException as e:  # `start` or `close` raises it
            self._error, self._failures = e, self._failures + 1
            if isinstance(e, UserError) and self._failures < _TRIES:
                print(f"note: {e}; the run goes on and tries again", file=sys.stderr, flush=True)
        else:
            self._error, self._failures = None, 0
