"""The Linux backend: boxes from namespaces, overlays, seccomp and resource limits, without Docker and without root.

`open_namespace` starts the zygote (`guest/zygote.py`), a process of its own that never holds a model. Live boxes and
test runs are forks of processes that the zygote has prepared for an image.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import blake3

from etude.sandbox import cgroups, machine_profile
from etude.sandbox.backend import (
    Backend,
    BackendOptions,
    ForkRequest,
    ForkResult,
    RunImage,
    VerifyRequest,
    VerifyResult,
)
from etude.sandbox.base import HOST_SOCKET_PORT, BoxError, Capabilities, Changes, Garbled, Image, LaunchFailed, Limits
from etude.sandbox.cgroups import Groups
from etude.sandbox.connection import DIED, Connection, encode, limits_of, memory, new_process
from etude.sandbox.egress.gate import Gate, Network
from etude.sandbox.guest.root import RUN
from etude.sandbox.images.store import RootImage
from etude.sandbox.namespace.image_templates import ImageTemplate, ImageTemplates
from etude.sandbox.namespace.run_templates import RunTemplates, folder_of
from etude.sandbox.namespace.zygote import Zygote
from etude.sandbox.shell import Shell

MEMORY_SHARE = 0.6  # of the machine, that all boxes may hold together where there are control groups
ROOM_MB = 256  # of free memory, below which no further box is made without control groups
ROOM_SECONDS = 30.0
TERMINAL_SECONDS = 30.0
# Its own number and that of its next process, then its environment.
_INTERACTIVE = r"""bash -ic '{ (printf "%s\0" $BASHPID); printf "%s\0" $BASHPID; exec env -0; } > seen'"""
STARTING = 4  # live boxes that start at a time: more would wait for each other


class NamespaceBackend(Backend):
    """A started zygote, the templates below it and the live boxes. Made by `open_namespace`."""

    def __init__(self, zygote: Zygote, image: RootImage, options: BackendOptions, groups: Groups | None) -> None:
        self.zygote = zygote
        self.image = image
        self.services = options.services
        self.zygote_pid = zygote.process.pid
        self.image_name = f"{image.name} {image.digest}"
        self.groups = groups
        self._machine_profiles = options.machine_profiles
        self._repeatable = options.repeatable
        self._network = None if options.egress is None else Network(options.egress)
        self.gated = self._network is not None
        self._runs = RunTemplates(zygote.control, _layered(image), self.services)
        self._templates = ImageTemplates()
        self._shells: weakref.WeakSet[Shell] = weakref.WeakSet()
        self._starting = asyncio.Semaphore(STARTING)
        self._started = 0  # live boxes so far
        self._terminal = machine_profile.ImageTerminal()

    @property
    def alive(self) -> bool:
        """Whether the zygote runs."""
        return self.zygote.alive

    def capabilities(self) -> Capabilities:
        """The abilities of boxes; only the limits depend on the machine."""
        return Capabilities(
            isolation="namespace",
            rootless=os.geteuid() != 0,
            egress=True,
            pty=True,
            seccomp=True,
            cgroup="none" if self.groups is None else self.groups.hierarchy.kind,
            machine_profile=True,
            host_socket=True,
            limits=("memory", "processes", "disk", "files", *([] if self.groups is None else ["cpus"])),
        )

    def system_folders(self) -> Mapping[str, Path]:
        """The image, and the modules that run tests."""
        return {"/": self.image.folder, **self.zygote.runner}

    async def fork(self, request: ForkRequest) -> ForkResult:
        """Run tests in a fork of a process that holds the image."""
        await self._room()
        return await self._runs.fork(request, self.groups)

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Run hidden tests in a fork of a process that holds them, on a library in a fork of its own template."""
        return await self._runs.verify(request, self.groups)

    async def remember(self, image: RunImage, learned: bytes) -> None:
        """Keep the modules that a recording needed."""
        await self._runs.remember(image, learned)

    async def shell(self, image: Image, layers: Changes, limits: Limits, *, bare: bool = False) -> Shell:
        """A live box: a fork of its image's template."""
        texts = image.changes if bare else {**image.decoys, **image.changes}
        shared = {path: text.encode("utf-8", "surrogateescape") for path, text in texts.items()}
        shared |= image.history
        if not shared.keys() <= layers.keys():  # the box leaves out files of the task
            shared = {}
        own = {path: data for path, data in layers.items() if path not in shared or data != shared[path]}
        template = self._template(image, shared, bare)
        await template.connection.started()
        await self._room()
        self._started += 1
        network = None if bare else self._network
        async with self._starting, AsyncExitStack() as ends:
            ends.enter_context(nullcontext(template))  # it lives as long as the box
            descriptors: Sequence[int] = ()
            if self.groups is not None:
                group = self.groups.make(limits)
                descriptors = group.descriptors
                ends.push_async_callback(self.groups.remove, group)
            gate = None
            if network is not None:
                gate = Gate(network, self._started)
                ends.push_async_callback(gate.close)
            ours, theirs = socket.socketpair()
            with theirs:
                connection = Connection(ours, Garbled)
                ends.callback(connection.close)
                template.fork(theirs.fileno(), descriptors)
            shell = Shell(connection, template.machine_profile, gate, ends.pop_all())
            self._shells.add(shell)
            way, variables = image.host_socket, {} if network is None else dict(network.environment)
            host_socket = None if way is None else (f"{_socket_folder(way)}/{way.name}", HOST_SOCKET_PORT)
            if self._repeatable or template.machine_profile is None:
                variables["PYTHONHASHSEED"] = "0"
            variables = {**self.image.environment, **variables, **image.environment}
            try:
                look = self.image.path, variables, host_socket, image.places, self.image.user
                await shell.start(limits_of(limits) | self._bounds(template.machine_profile), own, *look)
                await shell.start_services(self.services, {"PATH": self.image.path, **variables})
            except BaseException:
                await shell.close()
                raise
        return shell

    def _bounds(self, profile: machine_profile.MachineProfile | None) -> dict[str, Any]:
        """The bounds that a box shows beside its limits: see `guest/box.py`, `confine`."""
        if profile is None or not profile.contained:
            return {}
        return {"contained": "alone" if self.groups is None else "grouped", "roots": os.geteuid() == 0}

    async def _room(self) -> None:
        """Wait for memory where no control group holds all boxes together. Raises LaunchFailed."""
        deadline = time.monotonic() + ROOM_SECONDS
        while self.groups is None and cgroups.available_memory() < ROOM_MB << 20:
            if time.monotonic() > deadline:
                raise LaunchFailed(
                    f"this machine has had less than {ROOM_MB} MB of free memory for {ROOM_SECONDS:.0f} s"
                )
            await asyncio.sleep(0.5)

    def _template(self, image: Image, shared: Mapping[str, bytes], bare: bool) -> ImageTemplate:
        """The process that live boxes of an image are forked from, with their `shared` files."""
        folders = image.repository, image.site, sorted(image.mounts.items()), sorted(image.places), image.host_socket
        digest = blake3.blake3(repr((folders, bare)).encode("utf-8", "surrogatepass"))
        for path, data in sorted(shared.items()):
            digest.update(b"\0%d %s\0" % (len(data), os.fsencode(path)))
            digest.update(data)
        return self._templates.get(digest.digest(), lambda: self._make_template(image, shared, bare))

    def _make_template(self, image: Image, shared: Mapping[str, bytes], bare: bool) -> ImageTemplate:
        profile = None
        if self._machine_profiles is not None and not bare:
            task = repr(sorted(image.changes.items())).encode("utf-8", "surrogatepass")  # wherever its repository lies
            seed = blake3.blake3(task).digest()
            if isinstance(self._machine_profiles, str):
                profile = machine_profile.container(seed, self.image.user, self._terminal)
            else:
                profile = machine_profile.draw(seed, self._machine_profiles)
        hello: dict[str, Any] = {
            "live": True,
            "repository": folder_of(image.repository),
            "site": None if image.site is None else folder_of(image.site),
            "mounts": _layered(self.image) | {target: folder_of(folder) for target, folder in image.mounts.items()},
            "places": list(image.places),
            "host_socket": image.host_socket is not None,
            "contained": profile is not None and profile.contained,
        }
        home = f"/home/{self.image.user}"
        place = f"{self.image.folder.resolve()}{home}"
        # Not by a link of the image, which would lead through this machine's files.
        own = os.path.isdir(place) and os.path.realpath(place) == place
        if profile is not None and profile.contained and own:
            hello["mounts"] |= {home: place}
        if image.host_socket is not None:
            hello["mounts"] |= {_socket_folder(image.host_socket): folder_of(image.host_socket.parent)}
        with memory(encode({"machine_profile": profile and asdict(profile)}, shared)) as fd:
            return ImageTemplate(new_process(self.zygote.control, hello, [fd], socket.SOCK_SEQPACKET), profile)

    async def learn_terminal(self) -> None:
        """See what an interactive shell finds in the image, where boxes look like containers of it. A shell that does
        not answer leaves the variables of the image."""
        if self._machine_profiles != "image":
            return
        with tempfile.TemporaryDirectory(prefix="etude-terminal-") as folder:
            os.chmod(folder, 0o755)
            shell = await self.shell(Image(Path(folder), None, {}), {}, Limits())
            try:
                await shell.exec(_INTERACTIVE, TERMINAL_SECONDS)
                text = (await shell.read("seen", 1 << 20)).decode("utf-8", "replace")
                self._terminal = machine_profile.ImageTerminal.read(text)
            except (BoxError, ValueError):
                return
            finally:
                await shell.close()

    async def watch(self) -> None:
        """Wait for the end of the zygote; then all waiting requests fail at once."""
        await self.zygote.process.wait()
        await self._end_boxes(DIED)

    async def close(self) -> None:
        """End the zygote and everything below it."""
        await self._end_boxes("the sandbox is closed")
        await self.zygote.close()
        if self.groups is not None:
            self.groups.close()
        if self._network is not None:
            await self._network.close()

    async def _end_boxes(self, reason: str) -> None:
        self._runs.close(reason)
        self._templates.close(reason)
        for shell in list(self._shells):
            await shell.close()


