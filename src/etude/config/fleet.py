"""A fleet: where the engines, players and trainer ranks of a run are placed. The file `fleet.toml` beside a run's."""

from __future__ import annotations

import re
from typing import Any, Literal

import pydantic
from pydantic import Field

from etude.config.engine import InferenceConfig
from etude.config.run import RLConfig
from etude.config.sections import Section, option
from etude.errors import UserError

PLAYERS = "players"
"""The name of the table [players], which no table of engines may have."""
_WORD = r"^[a-z][a-z0-9-]{0,29}$"  # a label of Kubernetes, a job of SLURM, a part of the names of processes
_ADDRESS = re.compile(r"auto|[A-Za-z0-9_.-]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}")
_URL = re.compile(r"https?://[^/@\s]+/?")


class PlacedTable(Section):
    """Processes that a placer starts: on this machine, or in a cluster of Ray."""

    placer: Literal["local", "ray"] = option("local", "who starts the processes: this machine's, or Ray")
    address: str = option("auto", "HOST:PORT of the head of Ray's cluster; auto: the cluster of this machine")

    @pydantic.model_validator(mode="after")
    def _addresses_are_of_heads(self) -> PlacedTable:
        check_address(self.placer, self.address)
        return self


def check_address(placer: str, address: str) -> None:
    """Raises ValueError for an address that is not that of a head, or that nobody asks."""
    if placer != "ray" and address != "auto":
        raise ValueError(f'address is that of a cluster of Ray: set placer = "ray", or drop address = "{address}"')
    if address.startswith("ray://"):
        raise ValueError(
            f"{address} is Ray's client protocol, which ends with the head: give HOST:PORT of the head, and run etude "
            "on a node of the cluster"
        )
    if not _ADDRESS.fullmatch(address):
        raise ValueError(f'{address!r} is not the address of a head: write HOST:PORT, or "auto"')


class EnginesTable(Section):
    """Inference servers of one kind of place."""

    name: str = Field(pattern=_WORD, description="a word; its servers are NAME-0, NAME-1, ...")
    placer: Literal["local", "ray", "attach"] = option(
        "local", "who starts the servers: this machine's processes, Ray, or others (attach)"
    )
    count: int = option(1, "servers", ge=1)
    urls: tuple[str, ...] = option((), "attach: servers that already run")
    address: str = option("auto", "HOST:PORT of the head of Ray's cluster; auto: the cluster of this machine")
    cpus: float = option(1.0, "CPUs that Ray or SLURM keeps for a server", gt=0)
    gpus: int = option(0, "GPUs of a server", ge=0)
    restarts: int = option(-1, "restarts of a server that ends by itself; -1: without end", ge=-1)

    @pydantic.model_validator(mode="after")
    def _options_belong_to_the_placer(self) -> EnginesTable:
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.placer != "attach" and self.urls:
            raise ValueError('urls are servers that others have started: set placer = "attach", or drop them')
        if self.placer == "attach":
            if not self.urls:
                raise ValueError('placer = "attach" needs urls, the servers that others have started')
            if wrong := [name for name in changed if name not in ("name", "placer", "urls")]:
                raise ValueError(f'placer = "attach" starts no servers: drop {wrong[0]}')
        if wrong := [url for url in self.urls if not _URL.fullmatch(url)]:
            raise ValueError(f"{wrong[0]!r} is not a URL like http://host:8000, without user and path")
        check_address(self.placer, self.address)
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the servers that are started."""
        return () if self.placer == "attach" else tuple(f"{self.name}-{number}" for number in range(self.count))


class PlayersTable(PlacedTable):
    """Processes that play episodes, each with boxes of its own."""

    count: int = option(1, "players", ge=1)
    episodes: int = option(64, "episodes that a player plays at a time, at most", ge=1)
    cpus: float = option(1.0, "CPUs that Ray or SLURM keeps for a player", gt=0)
    restarts: int = option(-1, "restarts of a player that ends by itself; -1: without end", ge=-1)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the players."""
        return tuple(f"{PLAYERS}-{number}" for number in range(self.count))


