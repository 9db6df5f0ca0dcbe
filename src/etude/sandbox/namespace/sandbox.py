"""The Linux backend: boxes from namespaces, overlays, seccomp and resource limits, without Docker and without root.

`open_sandbox` starts the zygote (`guest/zygote.py`), in a process of its own that never holds a model. A test run is
one fork of a prepared process: see `guest/runs.py`. Runs are pure functions of image, changes and tests, so equal
ones are run once and remembered.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import socket
import sys
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3

from etude.errors import UserError
from etude.grading import javascript, verdict
from etude.grading.questions import AssertionSplit
from etude.sandbox import cgroups, machine_profile
from etude.sandbox.base import DOOR_PORT, TOOLS, BoxDead, Capabilities, Image, LaunchFailed, Limits, TestReport
from etude.sandbox.box import ValueBox
from etude.sandbox.cgroups import Groups
from etude.sandbox.doctor import cause
from etude.sandbox.egress.gate import Gate, Network
from etude.sandbox.egress.policy import Egress
from etude.sandbox.guest.answers import PREFIX
from etude.sandbox.guest.root import RUN
from etude.sandbox.namespace.connection import START_SECONDS, Connection, encode, memory
from etude.sandbox.namespace.templates import ImageTemplate, ImageTemplates, Layer
from etude.sandbox.shell import Shell

DIED = "the process that makes boxes has died"
BATCH = 200  # questions of one trial run: their answers (`guest/answers.py`) fit into its pipe
LEARN_SECONDS = 180.0
STARTING = 4  # live boxes at a time: more would only wait for each other
GRACE_SECONDS = 20.0  # beyond a run's own deadline, before the template is taken for dead
_PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
_HERE = Path(__file__).resolve().parent


ImageKey = tuple[Path, Path | None, Path | None]  # repository, site, hidden


@dataclass
class Stats:
    """Counts of test runs: asked for, answered from memory, and run."""

    hits: int = 0
    misses: int = 0
    cold: int = 0  # runs that could not use the imported library
    cpu_seconds: float = 0.0  # of the runs, their boxes included


class _TemplateConnection:
    """A started template, and the question files that it knows."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._known: dict[str, asyncio.Task[Any]] = {}

    async def teach(self, path: str, sheet: AssertionSplit) -> None:
        if path not in self._known:
            sources = {question.name: question.source for question in sheet.files[path].values()}
            request = self.connection.request({"learn": path}, json.dumps(sources).encode(), LEARN_SECONDS)
            self._known[path] = asyncio.create_task(request)
        await asyncio.shield(self._known[path])


