"""`etude live export CONFIG TENANT USER -o DIR`: all that is known of an account, decrypted."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from etude.cli.live_privacy import add_account, opened


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live export`."""
    add_account(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to make")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Prints counts. Raises UserError."""
    from etude.live.log.privacy import export

    with opened(arguments.config) as (engine, store, accounts, _):
        counts = export(engine, store, accounts, arguments.tenant, arguments.user, arguments.output)
    print(f"{arguments.output}: {', '.join(f'{count} {name}' for name, count in counts.items() if count)}")
