"""A process that is started again when it ends by itself, later each time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from etude.processes import Child

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 30.0
STEADY_SECONDS = 120.0
"""A process that ran for so long is started again after `FIRST_SECONDS`, as if it had never ended."""
ENDINGS = (0, 2)  # it has finished; the user must help
_LOOK_SECONDS = 0.1
_BEGIN_SECONDS = 20.0  # of a call that forks a process


class Supervised:
    """A process of the run, started at most `restarts` times again (-1: without end) unless it finished, printed a
    sentence for the user, or was stopped. Its thread starts the children, which die with it. `begins` starts one."""

    def __init__(self, name: str, log: Path, begins: Callable[[], Child], restarts: int) -> None:
        self.name, self.log = name, log
        self._begins, self._left = begins, restarts
        self.starts, self.waits = 0, ""
        self._child: Child | None = None
        self._refusal = ""  # why no process could be started
        self._stop, self._seconds = threading.Event(), 0.0
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name=f"supervisor of {name}", daemon=True)
        self._thread.start()
        self._first.wait(_BEGIN_SECONDS)

    def _supervise(self) -> None:
        delay = FIRST_SECONDS
        while True:
            begin = time.monotonic()
            try:
                child = self._begins()
            except OSError as e:
                self._refusal = f"the {self.name} could not be started: {e.strerror or e}"
                self._first.set()
                return
            self.starts += 1
            self._child = child
            self._first.set()
            while child.exit_code is None:
                if self._stop.wait(_LOOK_SECONDS):
                    child.stop(self._seconds)
                    return
            if child.exit_code in ENDINGS or self._left == 0:
                return
            self._left -= 1
            delay = FIRST_SECONDS if time.monotonic() - begin > STEADY_SECONDS else delay
            if self._stop.wait(delay):
                return
            delay = min(2 * delay, LONGEST_SECONDS)

    @property
    def exit_code(self) -> int | None:
        """None while the process runs or is about to start again, then its last exit code."""
        if self._thread.is_alive():
            return None
        return 1 if self._refusal or self._child is None else self._child.exit_code

    @property
    def begun(self) -> bool:
        """Whether a process was started."""
        return self.starts > 0

    @property
    def pids(self) -> dict[str, int]:
        """Its pid, by the name of its log."""
        child = self._child
        return {} if child is None or child.exit_code is not None else child.pids

    def failure(self) -> str | None:
        """One sentence if the process is gone for another reason than having finished, else None."""
        return self.end() if self.exit_code else None

    def end(self) -> str:
        """One sentence about a process that is gone."""
        return self._refusal or (self._child.end() if self._child else f"the {self.name} was not started")

    def ends(self, seconds: float) -> bool:
        """Whether the process ends for good within so many seconds."""
        self._thread.join(seconds)
        return self.exit_code is not None

    def stop(self, seconds: float) -> None:
        """SIGTERM, then SIGKILL after `seconds`; it is not started again."""
        self._seconds = seconds
        self._stop.set()
        self._thread.join(seconds + 15)
