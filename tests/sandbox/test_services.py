"""Adapters of clusters and services, against servers here that speak their documented protocols.

None of this has met the real services; the machines are real, and so is all that happens in them.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.errors import UserError
from etude.grading.runner import EXAMINER, TestRunner
from etude.sandbox.backend import BackendOptions
from etude.sandbox.backends.e2b import E2B
from etude.sandbox.backends.host import COMMAND, Need, RemoteHost
from etude.sandbox.backends.kubernetes import DENY_ALL, LABELS, Pods
from etude.sandbox.backends.modal import Modal
from etude.sandbox.backends.remote import RemoteBackend, open_remote
from etude.sandbox.base import Image, Limits
from tests.helpers.machines import MACHINE, needs_machines


async def machine(*command: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*MACHINE, *command, stdin=pipe, stdout=pipe)


async def play(host: RemoteHost, folder: Path, without: tuple[str, ...] = ()) -> RemoteBackend:
    """A live box does what it should."""
    async with open_remote(host, BackendOptions(EXAMINER), without) as backend:
        box = await TestRunner(backend).create(Image(folder, None, {}), Limits())
        assert (await box.exec("echo $((40 + 2)) > answer; cat answer", 60)).output == "42\n"
        assert await box.changes() == {"answer": b"42\n"}
        await box.close()
        return backend


@dataclass
class Service:
    """E2B's API and the agent in its machines, as its public client addresses them (e2b 2.63)."""

    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    wanted: list[dict[str, Any]] = field(default_factory=list)
    processes: dict[int, asyncio.subprocess.Process] = field(default_factory=dict)

    def app(self) -> Starlette:
        routes = [
            Route("/v2/sandboxes", self.create, methods=["POST"]),
            Route("/sandboxes/{name}", self.delete, methods=["DELETE"]),
            Route("/process.Process/Start", self.start, methods=["POST"]),
            Route("/process.Process/SendInput", self.send, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    def _note(self, request: Request) -> None:
        self.asked.append((request.method, request.url.path, dict(request.headers)))

    async def create(self, request: Request) -> Response:
        self._note(request)
        self.wanted.append(await request.json())
        return JSONResponse({"sandboxID": "box1", "envdAccessToken": "token", "templateID": "t"}, 201)

    async def delete(self, request: Request) -> Response:
        self._note(request)
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
        return Response(status_code=204)

    async def start(self, request: Request) -> Response:
        self._note(request)
        body = await request.body()
        flags, size = struct.unpack_from(">BI", body)
        assert (flags, len(body)) == (0, 5 + size)
        asked = json.loads(body[5:])
        assert asked["stdin"] is True
        process = await machine(asked["process"]["cmd"], *asked["process"]["args"])
        self.processes[process.pid] = process

        async def events() -> AsyncIterator[bytes]:
            yield _message({"event": {"start": {"pid": process.pid}}})
            yield _message({"event": {"keepalive": {}}})
            assert process.stdout is not None
            while data := await process.stdout.read(65536):
                yield _message({"event": {"data": {"stdout": base64.b64encode(data).decode()}}})
            yield _message({"event": {"end": {"exitCode": await process.wait(), "exited": True}}})
            yield _message({}, flags=2)

        return StreamingResponse(events(), media_type="application/connect+json")

    async def send(self, request: Request) -> Response:
        self._note(request)
        asked = await request.json()
        stdin = self.processes[asked["process"]["pid"]].stdin
        assert stdin is not None
        stdin.write(base64.b64decode(asked["input"]["stdin"]))
        await stdin.drain()
        return JSONResponse({})


def _message(content: dict[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(content).encode()
    return struct.pack(">BI", flags, len(data)) + data


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(30):
        while not server.started:
            await asyncio.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


@needs_machines
def test_e2b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    service = Service()

    async def run() -> None:
        async with serving(service.app()) as url:
            monkeypatch.setenv("E2B_API_URL", url)
            monkeypatch.setenv("E2B_SANDBOX_URL", url)
            monkeypatch.setenv("E2B_API_KEY", "secret")
            sandbox = await play(E2B("template"), tmp_path, without=["disk"])
            assert sandbox.capabilities().isolation == "vm"
            with pytest.raises(UserError, match="cannot limit disk"):
                await play(E2B("template"), tmp_path)

    asyncio.run(run())
    assert all(w["templateID"] == "template" and w["allow_internet_access"] is False for w in service.wanted)
    for method, path, headers in service.asked:
        inside = path.startswith("/process.")
        assert ("secret" in headers.values()) != inside, (method, path)  # the account's key enters no machine
        assert (headers.get("x-access-token") == "token") == inside
        assert (headers.get("authorization") == f"Basic {base64.b64encode(b'root:').decode()}") == inside
    deleted = [path for method, path, _ in service.asked if method == "DELETE"]
    assert len(deleted) == len(service.wanted)


def test_e2b_without_a_key_or_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(UserError, match="E2B_API_KEY"):
        asyncio.run(play(E2B("t"), tmp_path))
    monkeypatch.setenv("E2B_API_KEY", "secret")
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="made no machine"):
        asyncio.run(play(E2B("t"), tmp_path))


class _Both:
    """A function with the two faces of Modal's package: called, or awaited by `.aio`."""

    def __init__(self, work: Any) -> None:
        self.aio = work


class ModalPackage:
    """The calls of the package `modal` that the adapter makes, over machines here."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.ended = 0
        self.exception = SimpleNamespace(Error=type("Error", (Exception,), {}))
        self.stream_type = SimpleNamespace(StreamType=SimpleNamespace(DEVNULL="devnull"))
        self.App = SimpleNamespace(lookup=_Both(self._lookup))
        self.Image = SimpleNamespace(from_registry=lambda name: name)
        self.Sandbox = SimpleNamespace(create=_Both(self._create))

    async def _lookup(self, name: str, *, create_if_missing: bool) -> str:
        return name

    async def _create(self, **options: Any) -> Any:
        self.made.append(options)
        return SimpleNamespace(exec=_Both(self._exec), terminate=_Both(self._terminate))

    async def _exec(self, *command: str, text: bool, stderr: str) -> Any:
        assert not text
        self.process = process = await machine(*command)
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        async def output() -> AsyncIterator[bytes]:
            while data := await stdout.read(65536):
                yield data

        writer = SimpleNamespace(write=stdin.write, drain=_Both(stdin.drain))
        return SimpleNamespace(stdin=writer, stdout=output())

    async def _terminate(self) -> None:
        self.ended += 1
        self.process.kill()


@needs_machines
def test_modal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModalPackage()
    monkeypatch.setitem(__import__("sys").modules, "modal", package)
    sandbox = asyncio.run(play(Modal("image"), tmp_path, without=["disk"]))
    assert sandbox.capabilities().isolation == "gvisor"
    assert package.ended == len(package.made) == 2
    assert all(options["block_network"] for options in package.made)


def test_modals_package_takes_what_the_adapter_gives() -> None:
    modal = pytest.importorskip("modal", reason="the package modal is not installed")
    create = inspect.signature(modal.Sandbox.create).parameters
    assert {"app", "image", "timeout", "cpu", "memory", "block_network", "workdir"} <= create.keys()
    assert {"text", "stderr"} <= inspect.signature(modal.Sandbox.exec).parameters.keys()
    assert modal.stream_type.StreamType.DEVNULL is not None
    assert issubclass(modal.exception.AuthError, modal.exception.Error)


KUBECTL = """#!/bin/sh
# what kubectl does with the arguments that the adapter gives it
log() { echo "$*" >> "$STATE/log"; }
log "$@"
shift 2
case "$1 $2" in
  "auth can-i") echo yes ;;
  "get runtimeclass") printf runsc ;;
  "apply -f") cat > "$STATE/policy" ;;
  "create -f") cat > "$STATE/pod" ;;
  "wait --for=condition=Ready") ;;
  "delete pod") ;;
  "attach --stdin") exec python3 -c "$START" "$STATE/pod" ;;
  *) echo "unknown command $*" >&2; exit 1 ;;
