"""What this machine gives to boxes: properties of the kernel, and probes run inside a real box."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.sandbox.base import BoxError, Image, Limits

if TYPE_CHECKING:
    from etude.sandbox.namespace.sandbox import NamespaceSandbox


@dataclass(frozen=True)
class MachineCheck:
    """One property. `cure` says what to do if it is missing; boxes can do without one that is not `needed`."""

    name: str
    ok: bool
    detail: str
    cure: str = ""
    needed: bool = True


MINIMUM = (5, 12)  # recursive read-only mounts, overlays in user namespaces
_SWITCHES = {
    "/proc/sys/user/max_user_namespaces": ("0", "set user.max_user_namespaces to 10000 with sysctl"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "set kernel.unprivileged_userns_clone to 1 with sysctl"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "set kernel.apparmor_restrict_unprivileged_userns to 0 with sysctl, or allow userns in a profile for Python",
    ),
}

# Each line runs in a box and must print nothing; the text before the colon names the property.
PROBES = {
    "no new namespaces": "unshare -Ur true 2>/dev/null && echo made one",
    "no mounts": "mount -t tmpfs none /tmp 2>/dev/null && echo mounted",
    "no capabilities": "grep -E 'Cap(Prm|Eff|Bnd)' /proc/self/status | grep -v 0000000000000000",
    "system calls are filtered": "grep -x 'Seccomp:.*2' /proc/self/status >/dev/null || echo no filter",
    "no new privileges": "grep -x 'NoNewPrivs:.*1' /proc/self/status >/dev/null || echo may gain some",
    "no devices of the host": "ls /dev/kmsg /dev/mem /dev/kvm /dev/fuse /dev/net/tun 2>/dev/null",
    "no files of the host": "ls -A /.host 2>/dev/null; ls -d /root/.ssh /etc/shadow 2>/dev/null",
    "kernel settings are read-only": "echo x 2>/dev/null > /proc/sys/kernel/core_pattern && echo written",
    "no other processes": "ls /proc | grep -E '^[0-9]+$' | wc -l | grep -E '[0-9]{2,}'",
    "no network": "grep -v -E 'lo:|face|Inter' /proc/net/dev",
    "init is out of reach": "cat /proc/1/environ /proc/1/maps 2>/dev/null; ls /proc/1/fd 2>/dev/null",
    "repository is writable": "touch note && rm note || echo read-only",
    "system is read-only": "touch /usr/x /etc/x /site/x 2>/dev/null && echo written",
    "terminal": "tty -s || echo none",
}


def machine() -> list[MachineCheck]:
    """What can be known without making a box."""
    if platform.system() != "Linux":
        cure = "use a Linux machine, or Linux in a container or virtual machine"
        return [MachineCheck("Linux", False, platform.system(), cure)]
    release = platform.release()
    version = tuple(int(part) for part in release.replace("-", ".").split(".")[:2])
    checks = [
        MachineCheck("kernel", version >= MINIMUM, release, f"use Linux {MINIMUM[0]}.{MINIMUM[1]} or later"),
        MachineCheck(
            "processor",
            platform.machine() in ("x86_64", "aarch64"),
            platform.machine(),
            "use an x86_64 or aarch64 machine; the system-call filter knows no other",
        ),
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


async def probe() -> list[MachineCheck]:
    """Make a box and look around in it. Raises UserError or BoxError."""
    from etude.sandbox.namespace.sandbox import open_sandbox

    checks = []
    with tempfile.TemporaryDirectory(prefix="etude-doctor-") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "module.py").write_text('def two():\n    """\n    >>> two()\n    2\n    """\n    return 2\n')
        image = Image(Path(folder), None, {})
        async with open_sandbox() as sandbox:
            capabilities = sandbox.capabilities()
            checks += [MachineCheck(name, True, str(value)) for name, value in asdict(capabilities).items()]
            checks.append(MachineCheck("limits", True, _limits(sandbox)))
            box = await sandbox.create(image, Limits())
            started = time.perf_counter()
            await box.exec("true", 20.0)
            checks.append(MachineCheck("live box", True, f"{(time.perf_counter() - started) * 1000:.0f} ms"))
            for name, line in PROBES.items():
                output = (await box.exec(line, 20.0)).output.strip()
                checks.append(MachineCheck(name, not output, output[:80] or "yes", "report this as a defect of etude"))
            await box.close()
            test = ("module.py::doctest:two",)
            await sandbox.run_tests(image, {}, test, None, Limits())
            started = time.perf_counter()
            change: dict[str, bytes | None] = {"module.py": (Path(folder) / "module.py").read_bytes() + b"\n"}
            report = await sandbox.run_tests(image, change, test, None, Limits())
            passed = report.outcomes[test[0]] == "passed"
            checks.append(
                MachineCheck("test run", passed, f"{(time.perf_counter() - started) * 1000:.0f} ms", "see above")
            )
    return checks


def _limits(sandbox: NamespaceSandbox) -> str:
    """What holds boxes to their limits."""
    if sandbox.groups is None:
        return "rlimits and a watchdog: there are no control groups for memory and pids that etude may write to"
    hierarchy = sandbox.groups.hierarchy
    return f"control groups {hierarchy.kind} ({', '.join(sorted(hierarchy.folders))}) and rlimits"


async def _backends() -> list[MachineCheck]:
    """Who else could make boxes. None of them is needed."""
    from etude.sandbox.backends.choose import reachable

    found = await reachable()
    return [
        MachineCheck(f"backend {name}", not why, why or "can be reached", needed=False) for name, why in found.items()
    ]


def show(as_json: bool) -> int:
    """Print what the machine gives; exit code 0 if boxes can be made here and hold, else 1."""
    checks = machine()
    if all(check.ok for check in checks):
        try:
            checks += asyncio.run(probe())
        except (UserError, BoxError) as e:
            checks.append(MachineCheck("boxes", False, str(e), cause()))
    checks += asyncio.run(_backends())
    ok = all(check.ok for check in checks if check.needed)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=1))
        return 0 if ok else 1
    for check in checks:
        mark = "ok  " if check.ok else "FAIL" if check.needed else "no  "
        print(f"{mark} {check.name:32} {check.detail}" + (f"\n     cure: {check.cure}" if mark == "FAIL" else ""))
    return 0 if ok else 1
