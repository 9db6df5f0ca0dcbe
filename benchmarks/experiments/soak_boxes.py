"""Many boxes one after another, and what they leave behind: python -m benchmarks.experiments.soak_boxes --boxes 10000

Every box writes files, leaves a process behind and is closed. Counted before and after, on this machine: processes,
control groups, mounts, descriptors, memory of the processes that stay, files in memory and temporary files. Then an
owner is killed in the middle of its work, and what is left of it is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.boxes import descendants
from benchmarks.sandbox import library
from etude.grading.runner import TestRunner, open_sandbox
from etude.sandbox import cgroups
from etude.sandbox.base import Image, Limits

TOGETHER = 4
IMAGES = 12  # more than processes of images are kept
SETTLE_SECONDS = 60.0
SLACK_KIB = {  # by which memory may grow; other processes of the machine have files in memory, too
    "KiB here": 4096,
    "KiB of the zygote": 1024,
    "KiB of templates": 1024,
    "KiB of files in memory": 65536,
}
LINE = "sleep 600 & (setsid sleep 600 &) ; head -c 1M /dev/zero > big; ln -s big link; echo x > /tmp/x"


def main() -> int:
    parser = argparse.ArgumentParser(description="Make boxes and count what they leave behind.", allow_abbrev=False)
    parser.add_argument("--boxes", type=int, default=10_000)
    parser.add_argument("--owner", action="store_true", help=argparse.SUPPRESS)  # one that is to be killed
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="etude-soak-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        tempfile.tempdir = os.environ["TMPDIR"] = folder  # so that what is left there is of this run
        image, _ = library(root)
        if arguments.owner:
            asyncio.run(_work_forever(image))
        result = asyncio.run(_soak(image, arguments.boxes))
    killed = _kill_owner()
    print(json.dumps(result | {"left by a killed owner": killed}, indent=1))
    return 1 if result["leaked"] or killed else 0


async def _soak(image: Image, count: int) -> dict[str, object]:
    async with open_sandbox() as sandbox:
        for number in range(3 * IMAGES):
            await _life(sandbox, image, number)
        before = await _settled(sandbox, None)
        started = time.perf_counter()
        left = iter(range(count))

        async def worker() -> None:
            for number in left:
                await _life(sandbox, image, number)
                if number % 1000 == 999:
                    print(
                        f"{number + 1} boxes, {(number + 1) / (time.perf_counter() - started):.1f}/s", file=sys.stderr
                    )

        await asyncio.gather(*(worker() for _ in range(TOGETHER)))
        seconds = time.perf_counter() - started
        after = await _settled(sandbox, before)
    leaked = {
        name: after[name] - before[name] for name in before if after[name] - before[name] > SLACK_KIB.get(name, 0)
    }
    return {"boxes": count, "per second": count / seconds, "before": before, "after": after, "leaked": leaked}


async def _life(sandbox: TestRunner, image: Image, number: int) -> None:
    task = Image(image.repository, None, {"src/library/code.py": f"X = {number % IMAGES}\n"})
    box = await sandbox.create(task, Limits())
    done = await box.exec(LINE, 60.0)
    assert done.rc == 0, done
    await box.close()


async def _settled(sandbox: TestRunner, wanted: dict[str, int] | None) -> dict[str, int]:
    """Counts, once what is ending has ended: the kernel takes mounts and namespaces apart on its own time."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        gc.collect()
        found = _counts(sandbox)
        done = (
            found["processes of boxes"] == 0
            if wanted is None
            else all(found[k] <= wanted[k] + SLACK_KIB.get(k, 0) for k in wanted)
        )
        if done or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.25)


def _counts(sandbox: TestRunner) -> dict[str, int]:
    assert sandbox.zygote_pid is not None
    zygote = sandbox.zygote_pid
    staying = [pid for pid in descendants(zygote) if not _is_box(pid)]
    (templates, *_) = staying
    folders = [] if sandbox.backend.groups is None else sandbox.backend.groups.tops.values()
    return {
        "processes of boxes": sum(map(_is_box, descendants(zygote))),
        "processes that stay": len(staying),
        "control groups": sum(path.is_dir() for folder in folders for path in folder.iterdir()),
        "mounts here": _lines(f"/proc/{os.getpid()}/mountinfo"),
        "mounts of the zygote": _lines(f"/proc/{zygote}/mountinfo"),
        "mounts of images": max(_lines(f"/proc/{pid}/mountinfo") for pid in staying),
        "descriptors here": len(os.listdir("/proc/self/fd")),
        "descriptors of the zygote": len(os.listdir(f"/proc/{zygote}/fd")),
        "descriptors of images": max(len(os.listdir(f"/proc/{pid}/fd")) for pid in staying),
        "temporary files": sum(1 for _ in Path(tempfile.gettempdir()).rglob("*")),
        "KiB here": _resident(os.getpid()),
        "KiB of the zygote": _resident(zygote),
        "KiB of templates": _resident(templates),
        "KiB of files in memory": _meminfo("Shmem"),
    }


def _is_box(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith((b"/sbin/init", b"bash", b"sleep"))
    return False


def _lines(path: str) -> int:
    return len(Path(path).read_text().splitlines())


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


async def _work_forever(image: Image) -> None:
    async with open_sandbox() as sandbox:
        boxes = [await sandbox.create(image, Limits()) for _ in range(12)]
        await asyncio.gather(*(box.exec(LINE, 60.0) for box in boxes))
        print(
            sandbox.zygote_pid,
            *([] if sandbox.backend.groups is None else sandbox.backend.groups.tops.values()),
            flush=True,
        )
        while True:
            await _life(sandbox, image, 0)


def _kill_owner() -> dict[str, object]:
    """What is left of an owner that gets SIGKILL while boxes live, start and end."""
    command = [sys.executable, "-m", "benchmarks.experiments.soak_boxes", "--owner"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        zygote, *tops = owner.stdout.readline().split()
        pids = [int(zygote), *descendants(int(zygote))]
        time.sleep(1.0)  # it works meanwhile
        pids += [pid for pid in descendants(int(zygote)) if pid not in pids]
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        hierarchy = cgroups.detect()
        for folder in () if hierarchy is None else dict.fromkeys(hierarchy.folders.values()):
            cgroups.sweep(folder)  # as the next sandbox does
        left = {
            "processes": [pid for pid in pids if Path(f"/proc/{pid}").exists()],
            "control groups": [top for top in tops if Path(top).exists()],
        }
        if not any(left.values()) or time.monotonic() > deadline:
            return {name: found for name, found in left.items() if found}
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
