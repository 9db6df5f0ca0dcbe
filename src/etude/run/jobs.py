"""The jobs of a fleet: the engines and players of a run as a placer starts them."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from etude.config import EnginesTable, PlayersTable, RLConfig
from etude.config.secrets import ledger_password
from etude.fleet import FleetJob
from etude.protocol import TOKEN_VARIABLE
from etude.run.away import AwayProcess


def engine_job(
    table: EnginesTable, name: str, number: int, folder: Path, config: RLConfig, token: str, *, away: bool
) -> FleetJob:
    """An engine of the run in `folder`, which joins the ledger by itself. `away`: other hosts must reach it."""
    process = AwayProcess(folder, config, name, number, away=away)
    return FleetJob(
        name,
        ("etude.run.member", "{folder}/member.json"),
        environment(config, token),
        {"member.json": process.text()},
        cpus=table.cpus,
        gpus=table.gpus,
    )


def player_job(
    table: PlayersTable, name: str, number: int, folder: Path, config: RLConfig, token: str, *, away: bool
) -> FleetJob:
    """A player of the run in `folder`."""
    process = AwayProcess(folder, config, name, number, episodes=table.episodes, away=away)
    return FleetJob(
        name,
        ("etude.run.player", "{folder}/player.json"),
        environment(config, token),
        {"player.json": process.text()},
        cpus=table.cpus,
    )


def environment(config: RLConfig, token: str) -> dict[str, str]:
    """The secrets of a placed process: the token of the engines, and the password of the ledger."""
    password = ledger_password(config)
    own = unquote(password) if password else os.environ.get("PGPASSWORD", "")
    return {TOKEN_VARIABLE: token, **({"PGPASSWORD": own} if own else {})}
