"""`etude live forget CONFIG TENANT USER`: an account's key destroyed, its contents deleted."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from etude.cli.live_privacy import add_account as add
from etude.cli.live_privacy import opened

__all__ = ["add", "run"]


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Prints what was deleted and which versions were trained on the account. Raises UserError."""
    from etude.errors import UserError
    from etude.live.log.privacy import forget
    from etude.live.log.tenants import policies

    with opened(arguments.config) as (engine, store, accounts, folder):
        with engine.connect() as connection:
            if arguments.tenant not in policies(connection):
                raise UserError(
                    f"there is no tenant {arguments.tenant}; `etude live tenant` shows those that there are"
                )
        done = forget(engine, store, accounts, folder, arguments.tenant, arguments.user)
    print(f"The account {done.account} is forgotten: its key is destroyed, {done.contents} contents of {done.turns} "
          f"turns are deleted, {done.waiting} of them from a run.")  # fmt: skip
    if not done.turns:
        print(f"Nothing was recorded of {arguments.user!r} of {arguments.tenant}, and nothing will be; if that is a "
              f"surprise, check the name.")  # fmt: skip
    if done.versions:
        print(f"Versions trained on it: {', '.join(map(str, done.versions))}; releases: "
              f"{', '.join(map(str, done.releases)) or 'none'}.")  # fmt: skip
    if done.remains:
        print(f"What remains: {done.remains}.")
