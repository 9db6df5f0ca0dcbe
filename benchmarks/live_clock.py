"""A clock that a benchmark sets, in place of the machine's: days of the live loop pass in minutes.

    clock = SetClock(file); clock.set(seconds since the epoch)
    with clock.here(): ...                               this process reads it
    python -m benchmarks.live_clock FILE live serve ...  a process of etude that reads it

Wall times (`time.time`, `time.time_ns`) are the clock's; deadlines are by the monotonic clock, which stays the
machine's.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import etude.cli.main

_BYTES = 8


class SetClock:
    """The clock in a file, which processes share. It does not move by itself."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)

    def set(self, seconds: float) -> None:
        """The time of all processes from now on."""
        self._memory[:] = round(seconds * 1e9).to_bytes(_BYTES, "little")

    def nanoseconds(self) -> int:
        """The time."""
        return int.from_bytes(self._memory[:], "little")

    def seconds(self) -> float:
        """The time."""
        return self.nanoseconds() / 1e9

    @contextmanager
    def here(self) -> Iterator[None]:
        """The wall time of this process is the clock's within."""
        before = time.time, time.time_ns
        time.time, time.time_ns = self.seconds, self.nanoseconds
        try:
            yield
        finally:
            time.time, time.time_ns = before


def main(argv: list[str]) -> None:
    """A command of etude by the clock."""
    with SetClock(Path(argv[0])).here():
        etude.cli.main.main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
