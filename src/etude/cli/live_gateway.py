"""`etude live serve | key | tenant | forget | export | expire | plant`: commands of the gateway's operators."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from etude.cli.live import LiveAction, add_config, opened, read_config
from etude.config import LiveConfig
from etude.errors import UserError
from etude.protocol import access_of, add_access_flags

# serve ----------------------------------------------------------------------------------------------------------------


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live serve`."""
    add_config(parser)
    parser.add_argument("--ready-file", type=Path, help="file that is written, with URL and pid, once it answers")
    add_access_flags(parser.add_argument_group("access", "of the operator: /health and /metrics (docs/serving.md)"))


def run_serve(arguments: argparse.Namespace) -> None:
    """Serves until interrupted. Raises UserError."""
    config = read_config(arguments.config)
    arguments.host = config.gateway.host
    access = access_of(arguments)
    from etude.live.gateway import serve

    for store, why in missing_stores(config).items():
        print(
            f"etude live serve: the weight store {store} {why}: answers go on, but nothing can be released to it",
            file=sys.stderr,
            flush=True,
        )
    serve(config, access, arguments.ready_file)


def missing_stores(config: LiveConfig) -> dict[str, str]:
    """The weight stores without a version, and why; no store is made."""
    from etude.store import open_store
    from etude.weights import newest_manifest

    missing: dict[str, str] = {}
    stores = {s for c in config.clusters for s in (c.store, c.canary_store, c.holdback_store) if s != "none"}
    for store in sorted(stores):
        if "://" not in store and not Path(store).is_dir():
            missing[store] = "is not there"
            continue
        try:
            if newest_manifest(open_store(store)) is None:
                missing[store] = "holds no version"
        except (UserError, ValueError) as e:
            missing[store] = f"cannot be read ({e})"
    return missing


# key ------------------------------------------------------------------------------------------------------------------


