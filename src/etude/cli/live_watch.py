"""`etude live watch REPO`: what becomes of the edits that the gateway's answers led to."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live watch`."""
    parser.add_argument(
        "repository", type=Path, metavar="REPO", help="root of a git repository with .etude/consent.toml"
    )
    parser.add_argument("--gateway", required=True, metavar="URL", help="the gateway; its API key is in ETUDE_API_KEY")
    parser.add_argument("--agent", type=Path, action="append", default=[], metavar="FILE",
                        help="trajectory of mini-swe-agent, or JSON lines FILE.jsonl; may be repeated")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="look once, send what waits, and end: for CI and hooks")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="SECONDS",
                        help="for which the end waits for the gateway (default: 30); what it does not get by then is "
                             "sent the next time")  # fmt: skip


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Watches until SIGTERM or SIGINT, and prints what was told. Raises UserError."""
    from etude.errors import UserError
    from etude.live.observe.delivery import Delivery
    from etude.live.observe.spool import AlreadyWatched
    from etude.live.observe.watch import open_watcher
    from etude.protocol.access import TOKEN_VARIABLE

    if arguments.interval <= 0 or arguments.seconds < 0:
        raise UserError("--interval is above 0 seconds, and --seconds at least 0")
    try:
        watcher = open_watcher(arguments.repository, arguments.agent)
    except AlreadyWatched:
        if not arguments.once:
            raise
        return print("another `etude live watch` has the repository, and tells the gateway")
    ended: list[int] = []
    handlers = [signal.signal(number, lambda n, _: ended.append(n)) for number in (signal.SIGTERM, signal.SIGINT)]
    delivery = None
    try:
        delivery = Delivery(watcher.state, arguments.gateway, os.environ.get(TOKEN_VARIABLE, ""))
        print(f"watching {watcher.repository.root}", flush=True)
        while True:
            watcher.look()
            if arguments.once or ended:
                break
            delivery.send()
            deadline = time.monotonic() + arguments.interval
            while not ended and time.monotonic() < deadline:
                time.sleep(min(0.1, arguments.interval))
        if ended:
            watcher.stop()
        waiting = delivery.send_until(arguments.seconds)
        counts = watcher.counts
        print(f"{counts.edits} edits, {counts.signals} signals seen; {delivery.delivered} delivered, "
              f"{delivery.refused} refused, {waiting} wait for the gateway")  # fmt: skip
        if counts.unfollowed or counts.lines_refused:
            print(f"{counts.unfollowed} edits were too many or too long to follow; {counts.lines_refused} lines of "
                  f"agents were not understood")  # fmt: skip
    finally:
        if delivery is not None:
            delivery.close()
        watcher.state.close()
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
