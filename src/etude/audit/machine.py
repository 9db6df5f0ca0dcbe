"""The abilities of this machine: properties of the kernel, probes run inside a real box, the device, installed
extras."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from etude.code import EXTRAS, missing_packages, packages_of_extra
from etude.errors import UserError
from etude.grading import open_sandbox
from etude.sandbox import Backend, BoxError, Image, Limits, MachineCheck, read_host, requirements
from etude.sandbox.backends.choose import reachable
from etude.sandbox.namespace import NamespaceBackend

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


async def probe() -> list[MachineCheck]:
    """Properties of a real box that is made for the probe. Raises UserError or BoxError."""
    checks = []
    with tempfile.TemporaryDirectory(prefix="etude-doctor-") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "module.py").write_text('def two():\n    """\n    >>> two()\n    2\n    """\n    return 2\n')
        image = Image(Path(folder), None, {})
        async with open_sandbox() as sandbox:
            capabilities = sandbox.capabilities()
            checks += [
                MachineCheck(f"boxes: {name}", value is not False, _plain(value), needed=False)
                for name, value in asdict(capabilities).items()
            ]
            checks.append(MachineCheck("limits", True, _limits(sandbox.backend)))
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


def _plain(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _limits(backend: Backend) -> str:
    """The kernel features that enforce limits of boxes."""
    assert isinstance(backend, NamespaceBackend)
    if backend.groups is None:
        return "rlimits and a watchdog: there are no control groups for memory and pids that etude may write to"
    hierarchy = backend.groups.hierarchy
    return f"control groups {hierarchy.kind} ({', '.join(sorted(hierarchy.folders))}) and rlimits"


async def _backends() -> list[MachineCheck]:
    """Checks of the other backends; none of them is needed."""
    reasons = await reachable()
    return [
        MachineCheck(f"backend {name}", not reason, reason or "can be reached", needed=False)
        for name, reason in reasons.items()
    ]


@dataclass(frozen=True)
class GpuFacts:
    """`driver`: NVIDIA's is loaded; `torch`: version, "" if it is not installed; `built`: with CUDA; `name`: of the GPU
    that PyTorch found, "" if none."""

    driver: bool = False
    torch: str = ""
    built: bool = False
    name: str = ""


def read_gpu() -> GpuFacts:
    """The facts of this machine. PyTorch is imported only if there is a driver."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        installed = ""
    if not Path("/dev/nvidiactl").exists() or not installed:
        return GpuFacts(Path("/dev/nvidiactl").exists(), installed)
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return GpuFacts(True, installed, torch.backends.cuda.is_built(), name)


def device(gpu: GpuFacts) -> MachineCheck:
    """The check of the device that models run on."""
    if gpu.name:
        return MachineCheck("device", True, gpu.name, needed=False)
    slow = "models run on the CPU, which is enough for the bundled ones alone"
    if not gpu.driver:
        cure = f"{slow}: use a machine with an NVIDIA GPU and its driver"
        return MachineCheck("device", False, "no GPU", cure, needed=False)
    if not gpu.torch:
        return MachineCheck("device", False, "a GPU, but no PyTorch", "no model runs: see the extras", needed=False)
    if not gpu.built:
        cure = f"{slow}: install the CUDA build of PyTorch, as its installation page shows"
        return MachineCheck("device", False, f"a GPU, but PyTorch {gpu.torch} is a build for CPUs", cure, needed=False)
    cure = f"{slow}: update the driver, or give the container its GPU"
    return MachineCheck("device", False, f"a GPU that PyTorch {gpu.torch} cannot use", cure, needed=False)


def installed() -> list[MachineCheck]:
    """Checks of the extras; none of them is needed for boxes."""
    checks: list[MachineCheck] = []
    for name, purpose in EXTRAS.items():
        lacking = missing_packages(name)
        count = len(packages_of_extra(name))
        detail = f"{len(lacking)} of {count} packages are missing" if lacking else "installed"
        cure = f"{purpose} will not work: pip install 'etude[{name}]'" if lacking else ""
        checks.append(MachineCheck(f"extra {name}", not lacking, detail, cure, needed=False))
    return checks


def checks() -> list[MachineCheck]:
    """Every property: of the kernel, of a box if the kernel allows one, of the device, the extras, other backends."""
    results = requirements(read_host())
    if all(check.ok for check in results):
        try:
            results += asyncio.run(probe())
        except (UserError, BoxError) as e:
            results.append(MachineCheck("boxes", False, str(e)))
    return [*results, device(read_gpu()), *installed(), *asyncio.run(_backends())]
