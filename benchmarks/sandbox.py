"""Boxes and test runs: how long they take, and how much processor time.

A library of 40 functions is made, one function is broken, and its tests are run with memory off.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from etude.environments.base import Image, Limits
from etude.environments.namespace import NamespaceSandbox, open_sandbox

FUNCTION = '''

def f{i}(items, size):
    """
    >>> f{i}([1, 2, 3], 2)
    [[1, 2], [3]]
    """
    return [items[i : i + size] for i in range(0, len(items), size)]
'''
ROWS = [(list(range(n)), n, [list(range(n))]) for n in range(1, 8)]
TESTS = f"""
import pytest
from library import code


@pytest.mark.parametrize("items,size,expected", {ROWS})
def test_f(items, size, expected):
    assert code.f3(items, size) == expected
"""


def run(quick: bool) -> dict[str, Any]:
    """Rows of (case, value, unit, baseline)."""
    return asyncio.run(_run(20 if quick else 200))


async def _run(count: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        image, code = _library(root)
        async with open_sandbox(memo=0) as sandbox, open_sandbox(memo=0, questions=False) as together:
            tests = [f"test_code.py::test_f[items{i}-{i + 1}-expected{i}]" for i in range(7)]
            head, mark, tail = code.partition("def f3(")
            broken = head + mark + tail.replace("range(0, len(items), size)", "range(1, len(items), size)", 1)
            cold = f"{code}\nLAST = 1\n"
            for name, text, wanted, hidden in (
                ("graded run, 7 tests, one function changed", broken, tests, root / "hidden"),
                ("graded run, 7 tests, fresh import", cold, tests, root / "hidden"),
                ("visible run, 1 doctest", broken, ["src/library/code.py::doctest:f3"], None),
            ):
                rows += await _time_runs(sandbox, image, name, text, wanted, hidden, count)
            name = "graded run, 7 tests, in the process of the tested code"
            rows += await _time_runs(together, image, name, broken, tests, root / "hidden", count)
            change: dict[str, bytes | None] = {"src/library/code.py": broken.encode()}
            report = await sandbox.run_tests(image, change, tests, root / "hidden", Limits())
            failed = report.outcomes[tests[0]] == "failed" and not report.tampered
            apart = report.apart == len(tests)
            rows += await _time_boxes(sandbox, image, max(6, count // 4), 50 if count < 100 else 500)
    checks = {"the broken function fails": failed, "no expected value entered a box": apart}
    return {"bench": "sandbox", "rows": rows, "checks": checks}


def _library(root: Path) -> tuple[Image, str]:
    code = '"""Forty functions."""\n' + "".join(FUNCTION.format(i=i) for i in range(40))
    files = {
        "repository/src/library/__init__.py": "",
        "repository/src/library/code.py": code,
        "hidden/test_code.py": TESTS,
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Image(root / "repository", None, {}), code


async def _time_runs(
    sandbox: NamespaceSandbox, image: Image, name: str, text: str, tests: list[str], hidden: Path | None, count: int
) -> list[dict[str, Any]]:
    change: dict[str, bytes | None] = {"src/library/code.py": text.encode()}
    for _ in range(3):  # templates start and learn
        await sandbox.run_tests(image, change, tests, hidden, Limits())
    seconds = []
    cpu = sandbox.stats.cpu_seconds
    for _ in range(count):
        started = time.perf_counter()
        await sandbox.run_tests(image, change, tests, hidden, Limits())
        seconds.append(time.perf_counter() - started)
    cpu = (sandbox.stats.cpu_seconds - cpu) / count
    return [
        {"case": name, "value": statistics.median(seconds) * 1000, "unit": "ms", "baseline": ""},
        {"case": f"{name}: processor", "value": cpu * 1000, "unit": "ms", "baseline": "target 25 ms"},
    ]


async def _time_boxes(sandbox: NamespaceSandbox, image: Image, count: int, many: int) -> list[dict[str, Any]]:
    """The life of boxes: `count` one after another, `many` at once."""
    made = [await _timed(_life(sandbox, image)) for _ in range(count)]
    started = time.perf_counter()
    for _ in range(0, count, 2):
        await asyncio.gather(_life(sandbox, image), _life(sandbox, image))
    each = (time.perf_counter() - started) / (2 * len(range(0, count, 2)))
    plain = [_plain([]) for _ in range(count)]
    rows = [
        _row("create-python/p50-ms", statistics.median(made), "ms", ""),
        _row("create-python/p95-ms", _p95(made), "ms", ""),
        _row("create-run-destroy/per-s", 1 / each, "1/s", ""),
        _row("create-python/p50-ms plain", statistics.median(plain), "ms", "plain subprocess, no box"),
        _row("create-run-destroy/per-s plain", 1000 / statistics.mean(plain), "1/s", "plain subprocess, no box"),
    ]
    if (bwrap := shutil.which("bwrap")) is not None:
        box = [_plain([bwrap, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc"]) for _ in range(count)]
        rows.append(_row("create-python/p50-ms bwrap", statistics.median(box), "ms", "bwrap, all namespaces"))
    return rows + await _time_many(sandbox, image, many) + await _time_forks(sandbox, image)


async def _time_many(sandbox: NamespaceSandbox, image: Image, many: int) -> list[dict[str, Any]]:
    """Memory of live boxes, and the time until the last of their processes is gone."""
    before = len(_descendants(sandbox.zygote_pid))
    boxes = [await sandbox.create(image, Limits()) for _ in range(many)]
    for box in boxes:
        await box.exec("true", 60.0)
    live = _descendants(sandbox.zygote_pid)
    memory = sum(_pss(pid) for pid in live) / many
    started = time.perf_counter()
    for box in boxes:
        await box.close()
    async with asyncio.timeout(60):
        while len(_descendants(sandbox.zygote_pid)) > before:
            await asyncio.sleep(0.01)
    gone = (time.perf_counter() - started) * 1000
    return [
        _row(f"live-{many}/mib-each", memory, "MiB", f"target 2 MiB; {(len(live) - before) / many:.1f} processes each"),
        _row(f"destroy-{many}/ms", gone, "ms", "target 1000 ms"),
    ]


async def _time_forks(sandbox: NamespaceSandbox, image: Image) -> list[dict[str, Any]]:
    box = await sandbox.create(image, Limits(disk_mb=128))
    await box.exec("for i in 0 1 2 3 4 5 6; do head -c 7M /dev/urandom > big$i; done", 60.0)
    seconds = [await _timed(box.fork(1)) for _ in range(5)]
    await box.close()
    return [_row("fork-50mb/ms", statistics.median(seconds), "ms", "target 5 ms")]


async def _life(sandbox: NamespaceSandbox, image: Image) -> None:
    box = await sandbox.create(image, Limits())
    done = await box.exec("python3 -c pass", 60.0)
    assert done.rc == 0
    await box.close()


async def _timed(work: Awaitable[object]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1000


def _plain(prefix: list[str]) -> float:
    """Milliseconds of the same program without a box of ours."""
    started = time.perf_counter()
    subprocess.run([*prefix, sys._base_executable, "-c", "pass"], check=True, timeout=60)
    return (time.perf_counter() - started) * 1000


def _descendants(pid: int) -> list[int]:
    found, pending = [], [pid]
    while pending:
        current = pending.pop()
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{current}/task/{current}/children").read_text().split()
            pending += map(int, children)
            found += map(int, children)
    return found


def _pss(pid: int) -> float:
    """Proportional memory of a process, MiB."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _p95(values: list[float]) -> float:
    return sorted(values)[max(0, round(0.95 * len(values)) - 1)]


def _row(case: str, value: float, unit: str, baseline: str) -> dict[str, Any]:
    return {"case": case, "value": value, "unit": unit, "baseline": baseline}
