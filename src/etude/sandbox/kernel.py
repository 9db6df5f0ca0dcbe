"""The requirements of boxes that can be checked without making a box: facts of a machine, and their consequences."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MINIMUM = (5, 12)  # recursive read-only mounts, overlays in user namespaces
_LINUX = "run etude on a Linux machine, or in a virtual machine with Linux"
_SWITCHES = {  # below /proc/sys; settings that forbid namespaces to users
    "user/max_user_namespaces": ("0", "no user may make namespaces: `sudo sysctl user.max_user_namespaces=10000`"),
    "kernel/unprivileged_userns_clone": (
        "0",
        "only root may make namespaces: `sudo sysctl kernel.unprivileged_userns_clone=1`",
    ),
    "kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "AppArmor keeps users from making namespaces, as in Ubuntu since 23.10: `sudo sysctl "
        "kernel.apparmor_restrict_unprivileged_userns=0`, or a profile for Python that allows userns",
    ),
}
_CONTAINERS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}


@dataclass(frozen=True)
class Host:
    """The facts of a machine. `container` names the container of this process; `filtered`: it has a system-call filter;
    `switches` are the kernel's settings by path below /proc/sys."""

    system: str = "Linux"
    release: str = "6.8.0"
    processor: str = "x86_64"
    root: bool = False
    bash: bool = True
    container: str = ""
    filtered: bool = False
    switches: Mapping[str, str] = field(default_factory=dict)

    @property
    def wsl(self) -> bool:
        """Whether this is the Windows Subsystem for Linux."""
        return "microsoft" in self.release.lower()


@dataclass(frozen=True)
class MachineCheck:
    """One property. `cure` names the consequence and the remedy of its lack; boxes need the `needed` ones."""

    name: str
    ok: bool
    detail: str
    cure: str = ""
    needed: bool = True


def read_host() -> Host:
    """The facts of this machine."""
    switches: dict[str, str] = {}
    for name in _SWITCHES:
        with contextlib.suppress(OSError):
            switches[name] = Path("/proc/sys", name).read_text().strip()
    status = ""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
    return Host(
        platform.system(),
        platform.release(),
        platform.machine(),
        os.geteuid() == 0,
        os.path.exists("/bin/bash"),
        next((name for path, name in _CONTAINERS.items() if os.path.exists(path)), ""),
        "Seccomp:\t2" in status,
        switches,
    )


def requirements(host: Host) -> list[MachineCheck]:
    """The checks of a machine that need no box."""
    if host.system != "Linux":
        return [MachineCheck("Linux", False, host.system, _elsewhere(host.system))]
    known = host.processor in ("x86_64", "aarch64")
    calls = "no boxes, since the system-call filter knows no other processors: use x86_64 or aarch64"
    checks = [
        MachineCheck("kernel", _version(host.release) >= MINIMUM, host.release, _newer(host)),
        MachineCheck("processor", known, host.processor, calls),
        MachineCheck("bash", host.bash, "/bin/bash", "no boxes without /bin/bash: install bash"),
    ]
    for name, (bad, cure) in _SWITCHES.items():
        if name in host.switches and not host.root:
            value = host.switches[name]
            checks.append(MachineCheck(name.rpartition("/")[2], value != bad, value, f"no boxes, since {cure}"))
    return checks


def _version(release: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.?(\d*)", release)
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def _elsewhere(system: str) -> str:
    match system:
        case "Darwin":
            return f"no boxes, since macOS has no Linux namespaces: {_LINUX} (Lima, UTM)"
        case "Windows":
            return "no boxes, since Windows has no Linux namespaces: install WSL 2 and run etude there"
    return f"no boxes, since they are Linux namespaces: {_LINUX}"


def _newer(host: Host) -> str:
    if host.wsl:
        wanted = "`wsl --set-version DISTRIBUTION 2`, then `wsl --update`, both in Windows"
        return f"no boxes, since this kernel of WSL is too old or none: {wanted}"
    return f"no boxes, since they need Linux {MINIMUM[0]}.{MINIMUM[1]} or later: update the kernel"


def cause(host: Host) -> str:
    """The cause of a box that could not be made, and the cure, as half a sentence."""
    for check in requirements(host):
        if not check.ok:
            return f"{check.name} is {check.detail}: {check.cure}"
    if host.container == "docker" or (host.filtered and not host.container):
        options = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
        return f"a container refuses what boxes are made of: start it with {options} --cap-add SYS_ADMIN"
    if host.container:
        return f"{host.container} refuses what boxes are made of: start the container with --privileged"
    return "the kernel, or what etude runs in, refuses namespaces or mounts: run etude outside of it"
