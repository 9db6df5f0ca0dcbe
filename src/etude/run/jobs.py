"""The jobs of a run's fleet, and the run's hold on them: engines, players and the trainer's ranks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from etude.config import EnginesTable, FleetConfig, PlayersTable, RanksTable, RLConfig
from etude.config.secrets import ledger_password
from etude.errors import UserError
from etude.fleet import Job, Placed, Placer, open_placer
from etude.protocol import TOKEN_VARIABLE
from etude.run.away import AwayProcess

FILE = "process.json"
STOP_SECONDS = 30.0  # an engine may take 25 to hand back its turns
# Variables without which a process on another machine cannot reach the store, the ledger or what an agent needs.
_CARRIED = re.compile(r"AWS_|GOOGLE_|AZURE_|ETUDE_|PG[A-Z]+$|HF_")


def engine_job(
    table: EnginesTable, name: str, number: int, folder: Path, config: RLConfig, token: str, *, away: bool
) -> Job:
    """The job of an engine of the run in `folder`. `away`: it does not end with the run's process."""
    process = AwayProcess(folder, config, name, number, away=away)
    return _job("member", process, token, cpus=table.cpus, gpus=table.gpus)


def player_job(
    table: PlayersTable, name: str, number: int, folder: Path, config: RLConfig, token: str, *, away: bool
) -> Job:
    """The job of a player of the run in `folder`. `away`: it does not end with the run's process."""
    process = AwayProcess(folder, config, name, number, table.episodes, away=away)
    return _job("player", process, token, cpus=table.cpus)


def _job(module: str, process: AwayProcess, token: str, *, cpus: float, gpus: int = 0) -> Job:
    env = _environment(process.config, carried=process.away) | {TOKEN_VARIABLE: token}
    words = (f"etude.run.{module}", f"{{folder}}/{FILE}")
    return Job(process.name, words, env, {FILE: process.text()}, cpus=cpus, gpus=gpus)


def _environment(config: RLConfig, *, carried: bool) -> dict[str, str]:
    """The variables of a job. Those of this machine are `carried` to another one by name."""
    password = ledger_password(config)  # not in a file: libpq reads it from the environment
    env = {name: value for name, value in os.environ.items() if carried and _CARRIED.match(name)}
    if carried and config.rollout.agent is not None:
        secrets = (value[1:] for value in config.rollout.agent.environment.values() if value.startswith("$"))
        env |= {name: os.environ[name] for name in secrets if name in os.environ}
    return env | ({"PGPASSWORD": unquote(password)} if password else {})


@dataclass
class RunFleet:
    """The placed processes of a run. `attached` are the URLs of servers that others own, by name. Jobs that end with a
    failure are named once; the run goes on without them."""

    tables: FleetConfig = field(default_factory=FleetConfig.model_construct)
    engines: list[Placed] = field(default_factory=list[Placed])
    players: list[Placed] = field(default_factory=list[Placed])
    trainer: Placed | None = None
    attached: dict[str, str] = field(default_factory=dict[str, str])
    _placers: list[Placer] = field(default_factory=list[Placer])
    _named: set[str] = field(default_factory=set[str])

    @property
    def playing(self) -> int:
        """The number of players that run or start again."""
        return sum(player.exit_code is None for player in self.players)

    @property
    def away(self) -> list[str]:
        """The names of engines that do not end with the run's process."""
        return [name for table in self.tables.engines if table.placer != "local" for name in table.names]

    def check(self) -> None:
        """Names the jobs that have failed. Raises UserError if all engines have, for a reason that the user can
        mend."""
        for job in (*self.engines, *self.players):
            if (why := job.failure()) and job.name not in self._named:
                self._named.add(job.name)
                print(f"etude: {why}; see {job.log}", file=sys.stderr)
        codes = [job.exit_code for job in self.engines]
        if codes and set(codes) == {2}:
            raise UserError(f"{self.engines[0].end()}; see {self.engines[0].log}")

    def place(self, config: RLConfig, folder: Path, logs: Path, token: str, holds: Sequence[int]) -> None:
        """Starts the fleet's jobs, the trainer's last. Raises UserError."""
        for table in self.tables.engines:
            self.attached |= {url.rstrip("/"): f"{table.name}-{n}" for n, url in enumerate(table.urls)}
            if table.placer == "attach":
                continue
            placer, away = self._placer(table, folder, logs, holds), table.placer != "local"
            for number, name in enumerate(table.names):
                job = engine_job(table, name, number, folder, config, token, away=away)
                self.engines.append(placer.start(job))
        if (players := self.tables.players) is not None:
            placer, away = self._placer(players, folder, logs, holds), players.placer != "local"
            for number, name in enumerate(players.names):
                self.players.append(placer.start(player_job(players, name, number, folder, config, token, away=away)))
        if (ranks := self.tables.trainer) is not None:
            env = _environment(config, carried=ranks.placer != "local")
            words = ("etude.trainer.rl.process", str(folder.absolute()))
            job = Job("trainer", words, env, cpus=ranks.cpus, gpus=0 if config.trainer.device == "cpu" else 1)
            self.trainer = self._placer(ranks, folder, logs, holds).start_group(job, config.trainer.mesh.ranks)

    def _placer(
        self, table: EnginesTable | PlayersTable | RanksTable, folder: Path, logs: Path, holds: Sequence[int]
    ) -> Placer:
        self._placers.append(open_placer(table, folder, logs, holds))
        return self._placers[-1]

    def close(self) -> None:
        """Stops all jobs: players first, which give their episodes back."""
        ranks = [] if self.trainer is None else [self.trainer]
        for jobs in (self.players, ranks, self.engines):
            if jobs:
                with ThreadPoolExecutor(len(jobs)) as threads:
                    list(threads.map(lambda job: job.stop(STOP_SECONDS), jobs))
        for placer in self._placers:
            placer.close()
