"""`etude live forget | export | expire | plant`: what accounts may ask for, retention, and planted strings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import UserError

if TYPE_CHECKING:
    import sqlalchemy as sa

    from etude.live.log.accounts import Accounts
    from etude.store import Store


def add_account(parser: argparse.ArgumentParser) -> None:
    """CONFIG TENANT USER."""
    add_config(parser)
    parser.add_argument("tenant", metavar="TENANT", help="name of the tenant")
    parser.add_argument(
        "user", metavar="USER", help="as the client's X-Etude-User has it, else the name of its API key"
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    """CONFIG."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML of stage live")


@contextmanager
def opened(config: Path) -> Iterator[tuple[sa.Engine, Store, Accounts, Path]]:
    """Log, contents, accounts and folder of a live loop. Raises UserError."""
    from etude.cli.live import read_config
    from etude.live.log.accounts import Accounts, open_blobs, open_log

    live = read_config(config)
    folder = Path(live.folder)
    if not folder.is_dir():
        raise UserError(f"{folder} holds no live loop yet: `etude live serve` makes it")
    engine = open_log(folder, live.database)
    try:
        yield engine, open_blobs(folder), Accounts(folder).check(engine), folder
    finally:
        engine.dispose()
