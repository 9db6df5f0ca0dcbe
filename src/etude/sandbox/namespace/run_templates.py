"""The owner's side of the processes that test runs are forked from: see `grading/guest/runs.py`."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from etude.sandbox.backend import (
    GRACE_SECONDS,
    LEARN_SECONDS,
    VERIFIER_SECONDS,
    ForkRequest,
    ForkResult,
    RunImage,
    VerifyRequest,
    VerifyResult,
)
from etude.sandbox.base import LaunchFailed, Limits
from etude.sandbox.cgroups import Groups
from etude.sandbox.connection import Connection, Reply, encode, limits_of, memory, new_process
from etude.sandbox.guest.root import WORKSPACE

KEPT = 24  # templates kept without a run, for the next run on their image
MODULE = "module:"  # as in grading/guest/runs.py
_COLD = b'{"cold": true}\n'  # a hot template's output where a change needs a fresh import


@dataclass
class _Experience:
    """The knowledge of one repository's templates: the needs of a file's tests, and the code of files by path.

    A template gets only the code of files that its task leaves unchanged.
    """

    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    code: dict[str, bytes] = field(default_factory=dict)


class _News(msgspec.Struct, frozen=True):
    """The knowledge and code that a template reports after its preparation for tests."""

    learned: dict[str, Any]
    code: dict[str, bytes]


class _TemplateConnection:
    """A started template."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.users = 0  # requests that wait for it
        self.warm: set[str] = set()  # files whose tests it is prepared for
        self.lock = asyncio.Lock()

    async def request(
        self,
        head: dict[str, Any],
        payload: bytes,
        limits: Limits,
        descriptors: Sequence[int],
        sent: Callable[[], None] = lambda: None,
    ) -> tuple[Reply, bytearray]:
        """A run in a fork; `sent` is called when the descriptors are no longer needed here. Raises BoxDead."""
        reply = asyncio.create_task(self.connection.request(head, payload, limits.seconds + GRACE_SECONDS, descriptors))
        await asyncio.sleep(0)  # the request is sent before the task waits
        sent()
        return await reply


def _result(reply: Reply, output: bytes | bytearray) -> ForkResult:
    return ForkResult(reply.status, reply.timed_out, reply.seconds, bytes(output), reply.cpu)


