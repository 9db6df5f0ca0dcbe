"""The lives of boxes: how long they take to make, how many fit, how fast they end.

Beside them stand the same program as a plain process, in bwrap, and in runc, where these are installed and work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from etude.grading.runner import TestRunner
from etude.sandbox.base import Box, Image, Limits

TOGETHER = 4  # lives at a time where their rate is measured
MANY = 500
ROUNDS = 4  # of measuring a rate: ours and that of plain processes in turn
MEMORY = 2.2  # MiB of a live box, at most
PYTHON = (sys._base_executable, "-c", "pass")


# What boxes may cost beside plain processes of the same run, in turn: (case, bound, whether the bound is the least).
BOUNDS = (("create-python/p50", 1.35, False), ("create-python/p95", 1.5, False), ("create-run-destroy", 0.75, True))


async def measure(sandbox: TestRunner, image: Image, count: int) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Rows and checks of `count` boxes one after another, as many again in parallel, and MANY at once."""
    await _life(sandbox, image)  # the process of the image starts
    made, plain = [], []
    for _ in range(count):
        box = await sandbox.create(image, Limits())
        made.append(await _timed(_python(box)))
        await box.close()
        plain.append(await _timed(_program([*PYTHON])))
    each = max(1, count // ROUNDS)
    rates = [
        (await _rate(lambda: _life(sandbox, image), each), await _rate(lambda: _program([*PYTHON]), each))
        for _ in range(ROUNDS)
    ]
    ours, others = (statistics.median(side) for side in zip(*rates, strict=True))
    rows = [
        _row("create-python/p50-ms", statistics.median(made), "ms", ""),
        _row("create-python/p95-ms", _p95(made), "ms", ""),
        _row("create-run-destroy/per-s", ours, "1/s", ""),
        _row("create-python/p50-ms plain", statistics.median(plain), "ms", "for comparison"),
        _row("create-python/p95-ms plain", _p95(plain), "ms", "for comparison"),
        _row("create-run-destroy/per-s plain", others, "1/s", "for comparison"),
    ]
    ratios = (statistics.median(made) / statistics.median(plain), _p95(made) / _p95(plain), ours / others)
    checks = {}
    for (case, bound, least), ratio in zip(BOUNDS, ratios, strict=True):
        side = ">=" if least else "<="
        rows.append(_row(f"{case} / plain", ratio, "x", f"target {side} {bound}"))
        checks[f"{case} / plain {side} {bound}"] = ratio >= bound if least else ratio <= bound
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as folder:
        for name, command in _others(Path(folder)).items():
            try:
                times = [await _timed(_program(command)) for _ in range(count)]
                rate = await _rate(lambda command=command: _program(command), count)
            except OSError as e:
                rows[0]["baseline"] += f"; {name} does not work here: {e}"
                continue
            rows.append(_row(f"create-python/p50-ms {name}", statistics.median(times), "ms", "for comparison"))
            rows.append(_row(f"create-python/p95-ms {name}", _p95(times), "ms", "for comparison"))
            rows.append(_row(f"create-run-destroy/per-s {name}", rate, "1/s", "for comparison"))
    many = await _many(sandbox, image)
    checks[f"live-{MANY}/mib-each <= {MEMORY}"] = many[0]["value"] <= MEMORY
    return rows + many, checks


async def _many(sandbox: TestRunner, image: Image) -> list[dict[str, Any]]:
    """Memory of live boxes, and the time until the last of their processes is gone."""
    assert sandbox.zygote_pid is not None
    zygote = sandbox.zygote_pid
    before, kernel, free = len(descendants(zygote)), _kernel_memory(), _memory("MemAvailable")
    boxes = [await sandbox.create(image, Limits()) for _ in range(MANY)]
    started = time.perf_counter()
    await asyncio.gather(*(box.exec("true", 60.0) for box in boxes))
    ready = (time.perf_counter() - started) * 1000 / MANY
    live = descendants(zygote)
    kernel = (_kernel_memory() - kernel) / MANY
    try:
        each = sum(_pss(pid) for pid in live) / MANY + kernel
        how = ""
    except PermissionError:  # pid 1 can't be looked at by an ordinary user
        each = (free - _memory("MemAvailable")) / MANY
        how = "by what is left of the machine's memory; "
    started = time.perf_counter()
    await asyncio.gather(*(box.close() for box in boxes))
    async with asyncio.timeout(60):
        while len(descendants(zygote)) > before:
            await asyncio.sleep(0.01)
    gone = (time.perf_counter() - started) * 1000
    parts = (
        f"target {MEMORY} MiB; {how}{(len(live) - before) / MANY:.1f} processes, {kernel:.2f} MiB of it the kernel's"
    )
    return [
        _row(f"live-{MANY}/mib-each", each, "MiB", parts),
        _row(f"live-{MANY}/ready-ms-each", ready, "ms", "from a value to a command that has run"),
        _row(f"destroy-{MANY}/ms", gone, "ms", "until the last process is gone"),
    ]


async def _life(sandbox: TestRunner, image: Image) -> None:
    box = await sandbox.create(image, Limits())
    await _python(box)
    await box.close()


async def _python(box: Box) -> None:
    done = await box.exec("python3 -c pass", 60.0)
    assert done.rc == 0, done.output


async def _program(command: list[str]) -> None:
    """Raises OSError if it fails."""
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    if process.returncode != 0:
        raise OSError(errors.decode(errors="replace").strip()[-120:] or f"exit code {process.returncode}")


def _others(folder: Path) -> dict[str, list[str]]:
    """The same program without a box of ours."""
    commands: dict[str, list[str]] = {}
    if (bwrap := shutil.which("bwrap")) is not None:
        commands["bwrap"] = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", *PYTHON]
    if (runc := shutil.which("runc")) is not None and os.geteuid() == 0:
        program = 'exec "$0" --root "$1/state" run --bundle "$1" "etude-bench-$$"'
        commands["runc"] = ["/bin/sh", "-c", program, runc, _bundle(runc, folder)]
    return commands


def _bundle(runc: str, folder: Path) -> str:
    """A container of runc's default with this machine's programs."""
    subprocess.run([runc, "spec"], cwd=folder, check=True, timeout=60)
    config = json.loads((folder / "config.json").read_text())
    config["process"] |= {"terminal": False, "args": [*PYTHON]}
    config["root"]["path"] = "root"
    for name in ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix):
        if Path(name).is_symlink():
            (folder / f"root{name}").parent.mkdir(parents=True, exist_ok=True)
            (folder / f"root{name}").symlink_to(os.readlink(name))
        elif Path(name).is_dir():
            (folder / f"root{name}").mkdir(parents=True, exist_ok=True)
            mount = {"destination": name, "source": name, "type": "none", "options": ["rbind", "ro"]}
            config["mounts"].append(mount)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


