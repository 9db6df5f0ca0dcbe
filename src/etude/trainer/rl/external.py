"""A trainer that others have started: its heartbeats, and its end with the run's (`trainer.launcher = "external"`).

The run and rank 0 write their heartbeats into the folder of the attempt, which both see. A trainer belongs to one
attempt of a run: the next one waits for a new trainer.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude import runfolder
from etude.errors import RunFailed, UserError, first_line
from etude.processes import SILENT_SECONDS, Elsewhere, Heartbeat, own_rank

_LOOK_SECONDS = 1.0


@contextmanager
def attended(run: Path) -> Iterator[None]:
    """A context in which rank 0 tells the run that it lives and how it ends, and ends as soon as the run has; it does
    nothing for a trainer that the run has started. Raises UserError if the run waits for no trainer."""
    if runfolder.load_config(run).trainer.launcher == "local" or own_rank() not in (None, 0):
        yield
        return
    attempt = (run / "logs/latest").resolve()
    theirs = Elsewhere("run", attempt / runfolder.RUN_BEAT, 0.0)
    if theirs.exit_code is not None:
        raise UserError(f"{run} waits for no trainer: start or resume the run first")
    try:
        ours = Heartbeat(attempt / runfolder.TRAINER_BEAT, first=True)
    except FileExistsError:
        raise UserError(f"{run} had a trainer since it was started: resume the run, then start one again") from None
    stopping = threading.Event()
    threading.Thread(target=_follow, args=(theirs, ours, stopping), name="run's end", daemon=True).start()
    try:
        yield
    except BaseException as e:
        stopping.set()
        known = isinstance(e, UserError | RunFailed)
        ours.end(2 if isinstance(e, UserError) else 1, str(e) if known else f"{type(e).__name__}: {first_line(e)}")
        raise
    stopping.set()
    ours.end(0)


def _follow(theirs: Elsewhere, ours: Heartbeat, stopping: threading.Event) -> None:
    while not stopping.wait(_LOOK_SECONDS):
        if theirs.exit_code is not None:
            silent = f"has been silent for {SILENT_SECONDS:.0f} seconds" if theirs.exit_code else "has ended"
            why = f"the run {silent}: resume it, then start the trainer again"
            print(f"etude: {why}", file=sys.stderr, flush=True)
            ours.end(1, why)
            os._exit(1)