class RunTemplates:
    """The templates of each image: a hot one, which has imported the library, and a cold one.

    Each holds the tree of one task; the KEPT used last are kept.
    """

    def __init__(self, zygote: socket.socket, mounts: Mapping[str, str], services: Sequence[dict[str, Any]]) -> None:
        """`zygote`: the zygote's control socket; `mounts`: folders that boxes have besides their own, by place;
        `services` run in the boxes of tested code."""
        self._zygote = zygote
        self._services = list(services)
        self._mounts = dict(mounts)
        self._templates: OrderedDict[tuple[RunImage, bool], _TemplateConnection] = OrderedDict()
        self._experience: dict[RunImage, _Experience] = {}

    async def fork(self, request: ForkRequest, groups: Groups | None) -> ForkResult:
        """One run in a hot template, or, if a change needs a fresh import, in a cold one. Raises BoxDead."""
        payload = await asyncio.to_thread(
            encode, {"tests": request.tests, "services": self._services}, request.changes
        )  # it may hold megabytes
        limits = request.limits
        cpu_seconds = 0.0
        for hot in (True, False):
            async with self._template(request.image, hot, request.files) as template:
                with nullcontext() if groups is None else groups.lent(limits) as group:
                    descriptors = () if group is None else group.descriptors
                    head = {"limits": limits_of(limits), "groups": len(descriptors)}
                    reply, output = await template.request(head, payload, limits, descriptors)
            cpu_seconds += reply.cpu
            if output != _COLD:
                break
        return replace(_result(reply, output), cpu_seconds=cpu_seconds, cold=not hot)

    async def verify(self, request: VerifyRequest, groups: Groups | None) -> VerifyResult:
        """A run in two forks that share one socket: of a template of the hidden tests, and of one of the library."""
        ours, theirs = socket.socketpair()
        tests = asyncio.create_task(self._run_verifier(request, theirs))
        try:
            with ours:  # so that the verifier sees the end of the connection when the tested process ends
                tested = await self._run_tested(request, ours, groups)
            return VerifyResult(await tests, tested)
        finally:
            theirs.close()
            await asyncio.wait({tests}, timeout=VERIFIER_SECONDS)  # its connection has ended
            tests.cancel()

    async def _run_verifier(self, request: VerifyRequest, sock: socket.socket) -> ForkResult:
        limits = replace(request.limits, seconds=request.limits.seconds + VERIFIER_SECONDS)
        image = RunImage(request.hidden, request.image.site, None)
        with sock:  # so that the tested process sees the end of the connection when the verifier does not start
            async with self._template(image, False) as template:
                head = {"limits": limits_of(limits), "groups": 0, "socket": True}
                payload = encode(request.body, {})
                reply, output = await template.request(head, payload, limits, [sock.fileno()], sock.close)
        return _result(reply, output)

    async def _run_tested(self, request: VerifyRequest, sock: socket.socket, groups: Groups | None) -> ForkResult:
        payload = encode({"tests": [], "services": self._services}, request.changes)
        limits, cpu_seconds = request.limits, 0.0
        files = [MODULE + name for name in request.modules]
        for hot in (True, False):
            async with self._template(request.image, hot, files) as template:
                with nullcontext() if groups is None else groups.lent(limits) as group:
                    descriptors = () if group is None else group.descriptors
                    head = {"limits": limits_of(limits), "groups": len(descriptors), "socket": True}
                    reply, output = await template.request(head, payload, limits, [sock.fileno(), *descriptors])
            cpu_seconds += reply.cpu
            if output != _COLD:
                break
        return replace(_result(reply, output), cpu_seconds=cpu_seconds, cold=not hot)

    async def remember(self, image: RunImage, learned: bytes) -> None:
        """Compile and import the modules that a recording needed in a template of hidden tests."""
        async with self._template(image, False) as template:
            await template.connection.request({"learn": True}, learned, LEARN_SECONDS)

    @asynccontextmanager
    async def _template(
        self, image: RunImage, hot: bool, files: Sequence[str] = ()
    ) -> AsyncIterator[_TemplateConnection]:
        """A started template, prepared for tests of `files`, which stays while it is in use. Raises BoxDead or
        LaunchFailed."""
        place = image, hot
        template = self._templates.get(place)
        if template is None or template.connection.dead is not None:
            self._make_room()
            hidden, controls = image.hidden, None if image.hidden is None else image.controls
            target = f"/run/{secrets.token_hex(12)}"
            hello = {
                "live": False,
                "hot": hot,
                "repository": folder_of(image.repository),
                "site": None if image.site is None else folder_of(image.site),
                "mounts": self._mounts | ({} if hidden is None else {target: folder_of(hidden)}),
                "hidden": None if hidden is None else target,
                "controls": None if controls is None else asdict(controls),
            }
            with memory(encode({}, dict(image.changes))) as fd:
                template = self._templates[place] = _TemplateConnection(new_process(self._zygote, hello, [fd]))
        self._templates.move_to_end(place)
        template.users += 1
        try:
            await template.connection.started()
            await self._warm_up(template, image, files)
            yield template
        finally:
            template.users -= 1

    async def _warm_up(self, template: _TemplateConnection, image: RunImage, files: Sequence[str]) -> None:
        async with template.lock:
            new = [file for file in files if file not in template.warm]
            if not new:
                return
            known = self._experience.setdefault(replace(image, changes=()), _Experience())
            changed = {f"{WORKSPACE}/{path}" for path, _ in image.changes}
            code = {path: data for path, data in known.code.items() if path not in changed}
            learned = [known.files[file] for file in new] if all(file in known.files for file in new) else []
            payload = await asyncio.to_thread(encode, {"files": new, "learned": learned}, code)
            _, body = await template.connection.request({"warm": True}, payload, LEARN_SECONDS)
            news = msgspec.json.decode(body, type=_News)
            known.code |= {path: data for path, data in news.code.items() if path not in changed}
            if not template.warm and set(news.learned.get("loaded", ())) >= set(new):  # the first report of a template
                known.files |= dict.fromkeys(new, news.learned)
            template.warm.update(new)

    def _make_room(self) -> None:
        """End the templates that were not used for longest; busy ones are kept."""
        idle = [place for place, template in self._templates.items() if not template.users]
        for place in idle[: max(0, len(self._templates) - KEPT + 1)]:
            self._templates.pop(place).connection.close("the template has made room for others")

    def close(self, reason: str) -> None:
        """End all templates and their runs."""
        for template in self._templates.values():
            template.connection.close(reason)


def folder_of(path: Path) -> str:
    """A folder of the host, without links. Raises LaunchFailed if there is none."""
    if not path.is_dir():
        raise LaunchFailed(f"{path} is not a folder")
    return str(path.resolve())
