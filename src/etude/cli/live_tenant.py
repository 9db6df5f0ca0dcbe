"""`etude live tenant CONFIG [TENANT]`: what may be kept of a tenant's requests, and how many there may be."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from etude.cli.live import read_config


def add(tenant: argparse.ArgumentParser) -> None:
    """Flags of `etude live tenant`."""
    tenant.add_argument("config", type=Path, help="TOML configuration of the live loop")
    tenant.add_argument("tenant", nargs="?", help="name of the tenant; without one, all are shown")
    yes_or_no = {"action": argparse.BooleanOptionalAction, "default": None}
    tenant.add_argument("--consent", help="keep and train on requests that say nothing of it", **yes_or_no)
    tenant.add_argument(
        "--may-grant", help="let clients grant by X-Etude-Consent; refusing is always heard", **yes_or_no
    )
    tenant.add_argument("--keep", nargs="*", metavar="RULE",
                        help="personal data that stays in the encrypted content where a request names it: home, email, "
                             "telephone, ip; or nothing. A turn with other findings is not trained on")  # fmt: skip
    tenant.add_argument("--raw-days", type=float, help="days for which contents are kept")
    tenant.add_argument("--trained-days", type=float, help="days for which contents are kept that were trained on")
    tenant.add_argument("--requests-per-minute", type=int, help="of each key")
    tenant.add_argument("--approval", help="a person must approve each stage of a release", **yes_or_no)


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Changes what is given, and shows policies. Raises UserError."""
    from etude.errors import UserError
    from etude.live.log.accounts import open_log
    from etude.live.log.records import LivePolicy
    from etude.live.log.tenants import policies, set_policy

    config = read_config(arguments.config)
    engine = open_log(Path(config.folder), config.database)
    with engine.connect() as connection:
        known = policies(connection)
    given = {name: value for name in LivePolicy.__struct_fields__ if (value := getattr(arguments, name)) is not None}
    if "keep" in given:
        given["keep"] = tuple(given["keep"])
    if given and arguments.tenant is None:
        raise UserError("name the tenant whose policy is to change")
    if given:
        before = known.get(arguments.tenant, LivePolicy())
        known[arguments.tenant] = msgspec.structs.replace(before, **given)
        set_policy(engine, arguments.tenant, known[arguments.tenant])
    if arguments.tenant is not None and arguments.tenant not in known:
        raise UserError(f"there is no tenant {arguments.tenant}; `etude live key create` makes one")
    for name in [arguments.tenant] if arguments.tenant else sorted(known):
        print(f"{name}: {msgspec.json.encode(known[name]).decode()}")
