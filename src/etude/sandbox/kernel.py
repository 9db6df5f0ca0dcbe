"""What boxes need of the kernel, as far as it can be known without making a box."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

MINIMUM = (5, 12)  # recursive read-only mounts, overlays in user namespaces
_SWITCHES = {
    "/proc/sys/user/max_user_namespaces": ("0", "set user.max_user_namespaces to 10000 with sysctl"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "set kernel.unprivileged_userns_clone to 1 with sysctl"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "set kernel.apparmor_restrict_unprivileged_userns to 0 with sysctl, or allow userns in a profile for Python",
    ),
}


@dataclass(frozen=True)
class MachineCheck:
    """One property. `cure` says what to do if it is missing; boxes can do without one that is not `needed`."""

    name: str
    ok: bool
    detail: str
    cure: str = ""
    needed: bool = True


def machine() -> list[MachineCheck]:
    """What can be known without making a box."""
    if platform.system() != "Linux":
        cure = "use a Linux machine, or Linux in a container or virtual machine"
        return [MachineCheck("Linux", False, platform.system(), cure)]
    release = platform.release()
    version = tuple(int(part) for part in release.replace("-", ".").split(".")[:2])
    known = platform.machine() in ("x86_64", "aarch64")
    checks = [
        MachineCheck("kernel", version >= MINIMUM, release, f"use Linux {MINIMUM[0]}.{MINIMUM[1]} or later"),
        MachineCheck("processor", known, platform.machine(), "use x86_64 or aarch64; the call filter knows no other"),
        MachineCheck("bash", os.path.exists("/bin/bash"), "/bin/bash", "install bash"),
    ]
    if os.geteuid() != 0:
        for path, (bad, cure) in _SWITCHES.items():
            try:
                value = Path(path).read_text().strip()
            except OSError:
                continue
            checks.append(MachineCheck(path.rpartition("/")[2], value != bad, value, cure))
    return checks


def cause() -> str:
    """Why boxes can't be made here, and the cure, as half a sentence."""
    for check in machine():
        if not check.ok:
            return f"{check.name} is {check.detail}: {check.cure}"
    return "in a container, allow mount and unshare in its seccomp profile, or run it with SYS_ADMIN"
