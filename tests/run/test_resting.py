"""Players on a host that is broken: they rest, say so, and cost no group a try. On a virtual clock."""

import asyncio
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.fleet_clock import run_virtually

from etude.config import RLConfig
from etude.ledger import EpisodeLease, Ledger
from etude.ledger.ledger import MAX_RETRIES
from etude.protocol.backends import EngineClient
from etude.records import Episode, Outcome, StopReason
from etude.run import episodes, loop, player
from etude.run.away import AwayProcess
from etude.run.leased import LeasedEpisodes
from etude.run.resting import FIRST_SECONDS, LONGEST_SECONDS, ROW, TRIES, FailureRow
from etude.run.state import Play, Progress
from etude.store import open_store

SIZE = 4  # members of a group
SECONDS = 20.0  # that a sound host plays an episode


def ended(outcome: Outcome, group: int = 0) -> Episode:
    return Episode(
        id="", group_id=group, member=0, attempt=0, task_id="t", seed=0, outcome=outcome, detail="no box",
        stop_reason=StopReason.FINISHED, reward=0.0, passed=False, segments=(), turns=(), metrics={},
    )  # fmt: skip


@dataclass
class Context:
    """The host of a player: whether it is `broken`, and its attempts."""

    broken: bool = False
    taskset: Any = None
    model: Any = None
    agent: str = "of others, without a journal"
    attempts: list[int] = field(default_factory=list[int])


class Fleet:
    """Players of one ledger. Episodes of the tasks `lost` fail on every host."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, lost: Collection[str] = ()) -> None:
        self.folder, self.lost, self.admitted = folder, lost, 0
        self.ledger = Ledger.open(f"sqlite:///{folder}/ledger.db")
        self.ledger.members.join("http://a", "engine-0")
        self.ledger.members.set([("http://a", "serving", "", 0)])
        self.ledger.members.set_stage("training")
        self.stopping = threading.Event()
        self.running: list[asyncio.Task[None]] = []
        monkeypatch.setattr(player, "arrived", lambda *_: [])
        monkeypatch.setattr(player, "TICK_SECONDS", 1.0)
        monkeypatch.setattr(episodes, "_play", self.episode)

    async def episode(self, play: Play, context: Any, task: str, episode_id: Any, *_: object) -> Episode:
        context.attempts.append(episode_id.group_id)
        broken = context.broken or task in self.lost
        await asyncio.sleep(1.0 if broken else SECONDS)
        return ended(Outcome.INFRA if broken else Outcome.SCORED, episode_id.group_id)

    def admit(self, *tasks: str) -> None:
        for task in tasks:
            self.ledger.admit(self.admitted, task, SIZE, 0)
            self.admitted += 1

    def start(self, name: str, context: Context, count: int = 4) -> None:
        config = RLConfig.model_validate({"tasks": {"repository": "unused"}})
        context.taskset = SimpleNamespace(by_id={f"t{n}": f"t{n}" for n in range(9)})
        parts: Any = Play(
            folder=self.folder,
            config=config,
            pool=SimpleNamespace(taskset=context.taskset),  # type: ignore[arg-type]
            training=context,  # type: ignore[arg-type]
            ledger=self.ledger,
            rollouts=open_store(str(self.folder / "rollouts")),
            sandbox=SimpleNamespace(alive=True),  # type: ignore[arg-type]
            row=FailureRow(),
        )
        process = AwayProcess(self.folder, config, name, episodes=count)
        leases = LeasedEpisodes(parts, name, player.LEASE_SECONDS)
        client = EngineClient((), backend=SimpleNamespace(note=lambda *_: None))  # type: ignore[arg-type]
        offer = player._Offer(parts, name, count)
        work = player._until_it_ends(process, parts, leases, client, self.stopping, offer)
        self.running.append(asyncio.create_task(work))

    async def played(self) -> dict[str, int]:
        """The counts of outcomes once every episode has one."""
        async with asyncio.timeout(4 * 3600):
            while self.ledger.unfinished():
                for task in self.running:
                    assert not task.done(), task.result()
                await self.wait(1.0)
        return {name: count for name, count in self.ledger.counts().items() if count}

    async def wait(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.ledger.members.beat()
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.gather(*self.running)


def test_a_broken_host_among_sound_ones_costs_no_group_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def play() -> None:
        fleet, broken, sound = Fleet(tmp_path, monkeypatch), Context(broken=True), Context()
        fleet.admit("t0", "t1", "t2", "t3", "t4", "t5")
        fleet.start("broken", broken)
        fleet.start("sound", sound)
        assert await fleet.played() == {"scored": 6 * SIZE}
        assert len(broken.attempts) < 12, "it has rested"
        by_owner = {row.owner: row for row in fleet.ledger.members.offers()}
        assert by_owner["sound"].episodes == 4
        assert by_owner["broken"].episodes <= 1
        assert by_owner["broken"].why.startswith("infrastructure has ended its last ")
        assert "(no box); it plays none for " in by_owner["broken"].why
        assert "etude: this player rests: infrastructure has ended" in capsys.readouterr().err
        broken.broken = False
        await fleet.wait(LONGEST_SECONDS)
        begun = len(broken.attempts)
        fleet.admit("t6", "t7", "t8", "t0")
        assert await fleet.played() == {"scored": 10 * SIZE}
        assert len(broken.attempts) - begun > 1, "its first result ends the rest"
        assert {row.why for row in fleet.ledger.members.offers()} == {""}
        await fleet.stop()

    run_virtually(play)


def test_episodes_that_no_host_can_play_are_given_up_while_the_others_are_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their host is tried with episodes of other groups."""

    async def play() -> None:
        fleet = Fleet(tmp_path, monkeypatch, lost=("t0", "t3"))
        fleet.admit("t0", "t1", "t2", "t3", "t4", "t5")
        fleet.start("one", Context())
        assert await fleet.played() == {"scored": 4 * SIZE, "infra": 2 * SIZE}
        await fleet.stop()

    run_virtually(play)