def _layered(image: RootImage) -> dict[str, str]:
    """Folders of the image that the user of a box owns: place in a box -> folder of this machine."""
    return {place: f"{image.folder.resolve()}{place}" for place in image.writable}


def _socket_folder(path: Path) -> str:
    """The folder of a host socket inside a box."""
    return f"{RUN}/{blake3.blake3(os.fsencode(path)).hexdigest()[:24]}"


@asynccontextmanager
async def open_namespace(image: RootImage, options: BackendOptions) -> AsyncIterator[NamespaceBackend]:
    """Start the backend, and end it with all its boxes. Raises UserError where the machine lacks a requirement."""
    groups = cgroups.find(MEMORY_SHARE)
    with nullcontext() if groups is None else groups.lent(Limits()) as trial:
        zygote = await Zygote.start(
            image, () if trial is None else trial.descriptors, options.runs, roots=options.machine_profiles == "image"
        )
    backend = NamespaceBackend(zygote, image, options, groups)
    try:
        backend.python, joins = await zygote.started()
        if groups is not None and not joins:  # boxes may not enter groups that this process may make
            groups.close()
            backend.groups = None
        watcher = asyncio.create_task(backend.watch())
        try:
            await backend.check_services()
            await backend.learn_terminal()
            yield backend
        finally:
            watcher.cancel()
    finally:
        await backend.close()
