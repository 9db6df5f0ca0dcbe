"""The owner's side of the zygote (`guest/zygote.py`): the process that all boxes of a sandbox descend from."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from etude.errors import UserError
from etude.sandbox.backend import RunServer
from etude.sandbox.connection import START_SECONDS
from etude.sandbox.guest import root
from etude.sandbox.images.store import RootImage
from etude.sandbox.kernel import cause, read_host

_PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
_INTERPRETER: str = sys._base_executable  # type: ignore[attr-defined]  # outside of any virtual environment
GUEST = "guest"
"""The name that this program's package has in boxes."""
_PROGRAM = Path(__file__).resolve().parents[2]


def module_of(runs: RunServer, name: str) -> str:
    """The name of a module that serves test runs, in boxes."""
    return f"{GUEST}.{runs.package}.{name}"


def installed_runner(runs: RunServer) -> dict[str, str]:
    """Name below the runner folder of a box -> path of the file or folder in this installation. Raises UserError."""
    places = {
        f"{GUEST}/sandbox/guest": str(_PROGRAM / "sandbox/guest"),
        f"{GUEST}/{runs.package.replace('.', '/')}": str(runs.folder.resolve()),
    }
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


class _Start(msgspec.Struct, frozen=True):
    """The first message of a zygote: it has started, or could not."""

    joins: bool = False
    python: str = ""  # the version of the image's Python
    error: str = ""
    old: str = ""  # the version of the image's Python, if it is too old


class Zygote:
    """A started zygote and its control socket. Made by `start`."""

    def __init__(self, control: socket.socket, process: asyncio.subprocess.Process, runner: Mapping[str, str]) -> None:
        """`runner`: path in every box -> path on this machine, of the modules that run tests."""
        self.control = control
        self.process = process
        self.runner = {f"{root.RUNNER}/{name}": Path(place) for name, place in runner.items()}

    @classmethod
    async def start(cls, image: RootImage, groups: Sequence[int], runs: RunServer, *, roots: bool = False) -> Zygote:
        """Start the process on an image. It tries at once whether boxes can join `groups`, descriptors of control
        groups. roots: files of the image's root can show as such in boxes, which takes real root."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            return cls(ours, await _start_process(theirs, image, groups, runs, roots), installed_runner(runs))

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.returncode is None

    async def started(self) -> tuple[str, bool]:
        """Wait until boxes can be made. Returns the version of the image's Python, such as "3.13.5", and whether boxes
        can join the control groups. Raises UserError."""
        async with asyncio.timeout(START_SECONDS):
            data = await asyncio.get_running_loop().sock_recv(self.control, 65536)
        answer = msgspec.json.decode(data or b'{"error": "it died"}', type=_Start)
        if answer.old:
            raise UserError(f"python3 of the image is {answer.old}; boxes need 3.11 or later.")
        if answer.error:
            raise UserError(f"boxes cannot be made here ({answer.error}); {cause(read_host())}.")
        return answer.python, answer.joins

    async def close(self) -> None:
        """End the process, and with it everything below."""
        # Before its connection is closed, when it ends by itself: asyncio complains of a process killed at that moment.
        if self.alive:
            self.process.kill()
        await self.process.wait()
        self.control.close()


async def _start_process(
    theirs: socket.socket, image: RootImage, groups: Sequence[int], runs: RunServer, roots: bool
) -> asyncio.subprocess.Process:
    config = json.dumps(
        {
            "image": {
                "folder": str(image.folder.resolve()),
                "python": image.python,
                "writable": image.writable,
                "user": image.user,
                "roots": roots and os.geteuid() == 0,
            },
            "environment": {
                **image.environment,
                "PATH": image.path,
                "HOME": "/tmp",
                "LANG": "C.UTF-8",
                "PYTHONHASHSEED": "0",
            },
            "runner": installed_runner(runs),
            "groups": groups,
            "runs": module_of(runs, "runs"),
        }
    )
    # The guest's packages are empty here: etude's own would import etude.
    packages = {GUEST: str(_PROGRAM), f"{GUEST}.sandbox": str(_PROGRAM / "sandbox")}
    start = (
        f"import sys, types\nfor name, path in {packages!r}.items():\n"
        "    package = sys.modules[name] = types.ModuleType(name); package.__path__ = [path]\n"
        f"from {GUEST}.sandbox.guest.launch import main; main()"
    )
    argv = [start, str(theirs.fileno()), str(os.getpid()), config]
    command = [_INTERPRETER, "-S", "-s", "-P", "-B", "-c", *argv]
    null, passed = asyncio.subprocess.DEVNULL, [theirs.fileno(), *groups]
    # In a session of its own, where Ctrl-C of the owner's terminal does not reach it: the owner ends it.
    return await asyncio.create_subprocess_exec(
        *command, pass_fds=passed, env={}, stdin=null, stdout=null, cwd="/", start_new_session=True
    )
