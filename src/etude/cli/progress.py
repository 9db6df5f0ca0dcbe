"""The progress bar of long commands."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_SECONDS = 20.0  # between two lines of one stage, without a terminal
STILL_SECONDS = 25.0  # without a word from a stage; a terminal shows the time that has passed
QUIET_SECONDS = 3.0  # before a command's first line: most commands have ended by then


@contextmanager
def bar() -> Generator[Callable[[str, int, int], None]]:
    """A progress bar on a terminal, lines elsewhere: call it with (stage, done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        line, still = _lines(time.monotonic)
        ended = threading.Event()
        thread = threading.Thread(target=lambda: _beat(ended, still), daemon=True)
        thread.start()
        try:
            yield line
        finally:
            ended.set()
            thread.join()
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total or None)


def _beat(ended: threading.Event, still: Callable[[], None]) -> None:
    while not ended.wait(1.0):
        still()


def _lines(clock: Callable[[], float]) -> tuple[Callable[[str, int, int], None], Callable[[], None]]:
    """(writes a line when a stage begins, and then every LINE_SECONDS; writes the stage again if STILL_SECONDS have
    passed without a line). Neither writes in the first QUIET_SECONDS."""
    last, current, shown, lock = "", "", "", threading.Lock()  # stages: written last, and now; its text
    started = written = begun = clock()

    def line(stage: str, done: int, total: int) -> None:
        nonlocal last, current, shown, written, begun
        with lock:
            now = clock()
            begun, current = begun if stage == current else now, stage
            shown = f"{stage}: {done} of {total}" if total > 1 else stage
            if now - started >= QUIET_SECONDS and (stage != last or now - written >= LINE_SECONDS):
                last, written = stage, now
                print(shown, file=sys.stderr, flush=True)

    def still() -> None:
        nonlocal written
        with lock:
            now = clock()
            if shown and now - written >= STILL_SECONDS:
                written = now
                print(f"{shown} (for {now - begun:.0f} s)", file=sys.stderr, flush=True)

    return line, still
