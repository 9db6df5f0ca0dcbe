"""Podman as it is installed here, with an image made of this machine's own programs: nothing is downloaded."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from etude.sandbox.backends.containers import Containers
from etude.sandbox.backends.host import Need
from etude.sandbox.backends.processes import ProcessStream

NAME = "localhost/etude-tests:host"
_PROGRAMS = (
    *("bash", "sh", "env", "python3", "cat", "cp", "echo", "false", "grep", "id", "kill", "ln", "ls", "mkdir", "pwd"),
    *("rm", "sleep", "stat", "touch", "true", "tty", "unshare"),
)
_FOLDERS = ("home/user", "opt/runner", "proc", "run", "site", "sys", "tmp", "var/tmp", "workspace")


def _ask(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@cache
def reason() -> str:
    """Why no container can be made here; "" if one can."""
    if os.geteuid() != 0 or shutil.which("podman") is None:
        return "containers are made by root, with podman"
    if not os.path.exists("/usr/bin/python3"):
        return "the image is made of /usr/bin/python3"
    if runtime() is None:
        return "podman has no runtime here that can start a container"
    return ""


@cache
def runtime() -> str | None:
    """The first runtime that can start a container: crun refuses hybrid control groups."""
    _make_image()
    for name in ("runc", "crun"):
        flags = ["--rm", "--network", "none", "--memory", "64m", "--ulimit", "nofile=1024:1024"]
        flags += ["--ulimit", "nproc=4096:4096"]
        command = ["podman", "--runtime", name, "run", *flags, NAME, "true"]
        if shutil.which(name) and not subprocess.run(command, capture_output=True, timeout=120).returncode:
            return name
    return None


def _make_image() -> None:
    """Import some programs, what they are linked with, and the standard library of /usr/bin/python3."""
    programs = {f"/usr/bin/{name}": os.path.realpath(f"/usr/bin/{name}") for name in _PROGRAMS}
    ask = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    library = Path(_ask("/usr/bin/python3", "-c", ask).strip())
    folders = [path for path in library.iterdir() if path.name not in ("dist-packages", "site-packages", "test")]
    words = _ask("ldd", *programs.values(), *map(str, library.glob("lib-dynload/*.so"))).split()
    files = {word: os.path.realpath(word) for word in words if word.startswith("/") and os.path.isfile(word)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
        for name in _FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
        for name, path in {**files, **programs}.items():
            where = name if name.startswith("/usr/") else f"/usr{name}"
            member = archive.gettarinfo(path, where)
            with open(path, "rb") as file:
                archive.addfile(member, file)
        for path in folders:
            archive.add(path, filter=lambda member: None if member.issym() or member.islnk() else member)
    subprocess.run(
        ["podman", "import", "-", NAME], input=buffer.getvalue(), check=True, capture_output=True, timeout=120
    )


class Podman(Containers):
    """Podman with that image; `names` are those of its containers so far."""

    def __init__(self) -> None:
        super().__init__("podman", NAME, runtime())
        self.names: list[str] = []

    async def start(self, command: Sequence[str], need: Need) -> ProcessStream:
        stream = await super().start(command, need)
        self.names.append(stream._end[-1])
        return stream


def host() -> Podman:
    """Skips the test where no container can be made."""
    if why := reason():
        pytest.skip(why)
    return Podman()


def left(names: Sequence[str]) -> set[str]:
    """Those of the containers that podman still knows, running or not."""
    return set(names) & set(_ask("podman", "ps", "--all", "--format", "{{.Names}}").split())
