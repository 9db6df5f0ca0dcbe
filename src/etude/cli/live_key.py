"""`etude live key create|list|revoke CONFIG`: the API keys of tenants."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from etude.cli.live import read_config


def add(key: argparse.ArgumentParser) -> None:
    """Flags of `etude live key`."""
    whats = key.add_subparsers(dest="what", required=True, metavar="create|list|revoke")
    for what, text in (
        ("create", "make a key and print it, once; a tenant that is new has the default policy"),
        ("list", "list the keys, with those that were revoked, but not the keys themselves"),
        ("revoke", "refuse a key from now on"),
    ):
        parser = whats.add_parser(what, help=text, description=text, allow_abbrev=False)
        parser.set_defaults(command=f"live key {what}")
        parser.add_argument("config", type=Path, help="TOML configuration of the live loop")
        parser.add_argument("tenant", nargs="?" if what == "list" else None, help="name of the tenant")
        if what != "list":
            parser.add_argument("name", help="name of the key, e.g. of a person or a machine")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Does what is asked. Raises UserError."""
    from etude.live.log.accounts import open_log
    from etude.live.log.tenants import create_key, list_keys, revoke_key

    config = read_config(arguments.config)
    engine = open_log(Path(config.folder), config.database)
    if arguments.what == "create":
        print(create_key(engine, arguments.tenant, arguments.name), flush=True)
        print("running gateways take it within two seconds", file=sys.stderr)
    elif arguments.what == "revoke":
        revoke_key(engine, arguments.tenant, arguments.name)
        print(f"{arguments.tenant} {arguments.name}: revoked")
    else:
        for key in list_keys(engine, arguments.tenant):
            state = "valid" if key.revoked is None else f"revoked {_day(key.revoked)}"
            print(f"{key.tenant} {key.name}: created {_day(key.created)}, {state}")


def _day(at: int) -> str:
    return datetime.fromtimestamp(at / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")
