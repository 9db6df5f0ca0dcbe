"""`etude live watch-canary CONFIG`: decides on the release on trial each minute, until it is interrupted."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from etude.cli.live_release import opened
from etude.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live watch-canary`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML of stage live")
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="between two looks (default: 60)")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Prints a line whenever something changes. Raises UserError."""
    from etude.live.release.operations import watch

    if not arguments.every > 0:
        raise UserError(f"--every {arguments.every}: a look takes time, give seconds above 0")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with opened(arguments.config) as loop:
        watch(loop, stop.wait, lambda text: print(text, flush=True), arguments.every)
