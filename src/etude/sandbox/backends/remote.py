"""A backend over a carrier: one machine for every live box, and a new one for every test run.

What is asked of a machine, and what comes of it, is the same code as on namespaces: `namespace.Backend` above,
`guest/shell.py` and `guest/runs.py` in the box.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
import weakref
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from etude.errors import UserError
from etude.grading import verdict
from etude.grading.questions import AssertionSplit
from etude.sandbox.backends.host import COMMAND, Carrier, Need, Packed, StreamConnection, pack
from etude.sandbox.base import BoxDead, BoxError, Capabilities, Image, LaunchFailed, Limits
from etude.sandbox.egress.policy import Egress
from etude.sandbox.guest.answers import PREFIX
from etude.sandbox.guest.root import RUN, SITE, WORKSPACE
from etude.sandbox.machine_profile import Like
from etude.sandbox.namespace.connection import encode
from etude.sandbox.namespace.sandbox import GRACE_SECONDS, LEARN_SECONDS, Backend, ImageKey, installed_runner, limits_of
from etude.sandbox.namespace.templates import Layer
from etude.sandbox.shell import Shell

USERS = range(10_000, 60_000)  # processes are counted by user, on some carriers over all boxes of a machine
_PREFIX = "/usr/local"


class CarriedBackend(Backend):
    """Made by `open_carried`."""

    def __init__(
        self,
        carrier: Carrier,
        capabilities: Capabilities,
        workers: int,
        memo: int,
        questions: bool,
    ) -> None:
        super().__init__(workers, memo, questions)
        self._carrier = carrier
        self._capabilities = capabilities
        self._users = count(secrets.randbelow(len(USERS)))
        self._packs: dict[Path | None, asyncio.Task[Packed]] = {}
        self._shells: weakref.WeakSet[Shell] = weakref.WeakSet()
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed

    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def shell(
        self,
        image: Image,
        layers: Mapping[str, bytes | None],
        limits: Limits,
        plain: bool = False,
        below: Sequence[Layer] = (),
    ) -> Shell:
        assert not below  # forks of machines are copies
        if image.door is not None or image.tools is not None:
            raise LaunchFailed(f"boxes of {self._carrier.name} cannot hold an outside agent")
        async with AsyncExitStack() as ends:
            connection = await self._machine((image.repository, image.site, None), {"kind": "live"}, limits, ends)
            shell = Shell(connection, None, None, ends.pop_all())
        self._shells.add(shell)
        try:
            await shell.start(limits_of(limits), layers, _PREFIX, {"PYTHONHASHSEED": "0"}, None)
        except BaseException:
            await shell.close()
            raise
        return shell

    async def _fork(
        self,
        key: ImageKey,
        files: Sequence[str],
        asked: Sequence[str],
        layers: Mapping[str, bytes | None],
        limits: Limits,
        sheet: AssertionSplit | None,
    ) -> tuple[dict[str, Any], bytes]:
        repository, site, hidden = key
        async with AsyncExitStack() as ends:
            guard = None
            if sheet is None and hidden is not None:
                guard = self._guards.setdefault(key, verdict.new_guard())
            connection = await self._runs((repository, site, hidden if sheet is None else None), guard, limits, ends)
            if sheet is not None:
                for path in (file.removeprefix(PREFIX) for file in files):
                    sources = {question.name: question.source for question in sheet.files[path].values()}
                    await connection.request({"learn": path}, json.dumps(sources).encode(), LEARN_SECONDS)
            head = {"files": [], "limits": limits_of(limits)}
            payload = encode({"tests": asked}, layers)
            reply, data = await connection.request(head, payload, limits.seconds + GRACE_SECONDS)
        self.stats.cpu_seconds += reply["cpu"]
        return reply, data

    async def _names(self, key: ImageKey, path: str) -> list[str]:
        async with AsyncExitStack() as ends:
            connection = await self._runs(key, None, Limits(), ends)
            _, body = await connection.request({"learn": path}, b"", LEARN_SECONDS)
        return json.loads(body)

    async def _runs(
        self, key: ImageKey, guard: verdict.SentinelTests | None, limits: Limits, ends: AsyncExitStack
    ) -> StreamConnection:
        hidden = None if key[2] is None else f"{RUN}/{secrets.token_hex(12)}"
        hello = {
            "kind": "runs",
            "hidden": hidden,
            "guard": None if guard is None else {"token": guard.token, "virtual": guard.virtual},
        }
        return await self._machine(key, hello, limits, ends)

    async def _machine(
        self, key: ImageKey, hello: dict[str, Any], limits: Limits, ends: AsyncExitStack
    ) -> StreamConnection:
        """A new machine that holds an image, and is greeted."""
        if self._closed:
            raise BoxDead("the sandbox is closed")
        runner = await self._packed(None)
        user = USERS[next(self._users) % len(USERS)]
        repository, site, hidden = key
        places = {WORKSPACE: (repository, user), SITE: (site, 0), hello.get("hidden"): (hidden, 0)}
        packs = [
            (at, owner, await self._packed(folder)) for at, (folder, owner) in places.items() if folder is not None
        ]
        files = runner.size + sum(packed.size for _, _, packed in packs)
        stream = await self._carrier.start(COMMAND, Need(limits, (files >> 20) + 1))
        ends.push_async_callback(stream.close)
        connection = StreamConnection(stream)
        ends.callback(connection.close)
        connection.boot(runner.data)
        for at, owner, packed in packs:
            connection.put({"at": at, "owner": owner}, packed.data)
        connection.put({"hello": hello | {"user": user}})
        await connection.started()
        return connection

    async def probe(self, without: Collection[str]) -> None:
        """Try a machine, and keep of the capabilities what holds there. Raises UserError if too little does."""
        limits = Limits(memory_mb=256, processes=16, disk_mb=16)
        try:
            async with AsyncExitStack() as ends:
                with tempfile.TemporaryDirectory(prefix="etude-probe-") as folder:
                    connection = await self._machine((Path(folder), None, None), {"kind": "probe"}, limits, ends)
                found, _ = await connection.request({"limits": limits_of(limits)}, b"", LEARN_SECONDS)
        except BoxError as e:
            raise UserError(f"{self._carrier.name} cannot make boxes here: {e}.") from None
        capabilities, held = self._capabilities, found["held"]
        tried = ("memory", "processes")
        kept = tuple(limit for limit in capabilities.limits if limit in held or limit not in tried)
        self._capabilities = replace(capabilities, limits=kept, seccomp="filter" in held)
        missing = {"memory", "processes", "disk"}.difference(kept, without)
        if not found["bash"]:
            raise UserError(f"the image of {self._carrier.name}'s boxes has no /bin/bash; use one that has.")
        if "network" not in held:
            raise UserError(f"boxes of {self._carrier.name} reach the network; something must keep them off it.")
        if not self._capabilities.seccomp:
            raise UserError(f"boxes of {self._carrier.name} cannot filter system calls; use another runtime.")
        if missing:
            raise UserError(
                f"boxes of {self._carrier.name} cannot limit {', '.join(sorted(missing))} here; "
                f"use another runtime, or name it in sandbox.without."
            )

    async def _packed(self, folder: Path | None) -> Packed:
        """A folder of an image, or (None) our own modules: packed once."""
        if folder not in self._packs:
            if folder is not None and not folder.is_dir():
                raise LaunchFailed(f"{folder} is not a folder")
            places = {"": folder.resolve()} if folder is not None else _paths(installed_runner())
            self._packs[folder] = asyncio.create_task(asyncio.to_thread(pack, places))
        return await asyncio.shield(self._packs[folder])

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(shell.close() for shell in list(self._shells)))


def _paths(places: Mapping[str, str]) -> dict[str, Path]:
    return {name: Path(path) for name, path in places.items()}


@asynccontextmanager
async def open_carried(
    carrier: Carrier,
    *,
    workers: int = 2,
    memo: int = 4096,
    questions: bool = True,
    personas: Like | None = (),
    egress: Egress | None = None,
    repeatable: bool = False,
    without: Sequence[str] = (),
) -> AsyncIterator[CarriedBackend]:
    """Like `namespace.open_sandbox`; `without` names limits that boxes may lack. All boxes are `repeatable`.

    Raises UserError for what is asked and the carrier cannot give.
    """
    capabilities = await carrier.open()
    if egress is not None:
        raise UserError(
            f"boxes of {carrier.name} have no way out; drop sandbox.egress and sandbox.index, or use the namespaces."
        )
    if personas:
        raise UserError(f"boxes of {carrier.name} cannot look like a given machine; drop rollout.personas.")
    sandbox = CarriedBackend(carrier, capabilities, workers, memo, questions)
    try:
        await sandbox.probe(frozenset(without))
        yield sandbox
    finally:
        await sandbox.close()
