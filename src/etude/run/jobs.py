"""The jobs of a fleet, the engines, players and trainer ranks of a run as a placer starts them, and the run's hold on
them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from etude.config import EnginesTable, FleetConfig, PlayersTable, RanksTable, RLConfig
from etude.config.secrets import ledger_password
from etude.errors import UserError
from etude.fleet import FleetJob, Placed, PlacedJob, Placer, open_placer, stop_all
from etude.protocol import TOKEN_VARIABLE, is_loopback
from etude.run.away import AwayProcess

STOP_SECONDS = 30.0  # a server may take 25 to hand back its turns


class PlacedFleet:
    """The engines and players of a fleet that are started, by their names. `here` are those of this machine."""

    def __init__(self) -> None:
        self.engines, self.players = dict[str, PlacedJob](), dict[str, PlacedJob]()
        self.here, self.placers = list[Placed](), list[Placer]()

    def stop(self) -> None:
        """Stops all of them."""
        stop_all([*self.engines.values(), *self.players.values()], STOP_SECONDS)
        self.close()

    def close(self) -> None:
        """Stops those of this machine; the others go on."""
        stop_all(self.here, STOP_SECONDS)
        for placer in self.placers:
            placer.close()


def place_fleet(
    fleet: FleetConfig,
    folder: Path,
    config: RLConfig,
    logs: Path,
    token: str,
    *,
    mark: str = "",
    away: bool = False,
    gpu: int = 0,
    holds: Sequence[int] = (),
) -> PlacedFleet:
    """Starts the engines and players of a fleet for the run in `folder`; they join the ledger by themselves. Names are
    TABLE + `mark` + -NUMBER. `away`: those of this machine do not end with the controller, either, and are reached from
    others. They have the GPUs from number `gpu` on, and keep the descriptors `holds` open. Raises UserError."""
    placed, number = PlacedFleet(), 0
    tables: list[EnginesTable | PlayersTable] = [table for table in fleet.engines if table.placer != "attach"]
    tables += [fleet.players] if fleet.players is not None else []
    try:
        for table in tables:
            placer = open_placer(table, folder, logs, holds, gpu)
            placed.placers.append(placer)
            far = away or table.placer == "ray"
            reached = far or (fleet.players is not None and fleet.players.placer == "ray")  # by players of other hosts
            for own, name in enumerate(table.names):
                named = f"{name.rpartition('-')[0]}{mark}-{own}"
                if isinstance(table, EnginesTable):
                    job = engine_job(table, named, number, folder, config, token, away=reached)
                    one = placed.engines[named] = placer.start(job)
                    number += 1
                else:
                    job = player_job(table, named, own, folder, config, token, away=far)
                    one = placed.players[named] = placer.start(job)
                if table.placer == "local":
                    placed.here.append(one)
                    gpu += job.gpus
    except BaseException:
        placed.stop()
        raise
    return placed


def check_reached(urls: Iterable[str]) -> None:
    """Raises UserError for a server that players of other hosts do not reach."""
    if wrong := next((url for url in urls if is_loopback(urlsplit(url).hostname or "")), None):
        raise UserError(
            f"players in Ray do not reach {wrong}, a loopback address: give the server's address in their network"
        )


@dataclass
class RunFleet:
    """The placed processes of a run. Jobs that end with a failure are named once, and the run goes on without them."""

    tables: FleetConfig = field(default_factory=FleetConfig.model_construct)
    placed: PlacedFleet = field(default_factory=PlacedFleet)
    trainer: Placed | None = None
    _named: set[str] = field(default_factory=set[str])

    @property
    def playing(self) -> int:
        """The number of players that run, or are started again; not those that wait for room."""
        return sum(player.exit_code is None and not player.waits for player in self.placed.players.values())

    @property
    def trouble(self) -> str:
        """Why an engine does not run, "" if all do or may soon."""
        engines = self.placed.engines.values()
        return next(filter(None, [job.waits or job.failure() for job in engines]), "")

    @property
    def attached(self) -> dict[str, str]:
        """The names of the servers that others own, by URL."""
        urls = ((url, f"{table.name}-{n}") for table in self.tables.engines for n, url in enumerate(table.urls))
        return {url.rstrip("/"): name for url, name in urls}

    @property
    def away(self) -> list[str]:
        """The names of engines that do not end with the run's process."""
        placed = [name for table in self.tables.engines if table.placer == "ray" for name in table.names]
        return [*placed, *self.attached.values()]

    def place(self, config: RLConfig, folder: Path, logs: Path, token: str, holds: Sequence[int]) -> None:
        """Starts the jobs. Raises UserError."""
        kind, ranks = config.trainer.device.partition(":")[0], self.tables.trainer
        first = 0 if kind == "cpu" or (ranks is not None and ranks.placer == "ray") else config.trainer.mesh.ranks
        self.placed = place_fleet(self.tables, folder, config, logs, token, gpu=first, holds=holds)
        if ranks is not None:
            placer = open_placer(ranks, folder, logs, holds)
            self.placed.placers.append(placer)
            self.trainer = placer.start_group(trainer_job(ranks, folder, config), config.trainer.mesh.ranks)

    def check(self) -> None:
        """Names the jobs that have failed. Raises UserError if all engines have, for a reason that the user can
        mend."""
        engines = self.placed.engines.values()
        for job in (*engines, *self.placed.players.values()):
            if (why := job.failure()) and job.name not in self._named:
                self._named.add(job.name)
                print(f"etude: {why}; see {job.log}", file=sys.stderr)
        if engines and all(job.exit_code == 2 for job in engines) and not self.attached:
            job = next(iter(engines))
            raise UserError(f"{job.end()}; see {job.log}")

    def stop(self) -> None:
        """Stops all jobs, at the same time."""
        ranks = [] if self.trainer is None else [self.trainer]
        stop_all([*self.placed.engines.values(), *self.placed.players.values(), *ranks], STOP_SECONDS)
        self.placed.close()


def trainer_job(table: RanksTable, folder: Path, config: RLConfig) -> FleetJob:
    """A rank of the trainer of the run in `folder`, which its machine must reach."""
    gpus = 0 if config.trainer.device == "cpu" else 1
    argv = "etude.trainer.rl.process", str(folder.absolute())
    password = {name: value for name, value in environment(config, "").items() if value}
    return FleetJob("trainer", argv, password, cpus=table.cpus, gpus=gpus)


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