def test_a_group_that_no_host_can_play_is_given_up_where_there_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        fleet = Fleet(tmp_path, monkeypatch, lost=("t0",))
        fleet.admit("t0")
        context = Context()
        fleet.start("one", context)
        assert await fleet.played() == {"infra": SIZE}
        assert len(context.attempts) == SIZE * (MAX_RETRIES + 1)
        await fleet.stop()

    run_virtually(play)


def test_groups_that_no_host_can_play_are_given_up_where_there_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several look like a broken host, whose failures do not count."""

    async def play() -> None:
        fleet = Fleet(tmp_path, monkeypatch, lost=("t0", "t1"))
        fleet.admit("t0", "t1")
        context = Context()
        fleet.start("one", context)
        assert await fleet.played() == {"infra": 2 * SIZE}
        assert len(context.attempts) <= 2 * (SIZE * (MAX_RETRIES + 1) + TRIES + ROW)
        await fleet.stop()

    run_virtually(play)


def test_rests_become_longer_and_those_in_flight_begin_no_other() -> None:
    async def play() -> None:
        row = FailureRow()
        for _ in range(ROW - 1):
            row.add(ended(Outcome.INFRA))
        assert (row.limit(8), row.why) == (8, "")
        lengths = list[float]()
        for number in range(8):
            of_host = [row.add(ended(Outcome.INFRA, group=number // 2)) for _ in range(20)]
            began = asyncio.get_running_loop().time()
            while not row.limit(8):
                await asyncio.sleep(1.0)
            assert row.limit(8) == 1
            lengths.append(asyncio.get_running_loop().time() - began)
            assert of_host == [number >= 2] * 20, "failures of one group may be its own"
        row.add(ended(Outcome.QUARANTINED))
        assert row.rests, "a mistake in etude says nothing about the host"
        row.add(ended(Outcome.TIMEOUT))
        assert (row.limit(8), row.why, row.groups) == (8, "", set())
        rests = [FIRST_SECONDS, *(min(FIRST_SECONDS * 2**n, LONGEST_SECONDS) for n in range(7))]
        assert lengths == pytest.approx(rests, abs=2.0)

    run_virtually(play)


def test_a_lost_episode_without_an_engine_is_not_the_hosts(tmp_path: Path) -> None:
    client = EngineClient((), backend=SimpleNamespace(note=lambda *_: None))  # type: ignore[arg-type]
    model: Any = episodes._since_admission(
        episodes.EngineModel(client, None, None),  # type: ignore[arg-type]
        EpisodeLease(0, 0, "t", 0, 0, "me").version,
    )
    assert not episodes._served(model)
    client.serve("http://a")
    assert episodes._served(model)


def test_the_controller_counts_the_offers_of_players_that_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.db")

    async def play() -> None:
        run: Any = SimpleNamespace(ledger=ledger, progress=Progress())
        players = loop._Players(run)
        ledger.members.offer("a", 64)
        ledger.members.offer("b", 64)
        await players.look()
        assert run.progress.offered == 128
        for _ in range(40):
            ledger.members.offer("b", 1, "its host is broken")
            await asyncio.sleep(1.1)
            await players.look()
        assert run.progress.offered == 1, "one is silent, the other tries one episode"
        assert [row.owner for row in ledger.members.offers()] == ["b"]
        assert capsys.readouterr().err.count("the player b rests: its host is broken") == 1
        ledger.members.offer("a", 64)
        await asyncio.sleep(1.1)
        await players.look()
        assert run.progress.offered == 65, "it was only silent"

    run_virtually(play)
    ledger.close()


def test_admission_feeds_all_players_within_the_bound_of_staleness(tmp_path: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.db")
    rollout = {"prompts": 5, "group": 4, "staleness": 2, "max_in_flight": 4}
    config = RLConfig.model_validate({"tasks": {"repository": "unused"}, "rollout": rollout})
    run: Any = SimpleNamespace(ledger=ledger, config=config, progress=Progress(), concurrency=SimpleNamespace(limit=4))
    curriculum: Any = SimpleNamespace(draw=lambda index, busy: f"t{index}")

    def admitted(offered: int) -> int:
        run.progress.offered = offered
        loop._admit(run, curriculum, 0)
        assert run.progress.ended == 0
        return len(ledger.unfinished()) // 4

    assert admitted(0) == 2, "twice what the controller plays"
    assert admitted(16) == 8, "twice what players offer"
    assert admitted(1) == 8, "some of them have gone"
    assert admitted(1000) == 15 == (0 + 2 + 1) * 5, "no token is older than the bound"
    ledger.close()
