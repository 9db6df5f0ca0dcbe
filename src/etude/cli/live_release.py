"""`etude live release CONFIG`: a version that has passed the gate goes to the canary, step by step to all."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etude.live.release.operations import Loop


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live release`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML of stage live")
    add_version(parser)
    parser.add_argument("--approve", metavar="NAME", help="a person lets the release on trial go to its next stage")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def add_version(parser: argparse.ArgumentParser) -> None:
    """The flags that name a version."""
    parser.add_argument("--version", type=int, metavar="V", help="version of the store (default: the newest)")
    parser.add_argument("--store", metavar="URL", help="weight store of the versions to release (default: that of the "
                                                       "run of the newest window)")  # fmt: skip


@contextmanager
def opened(config: Path) -> Iterator[Loop]:
    """The loop of a configuration. Raises UserError."""
    from etude.cli.live import read_config
    from etude.live.release.operations import open_loop

    loop = open_loop(read_config(config))
    try:
        yield loop
    finally:
        loop.engine.dispose()


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Begins the canary of a version, or goes on with it. Raises UserError."""
    from etude.live.release.operations import approve, candidate, start

    with opened(arguments.config) as loop:
        if arguments.approve is not None:
            standing = approve(loop, arguments.approve)
        else:
            found = candidate(loop, arguments.store, arguments.version)
            standing = start(loop, found.manifest.digest, found.manifest.version)
    event = standing.events[-1]
    release = standing.release
    print(f"release {release.number} (version {release.version}): {event.stage} at {event.share:.0%}, {event.reason}")
    if arguments.json:
        told = {"release": release.number, "stage": str(event.stage), "share": event.share}
        print(json.dumps(told | {"reason": event.reason}))
    return 0
