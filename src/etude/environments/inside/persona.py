"""Makes a live box look as its persona says: names, clocks, files of /etc and /proc, and a home folder."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from . import linux, root

FOLDER = f"{root.LAYER}/persona"
HOMES = f"{root.LAYER}/homes"


def settle(persona: dict[str, Any]) -> None:
    """In pid 1 of a live box, in its own namespaces, while it still holds capabilities there and can be looked at."""
    user = persona["user"]
    socket.sethostname(persona["host"])
    _clocks(persona["uptime"])
    os.mkdir(FOLDER)
    linux.mount("tmpfs", FOLDER, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=1m")
    for target, text in _files(persona).items():
        source = f"{FOLDER}/{target.replace('/', '-')}"
        with open(source, "w") as file:
            file.write(text)
        linux.bind(source, target)
    linux.set_attributes(FOLDER, linux.MS_RDONLY, tree=False)
    os.makedirs(f"{HOMES}/{user}")
    for name in persona["folders"]:
        os.mkdir(f"{HOMES}/{user}/{name}")
    for name, text in persona["files"].items():
        with open(f"{HOMES}/{user}/{name}", "w") as file:
            file.write(text)
    linux.mount(HOMES, "/home", None, linux.MS_BIND)
    linux.call_itself("/sbin/init", "systemd")


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
