"""Test runs in a box that a container isolates: `runs.py` below `sandbox/guest/guest.py`."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

from ...sandbox.guest import box, linux, root
from ...sandbox.guest.guest import HOME, folders, lay, signal_all
from .runs import ForkedRun, RunTemplate


class RemoteRuns(RunTemplate):
    """Runs tests in a box that is used once. This process imports no code of the repository."""

    def __init__(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        self.user = hello["user"]
        folders(self.user)
        if hello["decides"]:
            for folder in (root.WORKSPACE, HOME, "/dev/shm"):
                os.chown(folder, 0, 0)
                os.chmod(folder, 0o755)
        super().__init__(connection, False, hello["hidden"], hello["controls"])

    def _fork(self) -> int:
        return os.fork()

    def _enter(self, limits: dict[str, Any], changes: dict[str, bytes | None], alone: bool) -> None:
        linux.own_session()
        lay(changes, self.user)
        box.confine(limits, self.filters[alone], self.user)

    def _warm_up(self, files: Sequence[str]) -> None:
        """Do nothing, for there is no second run."""

    def _finish(self, run: ForkedRun) -> None:
        """End the processes that the run left behind, so that its pipe closes."""
        signal_all(self.user, signal.SIGKILL)
        super()._finish(run)
