"""`etude live watch | hook`: observation of a developer's edits in a git repository."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

from etude.cli.live import LiveAction


def _add_repository(parser: argparse.ArgumentParser) -> None:
    text = "root of a git repository with .etude/consent.toml"
    parser.add_argument("repository", type=Path, metavar="REPO", help=text)


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live watch`."""
    _add_repository(parser)
    parser.add_argument("--gateway", required=True, metavar="URL", help="the gateway; its API key is in ETUDE_API_KEY")
    agent = "trajectory of mini-swe-agent, or JSON lines FILE.jsonl; may be repeated"
    parser.add_argument("--agent", type=Path, action="append", default=[], metavar="FILE", help=agent)
    parser.add_argument("--once", action="store_true", help="look once, send what waits, and end: for CI and hooks")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    seconds = (
        "for which the end waits for the gateway (default: 30); what it does not get by then is sent the next time"
    )
    parser.add_argument("--seconds", type=float, default=30.0, metavar="SECONDS", help=seconds)


def run_watch(arguments: argparse.Namespace) -> None:
    """Watches until SIGTERM or SIGINT, and prints counts. Raises UserError."""
    from etude.errors import UserError
    from etude.live.observe import AlreadyWatched, Delivery, open_watcher
    from etude.protocol import TOKEN_VARIABLE

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
        print(
            f"{counts.edits} edits, {counts.signals} signals seen; {delivery.delivered} delivered, "
            f"{delivery.refused} refused, {waiting} wait for the gateway"
        )
        if counts.unfollowed or counts.lines_refused:
            print(
                f"{counts.unfollowed} edits were too many or too long to follow; {counts.lines_refused} lines of "
                f"agents were not understood"
            )
    finally:
        if delivery is not None:
            delivery.close()
        watcher.state.close()
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)


def add_hook(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live hook`."""
    parser.add_argument("what", choices=("install", "remove"), help="write the hooks, or take them away")
    _add_repository(parser)
    parser.add_argument("--gateway", metavar="URL", help="as for `etude live watch`")
    parser.add_argument("--agent", type=Path, action="append", default=[], metavar="FILE", help="likewise")


def run_hook(arguments: argparse.Namespace) -> None:
    """Writes or removes post-commit, post-merge and post-rewrite. Raises UserError."""
    from etude.errors import UserError
    from etude.live.observe import TextRepository, install_hooks, log_of, read_consent, remove_hooks
    from etude.protocol import TOKEN_VARIABLE

    repository = TextRepository(arguments.repository)
    if arguments.what == "remove":
        for path in remove_hooks(repository):
            print(f"removed {path}")
        return
    read_consent(repository)
    if arguments.gateway is None:
        raise UserError("a hook sends to a gateway: give --gateway URL")
    for path in install_hooks(repository, arguments.gateway, arguments.agent):
        print(f"wrote {path}")
    print(
        f"git needs {TOKEN_VARIABLE} in its environment; what goes wrong is printed by the next hook, from "
        f"{log_of(repository)}"
    )


ACTIONS: dict[str, LiveAction] = {"watch": (add_watch, run_watch), "hook": (add_hook, run_hook)}