class RanksTable(PlacedTable):
    """The trainer's ranks, placed together; the run's trainer.mesh says how many there are."""

    cpus: float = option(1.0, "CPUs that Ray or SLURM keeps for a rank", gt=0)


class FleetConfig(Section):
    """The places of a run's processes. What it leaves out, the run starts itself."""

    stage: Literal["fleet"] = "fleet"
    engines: tuple[EnginesTable, ...] = option((), "tables [[engines]], in place of the run's own servers")
    players: PlayersTable | None = option(None, "players besides the run itself")
    trainer: RanksTable | None = option(None, "ranks of the trainer, in place of the run's own processes")

    @pydantic.model_validator(mode="after")
    def _names_are_unique(self) -> FleetConfig:
        names = [table.name for table in self.engines]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two tables [[engines]] are called {twice!r}: give each a name of its own")
        if wrong := next((name for name in names if name in (PLAYERS, "trainer", "fleet")), None):
            raise ValueError(
                f"a table [[engines]] is called {wrong!r}, which is the name of another process: rename it"
            )
        urls = [url.rstrip("/") for table in self.engines for url in table.urls]
        if twice := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(f"urls name the server {twice} twice")
        if not (self.engines or self.players or self.trainer):
            raise ValueError("a fleet has tables [[engines]], [players] or [trainer]: write one")
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        """The clusters of Ray that tables name, each once."""
        tables: list[Any] = [*self.engines, self.players, self.trainer]
        return tuple(dict.fromkeys(table.address for table in tables if table is not None and table.placer == "ray"))


def check_fleet(fleet: FleetConfig, config: RLConfig, where: str) -> None:
    """Raises UserError for a fleet that the run of `config` cannot use."""
    inference, placed = config.inference, [table for table in fleet.engines if table.placer != "attach"]
    if fleet.engines and inference.urls:
        raise UserError(f'{where}: inference.urls are servers, too: write them as [[engines]] with placer = "attach"')
    if fleet.engines and inference.servers != InferenceConfig.model_fields["servers"].default:
        raise UserError(f"{where}: its [[engines]] count the servers: drop inference.servers")
    if fleet.engines and inference.port:
        raise UserError(f"{where}: its servers take free ports: drop inference.port")
    if config.deterministic and any(table.placer == "attach" for table in fleet.engines):
        raise UserError(f'{where}: deterministic = true needs engines that the run starts: drop placer = "attach"')
    for table in placed:
        if table.gpus and inference.on_cpu:
            raise UserError(
                f'{where}: the engines {table.name!r} have gpus = {table.gpus}, and inference.device is "cpu": drop '
                "gpus, or set the device"
            )
        if not inference.on_cpu and table.gpus != inference.workers:
            raise UserError(
                f"{where}: an engine of {table.name!r} has {inference.workers} workers on GPUs: set gpus = "
                f"{inference.workers}"
            )
    if fleet.trainer is not None and config.trainer.launcher == "external":
        raise UserError(f'{where}: its [trainer] places the ranks: drop trainer.launcher = "external", or the table')


def check_ranks_apart(config: RLConfig, fleet: FleetConfig | None) -> None:
    """Raises UserError for engines of the run on a device of its ranks. Those that a fleet places have others: a placer
    gives them GPUs that the ranks do not have, or machines."""
    trainer, inference = config.trainer, config.inference
    ranks, kind = trainer.mesh.ranks, trainer.device
    placed = fleet is not None and (
        bool(fleet.engines) or (fleet.trainer is not None and fleet.trainer.placer == "ray")
    )
    if placed or trainer.launcher == "external" or ranks == 1 or kind == "cpu":
        return
    of_ranks = {f"{kind}:{rank}" for rank in range(ranks)}
    for device in inference.devices:
        if (device if ":" in device else f"{device}:0") in of_ranks:
            raise UserError(
                f'inference.device = "{inference.device}" is that of a rank of trainer.mesh, which takes {kind}:0 to '
                f'{kind}:{ranks - 1}: set "{kind}:{ranks}" or a later one, or fewer ranks'
            )
