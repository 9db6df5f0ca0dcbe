"""`etude live ACTION`: the table of actions, their common flags and the opening of a live loop.

An action is two functions of a module `live_*`: one adds its flags, the other runs it. All modules are imported for the
flags of the actions, so each function imports its rooms itself.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from etude.cli.overlays import read_toml
from etude.config import LiveConfig, validate
from etude.errors import UserError

if TYPE_CHECKING:
    import sqlalchemy as sa

    from etude.live.log.accounts import Accounts
    from etude.live.release.operations import ReleaseSite
    from etude.store import Store

LiveAction: TypeAlias = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int | None]]
"""The functions of an action: its flags, and its work."""

ACTIONS = {
    "serve": "serve a gateway before clusters of inference servers",
    "key": "create, list and revoke the API keys of tenants",
    "tenant": "show or change the policy of a tenant",
    "watch": "tell the gateway what becomes of edits in a git repository",
    "hook": "let git tell of commits at once",
    "forget": "destroy the key of an account and delete what is known of it",
    "export": "write all that is known of an account to a folder",
    "expire": "delete contents older than their tenants keep them",
    "plant": "make strings that no version may know, which the gate asks for",
    "run": "run the loop: cut windows, learn, gate, release and watch, until it is interrupted",
    "approve": "let what waits for a person go on: a version after the gate, or a stage of the canary",
    "refuse": "refuse a version after the gate, or roll the release on trial back",
    "plan": "tell what can be shown in what time, with the suites, the canary and the accounts that the log has seen",
    "gate": "play a version against the current release, and refuse it if it is worse",
    "release": "bring a version that has passed the gate to the canary, and step by step to all",
    "rollback": "take a release back in every cluster",
    "status": "tell where releases, stores and servers stand",
    "drill": "roll the canary's servers back and forward again, and tell how long that takes",
    "watch-canary": "decide on the release on trial each minute, until it is interrupted",
    "demo": "let simulated users teach the nano model through all of it, on two CPU cores",
    "requests": "write the requests of users whose changes were committed, as words for tasks",
    "calibrate": "tell how well follow-ups are read, by labelled examples in eight languages",
    "window": "compute what is learned from, or compute an earlier window again",
    "train": "learn from a window: the next version, a candidate for the gate",
}
_MODULES = ("live_gateway", "live_learning", "live_observing", "live_releases")


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live`, one sub-command per action."""
    functions = _functions()
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.set_defaults(command=f"live {name}")
        functions[name][0](action)


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> int | None:
    """Runs the action. Raises UserError."""
    return _functions()[arguments.action][1](arguments)


def _functions() -> dict[str, LiveAction]:
    tables = [importlib.import_module(f"etude.cli.{module}").ACTIONS for module in _MODULES]
    return {name: action for table in tables for name, action in table.items()}


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the argument CONFIG."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML of stage live")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the flag --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def read_config(path: Path) -> LiveConfig:
    """The configuration of a live loop. Raises UserError, also for a database that cannot be opened here."""
    config = validate(LiveConfig, read_toml(path), str(path))
    if config.database is not None:
        from etude.ledger import parse_database_url

        parse_database_url(config.database, "live log")
    return config


@dataclass(frozen=True)
class OpenedLoop:
    """A live loop whose log is open."""

    config: LiveConfig
    engine: sa.Engine

    @property
    def folder(self) -> Path:
        """The folder of the loop."""
        return Path(self.config.folder)

    @property
    def accounts(self) -> Accounts:
        """The keys of the accounts."""
        from etude.live.log.accounts import Accounts

        return Accounts(self.folder)

    @property
    def contents(self) -> Store:
        """The store of the encrypted contents."""
        from etude.live.log.accounts import open_blobs

        return open_blobs(self.folder)

    @property
    def site(self) -> ReleaseSite:
        """The configuration and log for the functions of `live.release`."""
        from etude.live.release.operations import ReleaseSite

        return ReleaseSite(self.config, self.engine)


@contextmanager
def opened(config: LiveConfig | Path, *, make: bool = False) -> Iterator[OpenedLoop]:
    """The live loop of a configuration or of its file. With `make`, a missing log is made; without, the folder and the
    keys of all accounts must exist. Raises UserError."""
    from etude.live.log.accounts import Accounts, open_log

    live = read_config(config) if isinstance(config, Path) else config
    folder = Path(live.folder)
    if not make and not folder.is_dir():
        raise UserError(f"{folder} holds no live loop yet: `etude live serve` makes it")
    engine = open_log(folder, live.database)
    try:
        if not make:
            Accounts(folder).check(engine)
        yield OpenedLoop(live, engine)
    finally:
        engine.dispose()