async def _timed(work: Awaitable[object]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1000


async def _rate(work: Callable[[], Awaitable[None]], count: int) -> float:
    """How often a second, TOGETHER at a time."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await work()

    return count / (await _timed(asyncio.gather(*(worker() for _ in range(TOGETHER))))) * 1000


def descendants(pid: int) -> list[int]:
    pids, pending = [], [pid]
    while pending:
        current = pending.pop()
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{current}/task/{current}/children").read_text().split()
            pending += map(int, children)
            pids += map(int, children)
    return pids


def _pss(pid: int) -> float:
    """Proportional memory of a process, MiB; none if it has ended. Raises PermissionError."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _kernel_memory() -> float:
    """MiB of the whole machine: what the kernel keeps for processes, mounts and namespaces, and files in memory."""
    return _memory("SUnreclaim", "KernelStack", "PageTables", "Percpu", "Shmem")


def _memory(*names: str) -> float:
    """Sum of these lines of /proc/meminfo, MiB."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    named = {words[0].rstrip(":"): int(words[1]) for words in lines}
    return sum(named[name] for name in names) / 1024


def _p95(values: list[float]) -> float:
    return sorted(values)[max(0, round(0.95 * len(values)) - 1)]


def _row(case: str, value: float, unit: str, baseline: str) -> dict[str, Any]:
    return {"case": case, "value": value, "unit": unit, "baseline": baseline}