def add_key(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live key`."""
    whats = parser.add_subparsers(dest="what", required=True, metavar="create|list|revoke")
    for what, text in (
        ("create", "make a key and print it, once; a tenant that is new has the default policy"),
        ("list", "list the keys, with those that were revoked, but not the keys themselves"),
        ("revoke", "refuse a key from now on"),
    ):
        action = whats.add_parser(what, help=text, description=text, allow_abbrev=False)
        action.set_defaults(command=f"live key {what}")
        add_config(action)
        action.add_argument("tenant", nargs="?" if what == "list" else None, help="name of the tenant")
        if what != "list":
            action.add_argument("name", help="name of the key, e.g. of a person or a machine")
        if what == "create":
            proxy = "the key of a firm's proxy, which signs its users' names; prints its secret, too (docs/live.md)"
            action.add_argument("--proxy", action="store_true", help=proxy)


def run_key(arguments: argparse.Namespace) -> None:
    """Makes, lists or revokes keys. Raises UserError."""
    from etude.live.log.accounts import Accounts
    from etude.live.log.tenants import create_key, digest_of, list_keys, revoke_key

    with opened(arguments.config, make=True) as loop:
        if arguments.what == "create":
            key = create_key(loop.engine, arguments.tenant, arguments.name, arguments.proxy)
            print(key, flush=True)
            if arguments.proxy:
                accounts = Accounts(loop.folder).check(loop.engine)
                print(accounts.proxy_secret(digest_of(key)), flush=True)
            print("running gateways take it within two seconds", file=sys.stderr)
        elif arguments.what == "revoke":
            revoke_key(loop.engine, arguments.tenant, arguments.name)
            print(f"{arguments.tenant} {arguments.name}: revoked")
        else:
            for key in list_keys(loop.engine, arguments.tenant):
                state = "valid" if key.revoked is None else f"revoked {_day(key.revoked)}"
                signs = ", signs names" if key.proxy else ""
                print(f"{key.tenant} {key.name}: created {_day(key.created)}, {state}{signs}")


def _day(at: int) -> str:
    return datetime.fromtimestamp(at / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")


# tenant ---------------------------------------------------------------------------------------------------------------


def add_tenant(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live tenant`."""
    add_config(parser)
    parser.add_argument("tenant", nargs="?", help="name of the tenant; without one, all are shown")
    _add_choice(parser, "--consent", "keep and train on requests that say nothing of it")
    _add_choice(parser, "--may-grant", "let clients grant by X-Etude-Consent; refusing is always heard")
    keep = (
        "personal data that stays in the encrypted content where a request names it: home, email, telephone, ip; "
        "or nothing. A turn with other findings is not trained on"
    )
    parser.add_argument("--keep", nargs="*", metavar="RULE", help=keep)
    parser.add_argument("--raw-days", type=float, help="days for which contents are kept")
    parser.add_argument("--trained-days", type=float, help="days for which contents are kept that were trained on")
    parser.add_argument("--requests-per-minute", type=int, help="of each key")
    _add_choice(parser, "--approval", "a person must approve each stage of a release")


def _add_choice(parser: argparse.ArgumentParser, flag: str, text: str) -> None:
    """Adds --FLAG and --no-FLAG; None without either."""
    parser.add_argument(flag, help=text, action=argparse.BooleanOptionalAction, default=None)


def run_tenant(arguments: argparse.Namespace) -> None:
    """Changes the policy by the flags, and shows policies. Raises UserError."""
    from etude.live.log.privacy import apply_policies
    from etude.live.log.records import LivePolicy
    from etude.live.log.tenants import policies, set_policy

    with opened(arguments.config, make=True) as loop:
        with loop.engine.connect() as connection:
            known = policies(connection)
        flags = {n: value for n in LivePolicy.__struct_fields__ if (value := getattr(arguments, n)) is not None}
        if "keep" in flags:
            flags["keep"] = tuple(flags["keep"])
        if flags and arguments.tenant is None:
            raise UserError("name the tenant whose policy is to change")
        if flags:
            before = known.get(arguments.tenant, LivePolicy())
            known[arguments.tenant] = msgspec.structs.replace(before, **flags)
            set_policy(loop.engine, arguments.tenant, known[arguments.tenant])
            if gone := apply_policies(loop.engine, loop.contents, loop.folder):
                print(f"{gone} contents that this no longer allows are deleted", file=sys.stderr)
    if arguments.tenant is not None and arguments.tenant not in known:
        raise UserError(f"there is no tenant {arguments.tenant}; `etude live key create` makes one")
    for name in [arguments.tenant] if arguments.tenant else sorted(known):
        print(f"{name}: {msgspec.json.encode(known[name]).decode()}")


# forget, export, expire, plant ----------------------------------------------------------------------------------------


def add_forget(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live forget`."""
    add_config(parser)
    parser.add_argument("tenant", metavar="TENANT", help="name of the tenant")
    user = "as X-Etude-User, `user` or `metadata.user_id` of a body has it, or the name of an API key"
    whom = parser.add_mutually_exclusive_group(required=True)
    whom.add_argument("user", metavar="USER", nargs="?", help=user)
    whom.add_argument("--organisation", default="", help="all accounts that named this organisation")
    whom.add_argument("--everyone", action="store_true", help="all accounts of the tenant")


def run_forget(arguments: argparse.Namespace) -> None:
    """Destroys the keys of accounts, and prints what was deleted and which versions were trained on it. Raises
    UserError."""
    from etude.live.log.privacy import AccountName, forget
    from etude.live.log.tenants import policies

    name = AccountName(arguments.tenant, arguments.user or "", arguments.organisation)
    if not (name.user or name.organisation or arguments.everyone):
        raise UserError("name the user, or give --organisation or --everyone")
    with opened(arguments.config) as loop:
        with loop.engine.connect() as connection:
            if arguments.tenant not in policies(connection):
                raise UserError(
                    f"there is no tenant {arguments.tenant}; `etude live tenant` shows those that there are"
                )
        done = forget(loop.engine, loop.contents, loop.accounts, loop.folder, name)
    for account in done.accounts:
        print(f"The account {account} is forgotten: its key is destroyed.")
    print(f"{done.contents} contents of {done.turns} turns are deleted, {done.waiting} of them from a run.")
    if done.versions:
        releases = ", ".join(map(str, done.releases)) or "none"
        print(f"Versions trained on it: {', '.join(map(str, done.versions))}; releases: {releases}.")
    if done.remains:
        print(f"What remains: {done.remains}.")


def add_export(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live export`."""
    add_config(parser)
    parser.add_argument("tenant", metavar="TENANT", help="name of the tenant")
    parser.add_argument("user", metavar="USER", help="as for `etude live forget`")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to make")


def run_export(arguments: argparse.Namespace) -> None:
    """Writes all records of an account, decrypted, and prints counts. Raises UserError."""
    from etude.live.log.privacy import AccountName, export

    name = AccountName(arguments.tenant, arguments.user)
    if not name.user:
        raise UserError("name the user")
    with opened(arguments.config) as loop:
        counts = export(loop.engine, loop.contents, loop.accounts, name, arguments.output)
    print(f"{arguments.output}: {', '.join(f'{count} {name}' for name, count in counts.items() if count)}")


def run_expire(arguments: argparse.Namespace) -> None:
    """Deletes contents that are too old, and prints their number. Raises UserError."""
    from etude.live.log.privacy import expire

    with opened(arguments.config) as loop:
        count = expire(loop.engine, loop.contents, loop.folder)
    print(f"{count} contents were older than their tenants keep them, or without consent by now, and are deleted")


def add_plant(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live plant`."""
    add_config(parser)
    parser.add_argument("--count", type=int, default=3, help="strings to make (default: 3)")


def run_plant(arguments: argparse.Namespace) -> None:
    """Makes and prints planted strings, which no version may complete. Raises UserError."""
    from etude.live.log.privacy import plant

    with opened(arguments.config) as loop:
        strings = plant(loop.folder, arguments.count)
    print(
        "Let a test account with consent send these sentences through the gateway, e.g. in a file that its agent "
        "reads. The gate asks every version to complete them:\n"
    )
    for string in strings:
        print(string.text)


ACTIONS: dict[str, LiveAction] = {
    "serve": (add_serve, run_serve),
    "key": (add_key, run_key),
    "tenant": (add_tenant, run_tenant),
    "forget": (add_forget, run_forget),
    "export": (add_export, run_export),
    "expire": (add_config, run_expire),
    "plant": (add_plant, run_plant),
}