esac
"""
START = (
    "import json, os, sys; pod = json.load(open(sys.argv[1])); command = json.loads(os.environ['MACHINE']);"
    "os.execvp(command[0], command + pod['spec']['containers'][0]['command'])"
)


@needs_machines
def test_kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL)
    program.chmod(0o755)
    (tmp_path / "tree").mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/sbin:/usr/bin:/bin")
    for name, value in {"STATE": str(tmp_path), "START": START, "MACHINE": json.dumps(MACHINE)}.items():
        monkeypatch.setenv(name, value)
    sandbox = asyncio.run(play(Pods("image", "sandboxed", "boxes"), tmp_path / "tree"))
    assert sandbox.capabilities().isolation == "gvisor"
    assert json.loads((tmp_path / "policy").read_text()) == DENY_ALL
    calls = (tmp_path / "log").read_text().splitlines()
    assert all(call.startswith("--namespace boxes ") for call in calls)
    made = [call for call in calls if "create -f" in call]
    assert len(made) == len([call for call in calls if "delete pod" in call]) == 2


def test_a_pod_has_no_rights_and_no_network() -> None:
    pod = Pods("image", "sandboxed", "boxes").pod("etude-1", COMMAND, Need(Limits(disk_mb=8), 3))
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert pod["metadata"]["labels"] == LABELS == DENY_ALL["spec"]["podSelector"]["matchLabels"]
    assert "egress" not in DENY_ALL["spec"]
    assert spec["runtimeClassName"] == "sandboxed"
    assert not spec["automountServiceAccountToken"]
    assert container["stdinOnce"]
    assert container["stdin"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"]["drop"] == ["ALL"]
    assert all(volume["emptyDir"]["sizeLimit"] for volume in spec["volumes"])
    assert len(spec["volumes"]) == len(container["volumeMounts"])
