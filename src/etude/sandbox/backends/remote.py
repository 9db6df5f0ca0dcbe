"""A backend over a remote host: one machine for every live box, and a new one for every test run.

Hidden tests that are decided outside have two machines: one with the library and without the tests, and one with the
tests and without the library, whose report counts. The bytes between the two pass through this process.

The requests to a machine, and its replies, are those of the namespace backend: `guest/shell.py` and
`grading/guest/runs.py` run in the box.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from etude.errors import UserError
from etude.sandbox.backend import (
    GRACE_SECONDS,
    LEARN_SECONDS,
    VERIFIER_SECONDS,
    Backend,
    BackendOptions,
    ForkRequest,
    ForkResult,
    RunImage,
    VerifyRequest,
    VerifyResult,
)
from etude.sandbox.backends.host import COMMAND, Need, Packed, RemoteHost, StreamConnection, pack
from etude.sandbox.base import BoxDead, BoxError, Capabilities, Changes, Garbled, Image, LaunchFailed, Limits
from etude.sandbox.connection import encode, limits_of
from etude.sandbox.guest.root import RUN, SITE, WORKSPACE
from etude.sandbox.namespace.zygote import installed_runner, module_of
from etude.sandbox.shell import Shell

T = TypeVar("T")

USERS = range(10_000, 60_000)  # processes are counted by user, on some hosts over all boxes of a machine
_PATH = "/usr/local/bin:/usr/bin:/bin"


class RemoteBackend(Backend):
    """Boxes in machines of a remote host. Made by `open_remote`."""

    recordings = 1  # each takes two machines

    def __init__(self, host: RemoteHost, capabilities: Capabilities, options: BackendOptions) -> None:
        self.services = options.services
        self._host = host
        self.image_name, self.python = host.image_name, host.python
        self._run_server = options.runs
        self._capabilities = capabilities
        self._users = count(secrets.randbelow(len(USERS)))
        self._packs: dict[tuple[Path | None, frozenset[str]], asyncio.Task[Packed]] = {}
        self._shells: weakref.WeakSet[Shell] = weakref.WeakSet()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether the backend has not been closed."""
        return not self._closed

    def capabilities(self) -> Capabilities:
        """The abilities of boxes: those that the host promises, without those that failed in a probe."""
        return self._capabilities

    def system_folders(self) -> Mapping[str, Path]:
        """The files of the host's image, and those of the test runner, as they are on this computer. Raises
        UserError."""
        return {**self._host.system(), **{name: Path(at) for name, at in installed_runner(self._run_server).items()}}

    async def shell(self, image: Image, layers: Changes, limits: Limits, *, bare: bool = False) -> Shell:
        """A live box in a machine of its own; all of them are bare."""
        if image.host_socket is not None or image.mounts or image.places:
            raise LaunchFailed(f"boxes of {self._host.name} hold neither outside agents nor foreign Harbor tasks")
        async with AsyncExitStack() as ends:
            own = image.changes if image.changes.keys() <= layers.keys() else {}  # else the box is of the repository
            files = tuple((path, text.encode("utf-8", "surrogateescape")) for path, text in own.items())
            bare_image = RunImage(image.repository, image.site, None, files)
            connection = await self._machine(bare_image, {"kind": "live"}, limits, ends, Garbled)
            shell = Shell(connection, None, None, ends.pop_all())
        self._shells.add(shell)
        try:
            await shell.start(limits_of(limits), layers, _PATH, {"PYTHONHASHSEED": "0"}, None)
            await shell.start_services(self.services, {"PATH": _PATH})
        except BaseException:
            await shell.close()
            raise
        return shell

    async def fork(self, request: ForkRequest) -> ForkResult:
        """Run tests in a new machine."""
        image = request.image
        payload = encode(
            {"tests": request.tests, "services": self.services}, {**dict(image.changes), **request.changes}
        )
        async with AsyncExitStack() as ends:
            return await _run(await self._runs(image, request.limits, ends), payload, request.limits)

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Run hidden tests in a machine without the library, on a library in a machine without the tests."""
        late = replace(request.limits, seconds=request.limits.seconds + VERIFIER_SECONDS)
        hidden = RunImage(request.hidden, request.image.site, None)
        ends = AsyncExitStack(), AsyncExitStack()
        try:
            verifier, tested = await _both(
                self._runs(hidden, late, ends[0], decides=True), self._runs(request.image, request.limits, ends[1])
            )
            ours, theirs = socket.socketpair()
            with ours, theirs:
                tests = _run(verifier, encode(request.body, {}), late, ours)
                return VerifyResult(*await _both(tests, self._run_tested(tested, request, theirs)))
        finally:
            await asyncio.gather(*(end.aclose() for end in ends))

    async def _run_tested(
        self, connection: StreamConnection, request: VerifyRequest, sock: socket.socket
    ) -> ForkResult:
        """The end of its machine is that of its process: whatever ended it, an agent's code was in it."""
        payload = encode({"tests": [], "services": self.services}, {**dict(request.image.changes), **request.changes})
        started = time.monotonic()
        try:
            return await _run(connection, payload, request.limits, sock)
        except BoxDead:
            if request.allowed is None:  # the right library, without an agent
                raise
            seconds = time.monotonic() - started
            return ForkResult(-signal.SIGKILL, seconds >= request.limits.seconds, seconds, b"", 0.0)

    async def remember(self, image: RunImage, learned: bytes) -> None:
        """Nothing is kept: every run has a new machine."""

    async def _runs(
        self, image: RunImage, limits: Limits, ends: AsyncExitStack, decides: bool = False
    ) -> StreamConnection:
        """A machine for one test run; `decides`: for a verifier, which writes no files but temporary ones."""
        hello = {
            "kind": "runs",
            "decides": decides,
            "module": module_of(self._run_server, "remote_runs"),
            "hidden": None if image.hidden is None else f"{RUN}/{secrets.token_hex(12)}",
            "controls": None if image.controls is None else asdict(image.controls),
        }
        return await self._machine(image, hello, limits, ends)

    async def _machine(
        self,
        image: RunImage,
        hello: dict[str, Any],
        limits: Limits,
        ends: AsyncExitStack,
        fault: type[BoxError] = BoxDead,
    ) -> StreamConnection:
        """A connection to a new machine that holds an image and has received `hello`."""
        if self._closed:
            raise BoxDead("the sandbox is closed")
        runner = await self._packed(None)
        user = USERS[next(self._users) % len(USERS)]
        places = {
            WORKSPACE: (image.repository, 0 if hello.get("decides") else user),
            SITE: (image.site, 0),
            hello.get("hidden"): (image.hidden, 0),
        }
        # No text of a file that the task has in another version ever gets there.
        own = frozenset(path for path, _ in image.changes)
        packs = [
            (at, owner, await self._packed(folder, own if at == WORKSPACE else frozenset()))
            for at, (folder, owner) in places.items()
            if folder is not None
        ]
        files = runner.size + sum(packed.size for _, _, packed in packs)
        stream = await self._host.start(COMMAND, Need(limits, (files >> 20) + 1, user))
        ends.push_async_callback(stream.close)
        connection = StreamConnection(stream, fault)
        ends.callback(connection.close)
        connection.boot(runner.data)
        for at, owner, packed in packs:
            connection.put({"at": at, "owner": owner}, packed.data)
        connection.put({"hello": hello | {"user": user}})
        await connection.started()
        return connection

    async def probe(self, without: Collection[str]) -> None:
        """Keep the abilities that hold in a machine. Raises UserError if others than `without` are missing."""
        limits = Limits(memory_mb=256, processes=16, disk_mb=16)
        try:
            async with AsyncExitStack() as ends:
                with tempfile.TemporaryDirectory(prefix="etude-probe-") as folder:
                    image = RunImage(Path(folder), None, None)
                    connection = await self._machine(image, {"kind": "probe"}, limits, ends)
                reply, _ = await connection.request({"limits": limits_of(limits)}, b"", LEARN_SECONDS)
        except BoxError as e:
            raise UserError(f"{self._host.name} cannot make boxes here: {e}.") from None
        capabilities, held = self._capabilities, reply.held
        tried = ("memory", "processes")
        kept = tuple(limit for limit in capabilities.limits if limit in held or limit not in tried)
        self._capabilities = replace(capabilities, limits=kept, seccomp="filter" in held)
        missing = {"memory", "processes", "disk"}.difference(kept, without)
        if not reply.bash:
            raise UserError(f"the image of {self._host.name}'s boxes has no /bin/bash; use one that has.")
        if "network" not in held:
            raise UserError(f"boxes of {self._host.name} reach the network; something must keep them off it.")
        if not self._capabilities.seccomp:
            raise UserError(f"boxes of {self._host.name} cannot filter system calls; use another runtime.")
        if missing:
            raise UserError(
                f"boxes of {self._host.name} cannot limit {', '.join(sorted(missing))} here; "
                f"use another runtime, or name it in sandbox.without."
            )

    async def _packed(self, folder: Path | None, without: frozenset[str] = frozenset()) -> Packed:
        """A folder of an image, or (None) our own modules: packed once."""
        if (folder, without) not in self._packs:
            if folder is not None and not folder.is_dir():
                raise LaunchFailed(f"{folder} is not a folder")
            runner = {} if folder is not None else installed_runner(self._run_server)
            places = {"": folder.resolve()} if folder is not None else {name: Path(at) for name, at in runner.items()}
            self._packs[folder, without] = asyncio.create_task(asyncio.to_thread(pack, places, without))
        return await asyncio.shield(self._packs[folder, without])

    async def close(self) -> None:
        """End all live boxes."""
        self._closed = True
        await asyncio.gather(*(shell.close() for shell in list(self._shells)))
        self._host.close()


