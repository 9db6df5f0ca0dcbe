"""Makes a live box look as its persona says: names, clocks, files of /etc and /proc, and a home folder."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from . import linux, root

FOLDER = f"{root.SHARED}/persona"
HOMES = f"{root.LAYER}/homes"


def prepare(persona: dict[str, Any]) -> None:
    """In the stem: what all boxes of an image have in common."""
    _clocks(persona["uptime"])
    os.mkdir(FOLDER)
    for target, text in _files(persona).items():
        with open(_source(target), "w") as file:
            file.write(text)
        if not target.startswith("/proc/"):  # which every box has its own of
            linux.bind(_source(target), target)


def settle(persona: dict[str, Any]) -> None:
    """In pid 1 of a live box, in its own namespaces, while it still holds capabilities there and can be looked at."""
    user = persona["user"]
    socket.sethostname(persona["host"])
    for target in ("/proc/cmdline", "/proc/cpuinfo"):
        if os.path.exists(_source(target)):
            linux.bind(_source(target), target)
    os.makedirs(f"{HOMES}/{user}")
    for name in persona["folders"]:
        os.mkdir(f"{HOMES}/{user}/{name}")
    for name, text in persona["files"].items():
        with open(f"{HOMES}/{user}/{name}", "w") as file:
            file.write(text)
    linux.mount(HOMES, "/home", None, linux.MS_BIND)
    linux.call_itself("/sbin/init", "systemd")


def _source(target: str) -> str:
    return f"{FOLDER}/{target.replace('/', '-')}"


def _clocks(uptime: float) -> None:
    """Processes forked from now on count time since a boot that was `uptime` seconds ago: see time_namespaces(7)."""
    linux.unshare(linux.NEWTIME)
    lines = []
    for name, clock in (("monotonic", time.CLOCK_MONOTONIC), ("boottime", time.CLOCK_BOOTTIME)):
        lines.append(f"{name} {int(uptime - time.clock_gettime(clock))} 0\n")
    with open("/proc/self/timens_offsets", "w") as file:
        file.write("".join(lines))


def _files(persona: dict[str, Any]) -> dict[str, str]:
    user, host = persona["user"], persona["host"]
    own = f"127.0.1.1 {host}\n" if persona["known_host"] else ""
    files = {
        "/etc/hostname": f"{host}\n",
        "/etc/hosts": f"127.0.0.1 localhost\n{own}::1 localhost ip6-localhost ip6-loopback\n",
        "/etc/machine-id": persona["machine_id"],
        "/etc/passwd": root.passwd(user, persona["accounts"]),
        "/etc/group": root.group(user),
        "/proc/cmdline": persona["kernel_line"],
    }
    if not persona["hypervisor"]:
        with open("/proc/cpuinfo") as file:
            files["/proc/cpuinfo"] = file.read().replace(" hypervisor", "")
    return files
