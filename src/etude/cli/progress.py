"""The progress bar of long commands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_SECONDS = 20.0  # between two lines of one stage, without a terminal
QUIET_SECONDS = 3.0  # before a command's first line: most commands have ended by then


@contextmanager
def bar() -> Generator[Callable[[str, int, int], None]]:
    """A progress bar on a terminal, lines elsewhere: call it with (stage, done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(time.monotonic)
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total or None)


def _lines(clock: Callable[[], float]) -> Callable[[str, int, int], None]:
    """Writes a line when a stage begins, and then every LINE_SECONDS; none in the first QUIET_SECONDS."""
    last, written, started = "", 0.0, clock()

    def line(stage: str, done: int, total: int) -> None:
        nonlocal last, written
        now = clock()
        if now - started >= QUIET_SECONDS and (stage != last or now - written >= LINE_SECONDS):
            last, written = stage, now
            print(f"{stage}: {done} of {total}" if total > 1 else stage, file=sys.stderr, flush=True)

    return line