async def _run(
    connection: StreamConnection, payload: bytes, limits: Limits, sock: socket.socket | None = None
) -> ForkResult:
    """One run of a machine, which is joined to `sock`; closes it here. Raises BoxDead."""
    head = {"files": [], "limits": limits_of(limits)}
    descriptors = () if sock is None else (sock.fileno(),)
    reply = asyncio.create_task(connection.request(head, payload, limits.seconds + GRACE_SECONDS, descriptors))
    await asyncio.sleep(0)  # now the request is sent
    if sock is not None:
        sock.close()
    answer, output = await reply
    return ForkResult(answer.status, answer.timed_out, answer.seconds, bytes(output), answer.cpu)


async def _both(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, T]) -> tuple[T, T]:
    """Both results. Raises the first error, which ends the other."""
    tasks = asyncio.create_task(one), asyncio.create_task(other)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def open_remote(
    host: RemoteHost, options: BackendOptions, without: Sequence[str] = ()
) -> AsyncIterator[RemoteBackend]:
    """Open a backend over `host`, without the limits `without`. Raises UserError for options that it cannot support."""
    capabilities = await host.open()
    if options.egress is not None:
        raise UserError(
            f"boxes of {host.name} have no way out; drop sandbox.egress and sandbox.index, or use the namespaces."
        )
    if options.machine_profiles:
        raise UserError(f"boxes of {host.name} cannot look like a given machine; drop rollout.machine_profiles.")
    backend = RemoteBackend(host, capabilities, options)
    try:
        await backend.probe(frozenset(without))
        await backend.check_services()
        yield backend
    finally:
        await backend.close()
