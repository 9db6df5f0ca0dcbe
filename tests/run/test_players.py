"""Players on a ledger: leases of processes that were killed or busy, and engines that are gone."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.config import FleetConfig, RLConfig
from etude.errors import RunFailed, UserError
from etude.ledger import Ledger
from etude.protocol import GenerateRequest
from etude.protocol.backends import EngineClient, EngineError
from etude.run import jobs, leased, member, player
from etude.run.away import AwayProcess
from etude.run.episodes import TooManyQuarantined
from etude.run.leased import LeasedEpisodes
from etude.run.player import follow_engines

A = "http://a"


def wait_until(look: Callable[[], str]) -> str:
    deadline = time.monotonic() + 10
    while not (value := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


@pytest.fixture
def ledger(tmp_path: Path):
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.db", "run")
    yield ledger
    ledger.close()


def test_a_busy_process_does_not_take_its_own_episodes(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(*_: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(leased, "play_leased", forever)
    play: Any = SimpleNamespace(ledger=ledger)

    async def run() -> None:
        episodes = LeasedEpisodes(play, "me", 0.3)
        await episodes.fill(1)
        await episodes.fill(2)  # its watch has seen the lease
        await asyncio.sleep(0.5)  # the event loop was busy
        await episodes.fill(2)
        assert [episode.lease.attempt for episode in episodes.live] == [0]
        await episodes.close()

    ledger.admit(0, "t", 1, 0)
    asyncio.run(run())


class Silent:
    """A backend whose server never answers."""

    follows = True

    async def generate(self, *_: object) -> None:
        await asyncio.sleep(3600)

    def note(self, url: str, version: int) -> None:
        pass


def test_turns_of_an_engine_that_was_drained_first_end_when_it_is_gone(ledger: Ledger) -> None:
    async def run() -> None:
        client = EngineClient((), backend=Silent())  # type: ignore[arg-type]
        turn = asyncio.create_task(client.generate(GenerateRequest(ids=[1], max_tokens=1), 2.0))
        ledger.members.join(A, "engine-0")
        for state in ("serving", "draining", "gone"):
            ledger.members.set([(A, state, "", 0)])
            await follow_engines(ledger, client)
            while state == "serving" and not client.unfinished(A):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert client.unfinished(A) == 0
        with pytest.raises(EngineError, match="does not answer any more"):
            await turn

    asyncio.run(run())


def test_a_turn_goes_on_at_a_server_that_is_back_at_once() -> None:
    """Its attempt was cancelled, not its caller."""

    async def run() -> None:
        client = EngineClient((A,), backend=Silent())  # type: ignore[arg-type]
        turn = asyncio.create_task(client.generate(GenerateRequest(ids=[1], max_tokens=1), 0.5))
        while not client.unfinished(A):
            await asyncio.sleep(0.01)
        client.lose(A)
        client.serve(A)
        with pytest.raises(EngineError):
            await turn

    asyncio.run(run())


def test_a_player_whose_episodes_are_quarantined_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start counts them from zero: players that start again would quarantine the whole run."""

    async def broken(*_: object) -> None:
        raise TooManyQuarantined("9 of 9 episodes are quarantined")

    monkeypatch.setattr(player, "_play", broken)
    with pytest.raises(UserError, match="9 of 9"):
        player.play(AwayProcess(Path(), RLConfig.model_construct(), "players-0"), threading.Event())


@pytest.mark.parametrize("before", [False, True])
def test_a_server_that_served_before_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """A first start that fails is the user's mistake; a later one may find memory that is not free yet."""

    class Failing:
        child = SimpleNamespace(stop=lambda seconds: None)

        def url(self, seconds: float) -> str:
            raise UserError("the inference server exited with code 1")

    (tmp_path / "config.json").touch()
    if before:
        (tmp_path / "served").touch()
    config = RLConfig.model_validate({"tasks": {"repository": "unused"}})
    monkeypatch.setattr(member, "start_engine", lambda *_, **__: Failing())
    monkeypatch.setattr(member, "start_seconds", lambda *_: 1.0)
    process = AwayProcess(tmp_path, config, "here-0", place=tmp_path)
    with pytest.raises(RunFailed if before else UserError, match="exited with code 1"):
        member.serve(process, threading.Event())


def test_a_ledger_in_a_file_is_refused_on_another_host(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    config = RLConfig.model_validate({"tasks": {"repository": "unused"}})
    for url in (None, f"sqlite:///{tmp_path}/there/ledger.db"):
        there = AwayProcess(tmp_path / "there", config.model_copy(update={"ledger": url}), "players-0", host="another")
        with pytest.raises(UserError, match=r"an SQLite file of the machine another, .* set ledger = \"postgresql"):
            there.open_ledger()
    assert [*(tmp_path / "there").iterdir()] == [], "nothing is made"
    here = AwayProcess(tmp_path / "there", config, "players-0")
    here.open_ledger().close()
    assert (tmp_path / "there/ledger.db").exists()


def test_a_store_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = RLConfig.model_validate({"tasks": {"repository": "unused"}})
    process = AwayProcess(tmp_path / "run", config, "here-0")
    for work in (process.check_store, lambda: member.serve(process, threading.Event())):
        with pytest.raises(UserError, match=r"is no folder of a run on .*: set store to a URL"):
            work()
    AwayProcess(tmp_path / "run", config.model_copy(update={"store": "s3://bucket/run"}), "here-0").check_store()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").touch()
    process.check_store()


def test_a_member_s_output_has_the_lines_of_its_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, marked, before the member's own last sentence; none of an earlier start's."""
    log = tmp_path / "inference-0.log"
    log.write_text("of an earlier start\n")
    with member.printed(log), log.open("a") as file:
        file.write("it loads\r50 %\r100 %\nit ser")
        file.flush()
        assert wait_until(lambda: capsys.readouterr().out) == "server | 100 %\n"
        file.write("ves\netude: the last words")
    print("etude: it has ended")
    assert capsys.readouterr().out == "server | it serves\nserver | etude: the last words\netude: it has ended\n"
    with member.printed(tmp_path / "none.log"):
        pass


def test_a_server_that_cannot_start_says_why_in_its_member_s_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    config = RLConfig.model_validate({"tasks": {"repository": "unused"}, "model": {"path": str(tmp_path / "none")}})
    process = AwayProcess(tmp_path, config, "here-0", place=tmp_path)
    with pytest.raises(UserError, match=r"the inference server exited with code 2: .*none"):
        member.serve(process, threading.Event())
    assert f"server | etude: {tmp_path}/none " in capfd.readouterr().out


@pytest.mark.parametrize("placer", ["local", "ray"])
def test_engines_listen_where_players_of_other_hosts_reach_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placer: str
) -> None:
    started: list[Any] = []

    def start(job: Any) -> Any:
        started.append(job)
        return SimpleNamespace(stop=lambda seconds: None)

    monkeypatch.setattr(jobs, "open_placer", lambda *_: SimpleNamespace(start=start))
    config = RLConfig.model_validate({"tasks": {"repository": "unused"}})
    fleet = FleetConfig.model_validate({"engines": [{"name": "here"}], "players": {"placer": placer}})
    jobs.place_fleet(fleet, tmp_path, config, tmp_path, "token")
    engine, other = (json.loads(next(iter(job.files.values()))) for job in started)
    assert (engine["away"], other["away"]) == (placer == "ray", placer == "ray")
