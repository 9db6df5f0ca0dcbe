"""A backend over a remote host: one machine for every live box, and a new one for every test run.

The requests to a machine, and its replies, are those of the namespace backend: `guest/shell.py` and
`grading/guest/runs.py` run in the box.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import weakref
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

from etude.errors import UserError
from etude.sandbox.backend import (
    GRACE_SECONDS,
    LEARN_SECONDS,
    Backend,
    BackendOptions,
    ForkRequest,
    ForkResult,
    RunImage,
    RunServer,
    VerifyRequest,
    VerifyResult,
)
from etude.sandbox.backends.host import COMMAND, Need, Packed, RemoteHost, StreamConnection, pack
from etude.sandbox.base import BoxDead, BoxError, Capabilities, Changes, Garbled, Image, LaunchFailed, Limits
from etude.sandbox.connection import encode, limits_of
from etude.sandbox.guest.root import RUN, SITE, WORKSPACE
from etude.sandbox.namespace.zygote import installed_runner, module_of
from etude.sandbox.shell import Shell

USERS = range(10_000, 60_000)  # processes are counted by user, on some hosts over all boxes of a machine
_PROGRAMS = "/usr/local/bin"


class RemoteBackend(Backend):
    """Boxes in machines of a remote host. Made by `open_remote`."""

    def __init__(self, host: RemoteHost, capabilities: Capabilities, runs: RunServer) -> None:
        self._host = host
        self.image_name = host.image_name
        self._run_server = runs
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

    async def shell(self, image: Image, layers: Changes, limits: Limits, *, bare: bool = False) -> Shell:
        """A live box in a machine of its own; all of them are bare."""
        if image.host_socket is not None or image.mounts or image.places:
            raise LaunchFailed(f"boxes of {self._host.name} hold neither outside agents nor foreign Harbor tasks")
        async with AsyncExitStack() as ends:
            files = tuple((path, text.encode("utf-8", "surrogateescape")) for path, text in image.changes.items())
            bare_image = RunImage(image.repository, image.site, None, files)
            connection = await self._machine(bare_image, {"kind": "live"}, limits, ends, Garbled)
            shell = Shell(connection, None, None, ends.pop_all())
        self._shells.add(shell)
        try:
            await shell.start(limits_of(limits), layers, _PROGRAMS, {"PYTHONHASHSEED": "0"}, None)
        except BaseException:
            await shell.close()
            raise
        return shell

    async def fork(self, request: ForkRequest) -> ForkResult:
        """Run tests in a new machine."""
        image, limits = request.image, request.limits
        async with AsyncExitStack() as ends:
            connection = await self._runs(image, limits, ends)
            head = {"files": [], "limits": limits_of(limits)}
            payload = encode({"tests": request.tests}, {**dict(image.changes), **request.changes})
            reply, output = await connection.request(head, payload, limits.seconds + GRACE_SECONDS)
        return ForkResult(reply.status, reply.timed_out, reply.seconds, bytes(output), reply.cpu)

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Refused: a remote machine does not keep two processes apart."""
        raise LaunchFailed(f"boxes of {self._host.name} cannot decide hidden tests of Python in a process of their own")

    async def remember(self, image: RunImage, learned: bytes) -> None:
        """Nothing is kept: every run has a new machine."""

    async def _runs(self, image: RunImage, limits: Limits, ends: AsyncExitStack) -> StreamConnection:
        hello = {
            "kind": "runs",
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
        places = {WORKSPACE: (image.repository, user), SITE: (image.site, 0), hello.get("hidden"): (image.hidden, 0)}
        # No file of the repository that the task has in another version ever gets there.
        own = frozenset(path for path, _ in image.changes)
        packs = [
            (at, owner, await self._packed(folder, own if at == WORKSPACE else frozenset()))
            for at, (folder, owner) in places.items()
            if folder is not None
        ]
        files = runner.size + sum(packed.size for _, _, packed in packs)
        stream = await self._host.start(COMMAND, Need(limits, (files >> 20) + 1))
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
    backend = RemoteBackend(host, capabilities, options.runs)
    try:
        await backend.probe(frozenset(without))
        yield backend
    finally:
        await backend.close()
