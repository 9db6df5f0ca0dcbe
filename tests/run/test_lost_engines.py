"""Engines that join, leave, lag, are lost or wrong while others serve: what the controller makes of their answers."""

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.config import RLConfig
from etude.errors import RunFailed, UserError
from etude.ledger import Ledger
from etude.protocol.backends.client import EngineClient, EngineError, EngineLost
from etude.run import state as run_state
from etude.run import versions
from etude.run.jobs import RunFleet
from etude.run.state import EngineRecord, Engines, Progress, Run, check_processes
from etude.run.versions import check_engines, observe_versions, wait_for_version

A, B, C = "http://a", "http://b", "http://c"


class Servers:
    """A backend whose servers answer what the test says. `version` and `fault` are by URL."""

    follows = True

    def __init__(self) -> None:
        self.version = {A: 3, B: 3, C: 3}
        self.fault: dict[str, Exception | str] = {}
        self.brought: list[tuple[str, int]] = []
        self.checked: list[str] = []

    async def check(self, http: Any, url: str) -> None:
        self.checked.append(url)
        if isinstance(fault := self.fault.get(url), UserError):
            raise fault

    async def health(self, http: Any, url: str, timeout: float) -> dict[str, Any]:
        fault = self.fault.get(url)
        if isinstance(fault, Exception):
            raise fault
        if fault == "silent":
            await asyncio.sleep(3600)
        return {
            "status": fault or "ok", "error": "broken", "version": self.version[url], "digest": "d",
            "last_pause_ms": 1.0, "running": 1, "waiting": 0, "generated_tokens": 5, "busy_seconds": 1.0,
            "configuration": {"head": "float32", "log_softmax": "float32"},
        }  # fmt: skip

    async def bring(self, http: Any, url: str, version: int) -> None:
        self.brought.append((url, version))
        if isinstance(fault := self.fault.get(url), EngineError):
            raise fault
        self.version[url] = version