class Backend(ABC):
    """What all backends share: boxes as values, test runs that are remembered, and questions.

    A backend adds live boxes (`shell`), forks of a pristine image (`_fork`, `_names`), and whether it is `alive`.
    """

    def __init__(self, workers: int, memo: int, questions: bool) -> None:
        self.stats = Stats()
        self._slots = asyncio.Semaphore(workers)  # wakes in order of arrival
        self._memo: OrderedDict[bytes, asyncio.Task[TestReport]] = OrderedDict()
        self._memo_size = memo
        self._questions = questions
        self._sheets: dict[ImageKey, tuple[AssertionSplit, asyncio.Lock]] = {}
        self._guards: dict[ImageKey, verdict.SentinelTests | None] = {}
        self.twins: dict[tuple[ImageKey, str], asyncio.Task[javascript.Twin | None]] = {}

    gated = False  # whether live boxes have a way out
    zygote_pid: int | None = None  # of the process that makes boxes, where there is one

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether boxes can be made; if not, every call raises BoxDead."""

    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    async def shell(
        self,
        image: Image,
        layers: Mapping[str, bytes | None],
        limits: Limits,
        plain: bool = False,
        below: Sequence[Layer] = (),
    ) -> Shell:
        """A live box on `image` with `layers` over it; a `plain` one is nobody's machine, and has no way out.

        `below` are frozen layers of a box of this image that this one was forked from, the newest first.
        """

    @abstractmethod
    async def _fork(
        self,
        key: ImageKey,
        files: Sequence[str],
        asked: Sequence[str],
        layers: Mapping[str, bytes | None],
        limits: Limits,
        sheet: AssertionSplit | None,
    ) -> tuple[dict[str, Any], bytes]:
        """One run of `asked` in a new box: how it ended, and what it wrote."""

    @abstractmethod
    async def _names(self, key: ImageKey, path: str) -> list[str]:
        """Ids of the tests in a file of the pristine image, by pytest."""

    async def create(self, image: Image, limits: Limits) -> ValueBox:
        return ValueBox(self, image, limits)

    async def run_tests(
        self,
        image: Image,
        changes: Mapping[str, bytes | None],
        tests: Sequence[str],
        hidden: Path | None,
        limits: Limits,
    ) -> TestReport:
        layers: dict[str, bytes | None] = {
            path: text.encode("utf-8", "surrogateescape") for path, text in image.changes.items()
        }
        layers |= changes
        if not self._memo_size:
            self.stats.misses += 1
            return await self._run(image, layers, tests, hidden, limits)
        key = _key(image, layers, tests, hidden, limits)
        task = self._memo.get(key)
        if task is None:
            self.stats.misses += 1
            task = asyncio.create_task(self._run(image, layers, tests, hidden, limits))
            self._memo[key] = task
            task.add_done_callback(lambda done: self._settle(key, done))
        else:
            self.stats.hits += 1
            self._memo.move_to_end(key)
        return await asyncio.shield(task)

    def _settle(self, key: bytes, task: asyncio.Task[TestReport]) -> None:
        """Keep only what is a function of its key: a deadline also depends on the machine's load."""
        if task.cancelled() or task.exception() is not None or task.result().timed_out:
            self._memo.pop(key, None)
        while len(self._memo) > self._memo_size:
            self._memo.popitem(last=False)

    async def _run(
        self,
        image: Image,
        layers: Mapping[str, bytes | None],
        tests: Sequence[str],
        hidden: Path | None,
        limits: Limits,
    ) -> TestReport:
        key = (image.repository, image.site, hidden)
        tests = tuple(dict.fromkeys(tests))
        if any(map(javascript.is_script, tests)):
            async with self._slots:
                return await javascript.run(self, image, layers, tests, hidden, limits)
        apart: list[str] = []
        if hidden is not None and self._questions:
            sheet = await self._sheet(key, hidden, tests)
            apart = [test for test in tests if test in sheet.rows]
        async with self._slots:
            if not apart:
                return await self._together(key, layers, tests, limits)
            first = await self._apart(key, sheet, layers, apart, limits)
            rest = tuple(test for test in tests if test not in sheet.rows)
            return verdict.joined(first, await self._together(key, layers, rest, limits), tests) if rest else first

    async def _together(
        self, key: ImageKey, layers: Mapping[str, bytes | None], tests: Sequence[str], limits: Limits
    ) -> TestReport:
        """Tests in the process of the tested code, guarded if they are hidden ones."""
        guard = self._guards.setdefault(key, None if key[2] is None else verdict.new_guard())
        questions = verdict.ask(tests, guard)
        reply, data = await self._fork(key, questions.files, questions.asked, layers, limits, None)
        return verdict.decide(questions, reply["status"], reply["timed_out"], reply["seconds"], data)

    async def _apart(
        self,
        key: ImageKey,
        sheet: AssertionSplit,
        layers: Mapping[str, bytes | None],
        tests: Sequence[str],
        limits: Limits,
    ) -> TestReport:
        """Tests as questions; their expected values stay here."""
        files = sorted({PREFIX + sheet.rows[test][0] for test in tests})
        reply, data = await self._fork(key, files, [sheet.id(test) for test in tests], layers, limits, sheet)
        return verdict.decide_apart(sheet, tests, reply["status"], reply["timed_out"], reply["seconds"], data)

    async def _sheet(self, key: ImageKey, hidden: Path, tests: Sequence[str]) -> AssertionSplit:
        """The questions in the files of `tests`: read here, named by pytest, tried on the pristine image."""
        if key not in self._sheets:
            self._sheets[key] = AssertionSplit(hidden), asyncio.Lock()
        sheet, lock = self._sheets[key]
        async with lock:
            for path in sorted({test.partition("::")[0] for test in tests if "::doctest:" not in test}):
                if path in sheet.files or not sheet.read(path):
                    continue
                try:
                    await self._try_questions(key, sheet, path)
                except BaseException:  # what was not tried to the end is tried again
                    sheet.forget(path)
                    raise
        return sheet

    async def _try_questions(self, key: ImageKey, sheet: AssertionSplit, path: str) -> None:
        sheet.match(path, await self._names(key, path))
        mine = [test for test, (file, _, _) in sheet.rows.items() if file == path]
        for start in range(0, len(mine), BATCH):
            batch = mine[start : start + BATCH]
            report = await self._apart(key, sheet, {}, batch, Limits(seconds=LEARN_SECONDS))
            sheet.keep(batch, report.outcomes)


