"""`etude live train CONFIG`: the trainer learns from a window, and publishes a candidate."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from etude.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live train`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML of stage live")
    parser.add_argument("--window", type=int, required=True, metavar="NUMBER", help="as `etude live window` printed it")
    parser.add_argument("--minutes", type=float, default=60.0, help="that the trainer may take (default: 60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Trains, unless that is done. Raises UserError or RunFailed."""
    from etude.cli.live import read_config
    from etude.live.learn.train import train_window
    from etude.live.learn.window import LiveContents, samples
    from etude.live.log.accounts import Accounts, open_blobs, open_log

    config = read_config(arguments.config)
    folder = Path(config.folder)
    if not folder.is_dir():
        raise UserError(f"{folder} holds no live loop yet: `etude live serve` makes it")
    if arguments.minutes <= 0:
        raise UserError(f"--minutes {arguments.minutes:g}: give a time above 0")
    arguments.interrupted = "the same command goes on"
    log = open_log(folder, config.database)
    try:
        contents = LiveContents(log, Accounts(folder), open_blobs(folder))
        batch = samples(log, contents, config.labels, arguments.window)
        done = train_window(config, log, arguments.window, batch, seconds=60 * arguments.minutes)
    finally:
        log.dispose()
    print(f"Window {done.window}: version {done.version} of {folder}/train/weights, from {done.turns:,} turns on "
          f"version {done.base}, {done.hints:,} of them with a correction.")  # fmt: skip
    for reason, count in done.refused.items():
        print(f"{count:,} turns were dropped: {reason}.")
    if done.action != "go":
        print(f"Warning: the guards did not train on it ({done.action}): see {folder}/train/logs/latest/trainer.log.")
    if arguments.json:
        print(json.dumps(asdict(done)))