class Watched:
    """A run of which there is nothing but its engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, published: int = 3) -> None:
        self.servers = Servers()
        self.client = EngineClient((), backend=self.servers)  # type: ignore[arg-type]
        self.ledger = Ledger.open(f"sqlite:///{tempfile.mkdtemp()}/ledger.db")
        self.scored: list[tuple[str, int]] = []
        probes = SimpleNamespace(served=lambda url, version: self.scored.append((url, version)))
        self.engines = Engines([], self.client, probes)  # type: ignore[arg-type]
        for number, url in enumerate((A, B)):
            self.engines.add(url, f"engine-{number}", serves=True)
        self.run: Run = SimpleNamespace(  # type: ignore[assignment]
            engines=self.engines,
            ledger=self.ledger,
            record=EngineRecord(),
            progress=Progress(),
            weights=None,
            folder="RUN",
            children=[],
            config=RLConfig.model_validate({"tasks": {"repository": "unused"}}),
            sandbox=SimpleNamespace(alive=True),
            fleet=RunFleet(),
        )
        monkeypatch.setattr(versions, "_PATIENCE", 0.05)
        monkeypatch.setattr(versions, "MEMBERS_SECONDS", 0.0)
        monkeypatch.setattr(versions, "SILENT_SECONDS", 0.1)
        monkeypatch.setattr(versions, "read_manifest", lambda store, version: SimpleNamespace(live="d"))
        monkeypatch.setattr(versions, "published_versions", lambda store, after: list(range(after + 1, published + 1)))

    async def look(self, until: Any) -> None:
        async with asyncio.timeout(30):
            while not until():
                await observe_versions(self.run)
                await asyncio.sleep(0.01)

    def lost(self) -> list[str]:
        return [state.url for state in self.engines.states if state.state == "gone"]

    def rows(self) -> dict[str, str]:
        return {row.url: row.state for row in self.ledger.members.engines()}


@pytest.mark.parametrize("fault", [EngineLost("gone"), "silent", "failed"])
def test_a_run_goes_on_while_one_engine_serves_and_takes_the_other_back_when_it_has_caught_up(
    fault: Exception | str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        servers, progress = watched.servers, watched.run.progress
        await watched.look(lambda: watched.scored)
        assert (progress.served, progress.engine["running"]) == (3, 2.0)
        servers.fault[A], servers.version[B] = fault, 5
        await watched.look(watched.lost)
        assert watched.lost() == [A]
        assert watched.client._server("new", None) == B
        await watched.look(lambda: progress.served == 5)
        del servers.fault[A]
        watched.engines.states[0].asking.cancel()  # of the silent server: its answer never comes
        for _ in range(5):
            await observe_versions(watched.run)
        assert watched.lost() == [A], "tokens of version 3 would be older than admission allows"
        servers.version[A] = 5
        await watched.look(lambda: not watched.lost())
        assert watched.client.serving == {A, B}
        servers.fault = {A: fault, B: fault}
        with pytest.raises(RunFailed, match=r"engine at http://. is lost: (has not answered|failed).* --resume RUN"):
            await watched.look(lambda: False)
        await watched.engines.aclose()

    asyncio.run(play())
    told = capsys.readouterr().err
    assert f"the engine at {A} is lost, the others play its turns" in told
    assert f"the engine at {A} is back" in told


def test_a_server_that_was_started_anew_plays_again_when_it_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        await watched.look(lambda: watched.scored)
        watched.servers.version[A] = -1
        await watched.look(watched.lost)
        assert (watched.lost(), watched.run.progress.served) == ([A], 3)
        watched.servers.version[A] = 3
        await watched.look(lambda: not watched.lost())
        await watched.engines.aclose()

    asyncio.run(play())


def test_an_engine_with_other_tensors_ends_the_run_whatever_else_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        monkeypatch.setattr(versions, "read_manifest", lambda store, version: SimpleNamespace(live="other"))
        with pytest.raises(RunFailed, match="serves other tensors than version 3 has"):
            await watched.look(lambda: False)
        await watched.engines.aclose()

    asyncio.run(play())


def test_servers_that_do_not_follow_the_store_are_brought_to_the_newest_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch, published=4)
        watched.servers.follows = False
        watched.servers.version[A] = -1  # as a server begins
        await wait_for_version(watched.run, 4)
        assert watched.servers.brought == [(A, 4), (B, 4)]
        assert watched.run.progress.served == 4
        await watched.engines.aclose()

    asyncio.run(play())

    async def refuse() -> None:
        watched = Watched(monkeypatch, published=4)
        watched.servers.follows = False
        bring = watched.servers.bring

        async def stuck(http: Any, url: str, version: int) -> None:
            if url == A:
                raise EngineError("its payload is damaged")
            await bring(http, url, version)

        watched.servers.bring = stuck  # type: ignore[method-assign]
        watched.engines.states[0].refused = versions.REFUSED - 1
        await watched.look(lambda: watched.lost() == [A] and watched.run.progress.served == 4)
        await watched.engines.aclose()

    asyncio.run(refuse())
    assert "is not brought to version 4 yet: its payload is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("fault", [EngineError("failed (500)"), UserError("it cannot play")], ids=type)
def test_a_server_that_dies_of_its_test_says_why(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(ends: bool) -> None:
        watched = Watched(monkeypatch)

        async def check(url: str) -> None:
            raise fault

        watched.client.check = check  # type: ignore[method-assign]
        for state in watched.engines.states:
            state.child = SimpleNamespace(ends=lambda _: ends, end=lambda: "its log says why", log="LOG")  # type: ignore[assignment]
        await check_engines(watched.run)

    with pytest.raises(UserError, match="its log says why; see LOG"):
        asyncio.run(play(ends=True))
    with pytest.raises(UserError, match=str(fault.args[0]).replace("(", r"\(").replace(")", r"\)")):
        asyncio.run(play(ends=False))


def test_one_dead_process_of_several_engines_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        watched, died = Watched(monkeypatch), lambda: "it was killed"
        children = [
            SimpleNamespace(name="inference server", exit_code=None, log="LOG", failure=died, end=died)
            for _ in range(2)
        ]
        trainer = SimpleNamespace(name="trainer", exit_code=0, log="LOG", failure=lambda: None)
        watched.run.children = [*children, trainer]  # type: ignore[misc]
        for state, child in zip(watched.engines.states, children, strict=True):
            state.child = child  # type: ignore[assignment]
        check_processes(watched.run)
        children[0].exit_code = -9
        check_processes(watched.run)
        check_processes(watched.run)
        assert watched.lost() == [A]
        assert versions._fault(watched.engines.states[0]) == "it was killed; see LOG", "whoever sees it first says why"
        children[1].exit_code = 1
        with pytest.raises(RunFailed, match="it was killed; nothing is lost: continue with"):
            check_processes(watched.run)
        children[1].exit_code = 2
        with pytest.raises(UserError, match="it was killed"):
            check_processes(watched.run)

    asyncio.run(play())


def test_engines_join_serve_and_leave_while_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        servers, ledger = watched.servers, watched.ledger
        await watched.look(lambda: watched.scored)
        assert watched.rows() == {A: "serving", B: "serving"}
        servers.version[C] = 2
        ledger.members.join(C, "eu-0")
        await watched.look(lambda: C in servers.checked and watched.rows().get(C) == "joining")
        for _ in range(3):
            await observe_versions(watched.run)
        assert watched.client.serving == {A, B}, "tokens of version 2 would be older than admission allows"
        servers.version[C] = 3
        await watched.look(lambda: watched.rows()[C] == "serving")
        assert watched.client.serving == {A, B, C}
        assert ledger.members.drain(A, "by its operator")
        await watched.look(lambda: watched.rows()[A] == "draining")
        assert watched.client.serving == {B, C}
        servers.fault[B] = "draining"  # it got SIGTERM
        await watched.look(lambda: watched.rows()[B] == "draining")
        ledger.members.set([(A, "gone", "it has left", 3)])
        await watched.look(lambda: watched.lost() == [A])
        ledger.members.join(A, "eu-1")  # started anew at the same address
        await watched.look(lambda: watched.client.serving == {A, C})
        assert servers.checked == [C, A]
        await watched.engines.aclose()

    asyncio.run(play())
    printed = capsys.readouterr().err
    assert f"the engine at {C} has joined" in printed
    assert f"the engine at {A} gets no new turns: by its operator" in printed
    assert f"the engine at {B} gets no new turns: it is about to end" in printed


def test_an_engine_whose_member_says_that_it_is_gone_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        await watched.look(lambda: watched.scored)
        watched.servers.fault[A] = EngineLost("connection refused")
        watched.ledger.members.set([(A, "gone", "it was killed", -1)])
        await watched.look(watched.lost)
        monkeypatch.setattr(versions, "SILENT_SECONDS", 30.0)
        for _ in range(5):
            await observe_versions(watched.run)
            assert watched.client.serving == {B}
        assert watched.rows() == {A: "gone", B: "serving"}
        await watched.engines.aclose()

    asyncio.run(play())


def test_an_engine_that_lags_is_drained_and_serves_again_once_it_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        await watched.look(lambda: watched.scored)
        watched.servers.version[B] = 4
        await watched.look(lambda: watched.engines.states[1].version == 4)
        assert watched.run.progress.served == 3, "one version behind is within the bound"
        watched.servers.version[B] = 5
        await watched.look(lambda: watched.run.progress.served == 5)
        assert watched.rows() == {A: "draining", B: "serving"}
        watched.servers.version[A] = 5
        await watched.look(lambda: watched.client.serving == {A, B})
        monkeypatch.setattr(versions, "swap_seconds", lambda config: 0.05)
        watched.servers.version[B] = 6
        await watched.look(lambda: watched.run.progress.served == 6)
        assert watched.rows()[A] == "draining", "a swap may not take for ever either"
        await watched.engines.aclose()

    asyncio.run(play())


def test_an_engine_that_the_run_cannot_use_never_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        watched.servers.fault[C] = UserError("it takes 64 tokens")
        watched.ledger.members.join(C, "eu-0")
        await watched.look(lambda: watched.rows().get(C) == "gone")
        (row,) = [row for row in watched.ledger.members.engines() if row.url == C]
        assert row.why == "it takes 64 tokens"
        assert watched.client.serving == {A, B}
        await watched.engines.aclose()

    asyncio.run(play())


def test_a_run_whose_engines_come_and_go_waits_for_one_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        watched.engines.elastic = True
        await watched.look(lambda: watched.scored)
        watched.servers.fault = {A: "failed", B: "failed"}
        await watched.look(lambda: len(watched.lost()) == 2)
        request = asyncio.create_task(watched.client._reached(lambda _: watched.client._server("s", None), answer, 20))
        watched.ledger.members.join(C, "eu-0")
        await watched.look(lambda: watched.client.serving == {C})
        assert await request == C
        monkeypatch.setattr(versions, "swap_seconds", lambda config: 0.1)
        monkeypatch.setattr(versions, "start_seconds", lambda inference, model: 0.0)
        watched.servers.fault[C] = "failed"
        with pytest.raises(RunFailed, match="no engine has served for 0 s: http://c: failed: broken"):
            await watched.look(lambda: False)
        await watched.engines.aclose()

    async def answer(url: str) -> str:
        return url

    asyncio.run(play())


def test_an_engine_whose_member_has_left_does_not_come_back_by_its_last_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        await watched.look(lambda: watched.scored)
        watched.servers.fault[B] = EngineLost("refused")  # its server was killed
        monkeypatch.setattr(versions, "SILENT_SECONDS", 30.0)
        watched.ledger.members.drain(B, "it was killed")
        watched.ledger.members.set([(B, "gone", "it was killed", -1)])  # before the next look
        await watched.look(lambda: watched.lost() == [B])
        for _ in range(5):
            await observe_versions(watched.run)
        assert watched.lost() == [B]
        assert watched.rows() == {A: "serving", B: "gone"}
        del watched.servers.fault[B]
        watched.ledger.members.join(B, "engine-1")
        await watched.look(lambda: watched.client.serving == {A, B})
        await watched.engines.aclose()

    asyncio.run(play())
    assert capsys.readouterr().err.count("is lost") == 1


@pytest.mark.parametrize("left", [False, True])
def test_a_drained_engine_says_who_asked_whatever_its_controller_sees_first(
    left: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its member reads the ledger as often as the controller: its server may end, or be gone, before the next look."""

    async def play() -> None:
        watched = Watched(monkeypatch)
        await watched.look(lambda: watched.scored)
        monkeypatch.setattr(versions, "MEMBERS_SECONDS", 3600.0)
        watched.ledger.members.drain(B, "by its operator")
        if left:
            watched.ledger.members.set([(B, "gone", "by its operator", -1)])
            watched.engines.looked = float("-inf")
        else:
            watched.servers.fault[B] = "draining"
        await watched.look(lambda: watched.rows()[B] == ("gone" if left else "draining"))
        await watched.look(lambda: watched.client.serving == {A})
        await watched.engines.aclose()

    asyncio.run(play())
    assert f"the engine at {B} gets no new turns: by its operator" in capsys.readouterr().err


