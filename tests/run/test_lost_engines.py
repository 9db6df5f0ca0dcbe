"""Engines that are lost, late or wrong while others serve: what the controller makes of their answers."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from etude.config import RLConfig
from etude.errors import RunFailed, UserError
from etude.protocol.backends.client import EngineClient, EngineError, EngineLost
from etude.run import versions
from etude.run.state import EngineRecord, Engines, EngineState, Progress, Run, check_processes
from etude.run.versions import check_engines, observe_versions, wait_for_version

A, B = "http://a", "http://b"


class Servers:
    """A backend whose servers answer what the test says. `version` and `fault` are by URL."""

    follows = True

    def __init__(self) -> None:
        self.version = {A: 3, B: 3}
        self.fault: dict[str, Exception | str] = {}
        self.brought: list[tuple[str, int]] = []

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
        self.client = EngineClient([A, B], backend=self.servers)  # type: ignore[arg-type]
        self.scored: list[tuple[str, int]] = []
        probes = SimpleNamespace(served=lambda url, version: self.scored.append((url, version)))
        self.engines = Engines([EngineState(A, None), EngineState(B, None)], self.client, probes)  # type: ignore[arg-type]
        self.run: Run = SimpleNamespace(  # type: ignore[assignment]
            engines=self.engines,
            record=EngineRecord(),
            progress=Progress(),
            weights=None,
            folder="RUN",
            children=[],
            config=RLConfig.model_validate({"tasks": {"repository": "unused"}}),
            sandbox=SimpleNamespace(alive=True),
        )
        monkeypatch.setattr(versions, "_PATIENCE", 0.05)
        monkeypatch.setattr(versions, "SILENT_SECONDS", 0.1)
        monkeypatch.setattr(versions, "read_manifest", lambda store, version: SimpleNamespace(live="d"))
        monkeypatch.setattr(versions, "published_versions", lambda store, after: list(range(after + 1, published + 1)))

    async def look(self, until: Any) -> None:
        async with asyncio.timeout(30):
            while not until():
                await observe_versions(self.run)
                await asyncio.sleep(0.01)

    def lost(self) -> list[str]:
        return [state.url for state in self.engines.states if state.lost]


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
        assert {watched.client._server(str(n), None) for n in range(2)} <= {A, B}
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
