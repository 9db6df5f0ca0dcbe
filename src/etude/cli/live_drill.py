"""`etude live drill CONFIG`: rolls the canary's servers back and forward again, and says how long that takes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from etude.cli.live_release import opened


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live drill`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML of stage live")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Prints the seconds of each cluster. Raises UserError if one takes longer than a minute."""
    from etude.live.release.operations import drill

    with opened(arguments.config) as loop:
        took = drill(loop, print)
    if arguments.json:
        print(json.dumps({"seconds": dict(took)}))