def test_a_wedged_engine_costs_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        await watched.look(lambda: watched.scored)
        monkeypatch.setattr(versions, "SILENT_SECONDS", 1.0)
        monkeypatch.setattr(versions, "_PATIENCE", 0.5)
        watched.servers.fault[A] = "silent"
        began, looks = asyncio.get_running_loop().time(), 0
        while not watched.lost():
            await observe_versions(watched.run)
            looks += 1
            await asyncio.sleep(0.01)
        seconds = asyncio.get_running_loop().time() - began
        assert seconds < 2.5
        assert looks > 10, "an engine that does not answer holds up one look, not each"
        await watched.engines.aclose()

    asyncio.run(play())


def test_the_controller_beats_in_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and players end without beats: an evaluation may last longer than their grace time."""

    async def play() -> None:
        watched = Watched(monkeypatch)
        for beats in (1, 2):
            watched.engines.looked = -1e9
            await observe_versions(watched.run)
            assert watched.ledger.members.stage() == ("ended", beats)
        await watched.engines.aclose()

    asyncio.run(play())


def test_engines_of_a_resumed_run_serve_once_they_have_its_newest_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before that, they would play turns whose tokens are too old for their groups."""
    monkeypatch.setattr(run_state, "manifests", lambda store: [SimpleNamespace(version=number) for number in range(6)])

    async def play() -> None:
        watched = Watched(monkeypatch, published=5)
        parts = {name: None for name in Run.__dataclass_fields__ if name not in ("progress", "fleet", "record", "row")}
        resumed = Run(**parts | vars(watched.run))  # type: ignore[arg-type]
        watched.run, watched.engines.elastic = resumed, True
        watched.engines.states.clear()
        joiner = watched.engines.add(A, "new-0")
        await watched.look(lambda: joiner.version == 3)
        await observe_versions(resumed)
        assert (joiner.state, resumed.progress.served) == ("joining", 5)
        watched.servers.version[A] = 5
        await watched.look(lambda: joiner.serves)
        await watched.engines.aclose()

    asyncio.run(play())


def test_the_wish_to_leave_of_an_earlier_attempt_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        watched.ledger.members.join(A, "engine-0")
        watched.ledger.members.drain(A, "asked in an earlier attempt")
        await observe_versions(watched.run)
        assert all(state.serves for state in watched.engines.states)
        await watched.engines.aclose()

    asyncio.run(play())


def test_a_joiner_that_cannot_be_updated_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        watched = Watched(monkeypatch)
        watched.servers.follows, watched.engines.elastic = False, True
        joiner = watched.engines.add(C, "new-0")
        watched.servers.version[C], watched.servers.fault[C] = 1, ""
        bring = watched.servers.bring

        async def refusing(http: Any, url: str, version: int) -> None:
            if url == C:
                raise UserError("it cannot follow the store")
            await bring(http, url, version)

        watched.servers.bring = refusing  # type: ignore[method-assign]
        for _ in range(4):
            await observe_versions(watched.run)
            await asyncio.sleep(0.02)
        assert (joiner.state, joiner.why) == ("gone", "it cannot follow the store")
        assert len(watched.engines.serving) == 2
        await watched.engines.aclose()

    asyncio.run(play())
