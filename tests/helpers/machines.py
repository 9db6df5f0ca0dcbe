"""Throwaway machines on this one, for remote hosts to start programs in: by `unshare`, as container engines do."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from etude.sandbox.backends.host import Need
from etude.sandbox.backends.processes import ProcessStream, attached
from etude.sandbox.base import Capabilities

_ROOT = """
mount --make-rprivate / && mount -t tmpfs t /mnt && mkdir /mnt/upper /mnt/work /mnt/root || exit 1
mount -t overlay o -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root && cd /mnt/root || exit 1
mount -t proc p proc && mount -t tmpfs -o mode=755 t dev && mount -t tmpfs t tmp && mkdir dev/pts dev/shm || exit 1
for n in null zero full random urandom tty; do : > dev/$n && mount --bind /dev/$n dev/$n; done
mount -t devpts -o newinstance,ptmxmode=0666 d dev/pts && ln -s pts/ptmx dev/ptmx && ln -s /proc/self/fd dev/fd
exec env PATH=/usr/sbin:/usr/bin:/bin chroot . "$@"
"""
MACHINE = (
    *("unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"),
    *("sh", "-c", _ROOT, "sh"),
)
needs_machines = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or not os.path.exists("/usr/bin/python3"),
    reason="machines for remote hosts are made by root, with unshare and /usr/bin/python3",
)


class Local:
    """A remote host whose machines are this one's, with a root file system and processes of their own."""

    name = "local"
    image_name = "this machine"
    python = platform.python_version()

    def __init__(self, *limits: str) -> None:
        self.capabilities = Capabilities("container", False, False, True, True, "none", limits=limits)
        self.needs: list[Need] = []
        self.streams: list[ProcessStream] = []

    async def reach(self) -> None:
        """It is always there."""

    async def open(self) -> Capabilities:
        return replace(self.capabilities)

    def system(self) -> dict[str, Path]:
        """The machines have this one's root."""
        return {}

    def close(self) -> None:
        """It has prepared nothing."""

    async def start(self, command: Sequence[str], need: Need) -> ProcessStream:
        self.needs.append(need)
        self.streams.append(await attached([*MACHINE, *command], ["true"]))
        return self.streams[-1]