class NamespaceSandbox(Backend):
    """A started zygote and the templates below it. Made by `open_sandbox`."""

    def __init__(
        self,
        control: socket.socket,
        zygote: asyncio.subprocess.Process,
        workers: int,
        memo: int,
        questions: bool,
        personas: machine_profile.Like | None,
        groups: Groups | None,
        network: Network | None,
        repeatable: bool,
    ) -> None:
        super().__init__(workers, memo, questions)
        self._control = control
        self._zygote = zygote
        self.zygote_pid = zygote.pid
        self._prefix = sys.base_prefix
        self._shells: weakref.WeakSet[Shell] = weakref.WeakSet()
        self._templates: dict[tuple[ImageKey, bool, bool], _TemplateConnection] = {}
        self._stems = ImageTemplates()
        self._starting = asyncio.Semaphore(STARTING)
        self._personas = personas
        self._repeatable = repeatable
        self.groups = groups
        self._network = network
        self.gated = network is not None
        self._live = 0  # boxes that were started

    @property
    def alive(self) -> bool:
        return self._zygote.returncode is None

    def capabilities(self) -> Capabilities:
        return Capabilities(
            isolation="namespace",
            rootless=os.geteuid() != 0,
            egress=True,
            pty=True,
            seccomp=True,
            cgroup="none" if self.groups is None else self.groups.hierarchy.kind,
            persona=True,
            door=True,
            limits=("memory", "processes", "disk", "files", *([] if self.groups is None else ["cpus"])),
        )

    async def _fork(
        self,
        key: ImageKey,
        files: Sequence[str],
        asked: Sequence[str],
        layers: Mapping[str, bytes | None],
        limits: Limits,
        sheet: AssertionSplit | None,
    ) -> tuple[dict[str, Any], bytes]:
        """One run in a hot template, or, if a change needs a fresh import, in a cold one."""
        payload = encode({"tests": asked}, layers)
        for hot in (True, False):
            template = await self._template(key, hot, sheet)
            if sheet is not None:
                for path in (file.removeprefix(PREFIX) for file in files):
                    await template.teach(path, sheet)
            with nullcontext() if self.groups is None else self.groups.lent(limits) as group:
                descriptors = () if group is None else group.descriptors
                head = {"files": list(files), "limits": limits_of(limits), "groups": len(descriptors)}
                reply, data = await template.connection.request(
                    head, payload, limits.seconds + GRACE_SECONDS, descriptors
                )
            self.stats.cpu_seconds += reply["cpu"]
            if data != verdict.COLD:
                break
            self.stats.cold += 1
        return reply, data

    async def _names(self, key: ImageKey, path: str) -> list[str]:
        template = await self._template(key, True, None)
        _, body = await template.connection.request({"learn": path}, b"", LEARN_SECONDS)
        return json.loads(body)

    async def _template(self, key: ImageKey, hot: bool, sheet: AssertionSplit | None) -> _TemplateConnection:
        """One for questions sees no hidden tests, and is none that the agent's own test runs use."""
        place = key, hot, sheet is not None
        template = self._templates.get(place)
        if template is None or template.connection.dead is not None:
            repository, site, hidden = key
            hidden = None if sheet is not None else hidden
            guard = None if hidden is None else self._guards.setdefault(key, verdict.new_guard())
            inside = f"/run/{secrets.token_hex(12)}"
            hello = {
                "live": False,
                "hot": hot,
                "repository": _folder(repository),
                "site": None if site is None else _folder(site),
                "mounts": {} if hidden is None else {inside: _folder(hidden)},
                "hidden": None if hidden is None else inside,
                "guard": None if guard is None else {"token": guard.token, "virtual": guard.virtual},
            }
            template = self._templates[place] = _TemplateConnection(self._handler(hello))
        await template.connection.started()
        return template

    async def shell(
        self,
        image: Image,
        layers: Mapping[str, bytes | None],
        limits: Limits,
        plain: bool = False,
        below: Sequence[Layer] = (),
    ) -> Shell:
        door = None if image.door is None else (f"{_door(image.door)}/{image.door.name}", DOOR_PORT)
        texts = image.changes if plain else {**image.decoys, **image.changes}
        shared = {path: text.encode("utf-8", "surrogateescape") for path, text in texts.items()} | image.history
        if not below and not shared.keys() <= layers.keys():  # not even the task's files are wanted
            shared = {}
        own = {path: data for path, data in layers.items() if path not in shared or data != shared[path]}
        stem = below[0].stem if below else self._stem(image, shared, plain)
        await stem.connection.started()
        self._live += 1
        network = None if plain else self._network
        async with self._starting, AsyncExitStack() as ends:
            descriptors: Sequence[int] = ()
            if self.groups is not None:
                group = self.groups.make(limits)
                descriptors = group.descriptors
                ends.push_async_callback(self.groups.remove, group)
            gate = None
            if network is not None:
                gate = Gate(network, self._live)
                ends.push_async_callback(gate.close)
            ours, theirs = socket.socketpair()
            with theirs:
                connection = Connection(ours)
                ends.callback(connection.close)
                stem.fork(theirs.fileno(), descriptors)
            shell = Shell(connection, stem, gate, ends.pop_all())
            self._shells.add(shell)
            try:
                variables = {} if network is None else dict(network.environment)
                if self._repeatable or stem.persona is None:
                    variables["PYTHONHASHSEED"] = "0"
                await shell.start(limits_of(limits), own, self._prefix, variables, door, below)
            except BaseException:
                await shell.close()
                raise
        return shell

    def _stem(self, image: Image, shared: Mapping[str, bytes], plain: bool) -> ImageTemplate:
        """The process that live boxes of an image are forked from, with their `shared` files."""
        folders = image.repository, image.site, image.tools, image.door
        digest = blake3.blake3(repr((folders, plain)).encode("utf-8", "surrogatepass"))
        for path, data in sorted(shared.items()):
            digest.update(b"\0%d %s\0" % (len(data), os.fsencode(path)))
            digest.update(data)
        key = digest.digest()

        def make() -> ImageTemplate:
            who = (
                None
                if self._personas is None or plain
                else machine_profile.draw(_digest(image.changes), self._personas)
            )
            hello = {
                "live": True,
                "repository": _folder(image.repository),
                "site": None if image.site is None else _folder(image.site),
                "mounts": {} if image.tools is None else {TOOLS: _folder(image.tools)},
                "door": image.door is not None,
            }
            if image.door is not None:
                hello["mounts"] |= {_door(image.door): _folder(image.door.parent)}
            with memory(encode({"persona": who and who.plain()}, shared)) as fd:
                return ImageTemplate(self._handler(hello, [fd], socket.SOCK_SEQPACKET), who)

        return self._stems.get(key, make)

    def _handler(
        self, hello: dict[str, Any], descriptors: Sequence[int] = (), kind: int = socket.SOCK_STREAM
    ) -> Connection:
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        try:
            socket.send_fds(self._control, [json.dumps(hello).encode()], [theirs.fileno(), *descriptors])
        except OSError:
            ours.close()
            raise BoxDead(DIED) from None
        finally:
            theirs.close()
        return Connection(ours)

    async def watch(self) -> None:
        """When the zygote dies, everything that waits for it fails at once."""
        await self._zygote.wait()
        for template in self._templates.values():
            template.connection.close(DIED)
        self._stems.close(DIED)
        for shell in list(self._shells):
            await shell.close()

    async def close(self) -> None:
        """End the zygote and everything below it."""
        for template in self._templates.values():
            template.connection.close()
        for shell in list(self._shells):
            await shell.close()
        self._stems.close("the sandbox is closed")
        # Before its connection is closed, when it ends by itself: asyncio complains of a process killed at that moment.
        if self._zygote.returncode is None:
            self._zygote.kill()
        await self._zygote.wait()
        self._control.close()
        if self.groups is not None:
            self.groups.close()
        if self._network is not None:
            await self._network.close()


