"""A player: a process that leases episodes of a run and plays them in boxes of its own host: `python -m
etude.run.player FILE` (`away.py`).

The controller admits groups and decides which engines serve; the ledger is all that both share. A player that is killed
loses its episodes only: their leases run out, and others play them. One that is asked to end gives them back. One
whose host is broken rests (`resting.py`).
"""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path

from etude.errors import UserError
from etude.grading import open_sandbox
from etude.ledger import ELSEWHERE, Ledger
from etude.processes import settle_objects
from etude.protocol.backends import EngineClient
from etude.rollout import open_agent
from etude.run.away import AwayProcess, Patience, run_process
from etude.run.engines import backend_of, engine_token
from etude.run.episodes import TooManyQuarantined
from etude.run.leased import LeasedEpisodes
from etude.run.parts import context_of, egress_of, profiles_of, taskset_of
from etude.run.resting import FailureRow
from etude.run.sources import TaskPool, arrived, join, missing, trained_tasks
from etude.run.state import Play
from etude.store import open_store

TICK_SECONDS = 0.1
LOOK_SECONDS = 0.5  # between two looks at the ledger's engines
LEASE_SECONDS = 30.0
OFFER_SECONDS = 5.0  # between two beats of a player


def play(process: AwayProcess, stopping: threading.Event) -> int:
    """Plays episodes until it is asked to end, or the run is over. Returns the exit code. Raises UserError or
    RunFailed."""
    try:
        asyncio.run(_play(process, stopping))
    except TooManyQuarantined as e:  # another start would count from zero: without players the controller ends the run
        raise UserError(str(e)) from None
    return 0


async def _play(process: AwayProcess, stopping: threading.Event) -> None:
    config, folder = process.config, process.folder
    ledger = process.open_ledger()
    taskset = taskset_of(config, folder)
    if taskset is None:
        raise UserError(f"the tasks of {folder} are not there: players read the folder of the run")
    pool = TaskPool(trained_tasks(config, folder, taskset), missing(config, folder))
    boxes = open_sandbox(
        config.sandbox,
        machine_profiles=profiles_of(config),
        egress=egress_of(config, pool.taskset, folder),
        repeatable=config.deterministic,
    )
    client = EngineClient((), engine_token(), backend_of(folder, config))
    async with boxes as sandbox, client, open_agent(config.rollout.agent) as agent:
        training = context_of(config, pool.taskset, sandbox, client, agent, training=True)
        parts = Play(
            folder=folder,
            config=config,
            pool=pool,
            training=training,
            ledger=ledger,
            rollouts=open_store(f"{config.store or folder}/rollouts"),
            sandbox=sandbox,
            row=FailureRow(),
        )
        # Its own name, not only that of the job: it must not renew what it held before it was killed.
        owner = f"{ELSEWHERE if process.away else ''}{process.name}.{secrets.token_hex(4)}"
        episodes = LeasedEpisodes(parts, owner, LEASE_SECONDS)
        settle_objects()
        try:
            await _until_it_ends(process, parts, episodes, client, stopping, _Offer(parts, owner, process.episodes))
        finally:
            await episodes.close()
            ledger.close()


class _Offer:
    """The number of episodes that a player plays at a time, as the ledger has it."""

    def __init__(self, play: Play, owner: str, episodes: int) -> None:
        assert play.row is not None
        self._members, self._row, self._owner, self._episodes = play.ledger.members, play.row, owner, episodes
        self._last, self._at = (-1, ""), -math.inf

    async def make(self) -> int:
        """The number, written when it has changed and as a beat. A rest is printed."""
        limit, why, now = self._row.limit(self._episodes), self._row.why, time.monotonic()
        if (limit, why) != self._last or now > self._at + OFFER_SECONDS:
            if why != self._last[1]:
                print(f"etude: this player rests: {why}" if why else "etude: this player plays again", file=sys.stderr)
            self._last, self._at = (limit, why), now
            await asyncio.to_thread(self._members.offer, self._owner, limit, why)
        return limit

    @property
    def rather_not(self) -> Collection[int]:
        """The groups whose episodes a player that rests tries last."""
        return self._row.groups if self._row.rests else ()


async def _until_it_ends(
    process: AwayProcess,
    parts: Play,
    episodes: LeasedEpisodes,
    client: EngineClient,
    stopping: threading.Event,
    offer: _Offer,
) -> None:
    patience, loop, looked = Patience(), asyncio.get_running_loop(), -LOOK_SECONDS
    training = False
    while not stopping.is_set():
        if loop.time() >= looked + LOOK_SECONDS:
            looked = loop.time()
            await follow_engines(parts.ledger, client)
            stage, beat = await asyncio.to_thread(parts.ledger.members.stage)
            if patience.over(beat):
                return
            if training and stage != "training":
                await episodes.close()  # the trainer has published its last version
            training = stage == "training"
            for number in arrived(parts.folder, parts.pool):
                await asyncio.to_thread(join, parts.config, parts.folder, parts.pool, number)
        parts.check()
        limit = await offer.make()
        await episodes.fill(limit if training and client.serving else 0, offer.rather_not)
        await asyncio.sleep(TICK_SECONDS)
        episodes.reap()


async def follow_engines(ledger: Ledger, client: EngineClient) -> None:
    """Lets a client send turns to the engines that serve, by the ledger."""
    rows = await asyncio.to_thread(ledger.members.engines)
    serving = {row.url: row.version for row in rows if row.state == "serving"}
    for row in rows:
        if row.state == "gone":
            client.lose(row.url)  # it may have been drained before, and still have turns
    for url in client.serving - serving.keys():
        client.drain(url)
    for url, version in serving.items():
        client.serve(url, version)


if __name__ == "__main__":
    sys.exit(run_process(Path(sys.argv[1]), play))