def limits_of(limits: Limits) -> dict[str, float]:
    return {
        "memory": limits.memory_mb << 20,
        "addresses": (limits.addresses_mb or limits.memory_mb) << 20,
        "processes": limits.processes,
        "disk": limits.disk_mb << 20,
        "seconds": limits.seconds,
    }


def _door(socket: Path) -> str:
    """Where a box has the folder of that socket."""
    return f"{RUN}/{blake3.blake3(os.fsencode(socket)).hexdigest()[:24]}"


def _folder(path: Path) -> str:
    if not path.is_dir():
        raise LaunchFailed(f"{path} is not a folder")
    return str(path.resolve())


def _key(
    image: Image, layers: Mapping[str, bytes | None], tests: Sequence[str], hidden: Path | None, limits: Limits
) -> bytes:
    digest = blake3.blake3(repr((image.repository, image.site, hidden, limits, tuple(tests))).encode())
    for path in sorted(layers):
        data = layers[path]
        size = -1 if data is None else len(data)
        digest.update(b"%d %d " % (len(path.encode()), size) + path.encode() + (data or b""))
    return digest.digest()


def _digest(changes: Mapping[str, str]) -> bytes:
    """Of what makes one task differ from others, wherever its repository lies."""
    return blake3.blake3(repr(sorted(changes.items())).encode("utf-8", "surrogatepass")).digest()


def installed_runner() -> dict[str, str]:
    """Name below the runner folder -> where this installation has it."""
    places = {"guest": str(_HERE.parent / "guest")}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise UserError(f"{name} is not installed; install etude again with its dependencies.")
        origin = Path(spec.origin).resolve()
        if origin.name == "__init__.py":
            places[name] = str(origin.parent)
        else:
            places[origin.name] = str(origin)
    return places


async def _start_zygote(theirs: socket.socket, groups: Sequence[int]) -> asyncio.subprocess.Process:
    """The zygote, at the other end of a socket pair; it tries at once whether boxes can join `groups`."""
    config = json.dumps({"prefix": sys.base_prefix, "runner": installed_runner(), "groups": groups})
    start = f"import sys; sys.path.append({str(_HERE.parent)!r}); from guest.zygote import main; main()"
    environment = {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
    }
    flags = ["-S", "-s", "-P", "-B"]
    return await asyncio.create_subprocess_exec(
        sys._base_executable,
        *flags,
        "-c",
        start,
        str(theirs.fileno()),
        str(os.getpid()),
        config,
        pass_fds=[theirs.fileno(), *groups],
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        cwd="/",
    )


@asynccontextmanager
async def open_sandbox(
    *,
    workers: int = 2,
    memo: int = 4096,
    questions: bool = True,
    personas: machine_profile.Like | None = (),
    egress: Egress | None = None,
    repeatable: bool = False,
) -> AsyncIterator[NamespaceSandbox]:
    """A sandbox of `workers` test runs at a time that remembers `memo` results (0: runs every time).

    `questions=False` runs every hidden test in the process of the tested code, and `personas=None` leaves live boxes
    as they are: what attacks and the parity audit compare with. `personas` are probes of production machines, or a
    description of them, that live boxes are made to look like (`persona.py`); empty: the reference description.
    `egress` is what live boxes may reach; None: nothing. `repeatable` fixes the hashes of Python in live boxes, by a
    variable that gives them away; otherwise only boxes without a persona have it.

    Raises UserError where the machine lacks what boxes need.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    groups = cgroups.find()
    with theirs, nullcontext() if groups is None else groups.lent(Limits()) as trial:
        zygote = await _start_zygote(theirs, () if trial is None else trial.descriptors)
    network = None if egress is None else Network(egress)
    sandbox = NamespaceSandbox(ours, zygote, workers, memo, questions, personas, groups, network, repeatable)
    try:
        async with asyncio.timeout(START_SECONDS):
            answer = await asyncio.get_running_loop().sock_recv(ours, 65536)
        answer = json.loads(answer or b'{"error": "it died"}')
        if "error" in answer:
            raise UserError(f"boxes cannot be made here ({answer['error']}); {cause()}.")
        if groups is not None and not answer["joins"]:  # boxes may not enter groups that we may make
            groups.close()
            sandbox.groups = None
        watcher = asyncio.create_task(sandbox.watch())
        try:
            yield sandbox
        finally:
            watcher.cancel()
    finally:
        await sandbox.close()
