"""Control groups: which kind is found, that they hold, and that they go with their boxes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from etude.config import NamespaceSandboxConfig
from etude.grading.runner import open_sandbox
from etude.records import Outcome
from etude.sandbox import cgroups
from etude.sandbox.base import Image, LaunchFailed, Limits
from etude.sandbox.cgroups import REST, Groups, Hierarchy, detect
from etude.sandbox.namespace import backend
from tests.helpers.boxlibrary import BROKEN, CHUNKS, PATH, Place, as_nobody

HERE = detect()
needs_groups = pytest.mark.skipif(HERE is None, reason="no control groups here that this user may write to")

V2 = "31 23 0:28 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "32 31 0:29 / /cg/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n39 31 0:36 / /cg/pids rw - cgroup cgroup rw,pids\n"
)
HYBRID = "41 31 0:38 / /cg/unified rw - cgroup2 cgroup2 rw\n"


def tree(root: Path, mounts: str, own: str, files: dict[str, str]) -> Hierarchy | None:
    """What is found in a made-up file system."""
    (root / "mountinfo").write_text("24 1 8:1 / / rw - ext4 /dev/vda rw\n" + mounts)
    (root / "cgroup").write_text(own)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return detect(root, root)


def test_v2_is_found_where_its_controllers_are(tmp_path: Path) -> None:
    controllers = {"sys/fs/cgroup/user/a/cgroup.controllers": "cpuset cpu io memory pids\n"}
    found = tree(tmp_path, V2.format(root="/"), "0::/user/a\n", controllers)
    folder = tmp_path / "sys/fs/cgroup/user/a"
    assert found == Hierarchy("v2", {"cpu": folder, "memory": folder, "pids": folder})


def test_v2_below_the_root_of_a_container(tmp_path: Path) -> None:
    controllers = {"sys/fs/cgroup/a/cgroup.controllers": "memory pids\n"}
    found = tree(tmp_path, V2.format(root="/docker/x"), "0::/docker/x/a\n", controllers)
    folder = tmp_path / "sys/fs/cgroup/a"
    assert found == Hierarchy("v2", {"memory": folder, "pids": folder})


def test_processes_that_were_moved_aside_count_as_where_they_came_from(tmp_path: Path) -> None:
    controllers = {
        "sys/fs/cgroup/a/cgroup.controllers": "memory pids\n",
        f"sys/fs/cgroup/a/{REST}/cgroup.controllers": "memory pids\n",
    }
    found = tree(tmp_path, V2.format(root="/"), f"0::/a/{REST}\n", controllers)
    assert found is not None
    assert found.folders["memory"] == tmp_path / "sys/fs/cgroup/a"


OWN_V1 = "5:pids:/p\n4:memory:/m/n\n2:cpu,cpuacct:/\n1:name=systemd:/s\n0::/\n"
FILES_V1 = {"cg/pids/p/tasks": "", "cg/memory/m/n/tasks": "", "cg/cpu,cpuacct/tasks": ""}


def test_a_hybrid_machine_has_v1(tmp_path: Path) -> None:
    found = tree(tmp_path, HYBRID + V1, OWN_V1, FILES_V1 | {"cg/unified/cgroup.controllers": "hugetlb\n"})
    folders = {"cpu": "cg/cpu,cpuacct", "memory": "cg/memory/m/n", "pids": "cg/pids/p"}
    assert found == Hierarchy("v1", {name: tmp_path / path for name, path in folders.items()})


@pytest.mark.parametrize(
    ("mounts", "own", "files"),
    [
        ("", OWN_V1, FILES_V1),
        (V2.format(root="/"), "0::/a\n", {"sys/fs/cgroup/a/cgroup.controllers": "cpu memory\n"}),
        (V2.format(root="/"), "0::/../a\n", {"sys/fs/cgroup/cgroup.controllers": "memory pids\n"}),
        (V2.format(root="/docker/x"), "0::/docker/xy\n", {"sys/fs/cgroup/y/cgroup.controllers": "memory pids\n"}),
        (V1, OWN_V1.replace("4:memory", "4:devices"), FILES_V1),
        (V1, OWN_V1, {path: "" for path in FILES_V1 if "pids" not in path}),
    ],
    ids=["no mounts", "no pids", "outside of the namespace", "another container", "no memory", "not writable"],
)
def test_none_is_found_without_memory_and_pids(tmp_path: Path, mounts: str, own: str, files: dict[str, str]) -> None:
    assert tree(tmp_path, mounts, own, files) is None


@pytest.fixture
def groups() -> Iterator[Groups]:
    assert HERE is not None
    made = Groups(HERE)
    yield made
    made.close()
    assert not any(top.exists() for top in made.tops.values())


def joined(groups: Groups, limits: Limits, program: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """A plain process of the host in a group, with no other limit, and the group's files afterwards."""
    assert HERE is not None
    group = groups.make(limits)
    join = "; ".join(f"echo 0 > {folder}/cgroup.procs" for folder in group.folders)
    command = ["/bin/sh", "-c", f'{join}; exec "$0" -c "$1"', sys.executable, program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    names = ("pids.events", "cpu.stat", "memory.oom_control", "memory.events")
    found = {name: (f / name).read_text() for f in group.folders for name in names if (f / name).exists()}
    asyncio.run(groups.remove(group))
    assert not any(folder.exists() for folder in group.folders)
    return done, found


@needs_groups
def test_memory_that_no_single_process_holds(groups: Groups) -> None:
    program = (
        "import os, signal\npids = []\nfor i in range(4):\n  pid = os.fork()\n"
        "  if not pid:\n    x = b'x' * (40 << 20)\n    signal.pause()\n  pids.append(pid)\n"
        "dead, status = os.wait()\nprint(status, end='')\nfor pid in set(pids) - {dead}:\n  os.kill(pid, 9)"
    )
    done, found = joined(groups, Limits(memory_mb=64), program)
    assert done.stdout == "9"
    counts = found.get("memory.oom_control") or found["memory.events"]
    assert int(counts.split("oom_kill ")[1].split()[0]) > 0


@needs_groups
def test_all_boxes_together_have_a_limit() -> None:
    """Of which each alone is far."""
    assert HERE is not None
    groups = Groups(HERE, 96 << 20)
    try:
        held = groups.make(Limits())
        join = "; ".join(f"echo 0 > {folder}/cgroup.procs" for folder in held.folders)
        program = "x = bytearray(64 << 20); print(len(x), flush=True); import time; time.sleep(60)"
        command = ["/bin/sh", "-c", f'{join}; exec "$0" -c "$1"', sys.executable, program]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            assert first.stdout.readline().strip() == str(64 << 20)
            hog = "open('/proc/self/oom_score_adj', 'w').write('1000'); x = bytearray(64 << 20); print(1)"
            done, _ = joined(groups, Limits(), hog)
            assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
            assert first.poll() is None
            first.kill()
    finally:
        groups.close()


@needs_groups
def test_a_sandbox_limits_its_boxes_together(library_image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.sandbox.namespace.backend.MEMORY_SHARE", 0.01)

    async def scenario() -> None:
        async with open_sandbox(NamespaceSandboxConfig()) as sandbox:
            groups = sandbox.backend.groups
            (bound,) = {
                int((top / name).read_text())
                for top in groups.tops.values()
                for name in ("memory.max", "memory.limit_in_bytes")
                if (top / name).exists()
            } - {1 << 63}
            assert abs(bound - 0.01 * cgroups.memory_of(groups.hierarchy)) < 1 << 20
            box = await sandbox.create(library_image, Limits(addresses_mb=8192))
            done = await box.exec("python -c 'bytearray(700 << 20)'; cat /proc/self/oom_score_adj", 30)
            assert done.output.splitlines()[-1] == "1000"
            assert "Killed" in done.output
            await box.close()
            adjusted = Path(f"/proc/{sandbox.zygote_pid}/oom_score_adj").read_text()
            assert int(adjusted) >= 500
            assert int(Path("/proc/self/oom_score_adj").read_text()) < int(adjusted)

    asyncio.run(scenario())


def test_no_box_is_made_without_memory(library_image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no group holds all boxes together."""
    free = [300 << 20]
    monkeypatch.setattr(cgroups, "find", lambda share: None)
    monkeypatch.setattr(cgroups, "available_memory", lambda: free[0])
    monkeypatch.setattr(backend, "ROOM_SECONDS", 0.1)

    async def scenario() -> None:
        async with open_sandbox() as sandbox:
            box = await sandbox.create(library_image, Limits())
            assert (await box.exec("echo x", 20)).output == "x\n"
            free[0] = 200 << 20
            for call in ((await sandbox.create(library_image, Limits())).exec("echo x", 20),
                         sandbox.run_tests(library_image, {}, ("x",), None, Limits())):  # fmt: skip
                with pytest.raises(LaunchFailed, match="less than 256 MB"):
                    await call
            assert (await box.exec("echo still", 20)).output == "still\n"
            await box.close()

    asyncio.run(scenario())


@needs_groups
def test_processes_are_counted(groups: Groups) -> None:
    program = (
        "import subprocess\ntry:\n  while True: subprocess.Popen(['sleep', '60'], stdout=-3)\n"
        "except BlockingIOError: print('refused', end='')"
    )
    done, found = joined(groups, Limits(processes=8), program)  # removing the group ends the sleepers
    assert done.stdout == "refused"
    assert int(found["pids.events"].split()[1]) > 0


@needs_groups
def test_processor_time_is_shared_out(groups: Groups) -> None:
    assert HERE is not None
    if "cpu" not in HERE.folders:
        pytest.skip("no control group for processor time here")
    program = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    _, found = joined(groups, Limits(cpus=0.25), program)
    counts = dict(line.split() for line in found["cpu.stat"].splitlines())
    assert int(counts["nr_throttled"]) > 0


@needs_groups
def test_boxes_are_as_nice_as_their_owner() -> None:
    """A group counts as one thread of no niceness, unless it is told otherwise."""
    program = (
        "import os; from etude.sandbox.cgroups import *; os.nice(20); groups = Groups(detect())\n"
        "print(groups.hierarchy.kind, (groups.tops[groups.hierarchy.folders['cpu']] / sys.argv[1]).read_text())\n"
        "groups.close()"
    )
    assert HERE is not None
    if "cpu" not in HERE.folders:
        pytest.skip("no control group for processor time here")
    file, whole = ("cpu.weight", 100) if HERE.kind == "v2" else ("cpu.shares", 1024)
    command = [sys.executable, "-c", f"import sys; {program}", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    expected = max(2, round(whole * (os.cpu_count() or 1) * 1.25**-19))  # 19 is the most
    assert done.stdout.split() == [HERE.kind, str(expected)]


def test_sessions_in_boxes_are_as_nice_as_their_owner(tmp_path: Path) -> None:
    """Where the kernel shares processors among sessions first, two boxes would else weigh twice as much as a run."""
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel does not group processes by sessions")
    for name in ("repository", "site"):
        (tmp_path / name).mkdir()
    program = """
import asyncio, os, sys
os.nice(3)
from pathlib import Path
from etude.grading.runner import open_sandbox
from etude.sandbox.base import Image, Limits

async def look():
    async with open_sandbox() as sandbox:
        repository, site = (Path(sys.argv[1], name) for name in ("repository", "site"))
        box = await sandbox.create(Image(repository, site, {}), Limits())
        print(os.nice(0), (await box.exec("cat /proc/self/autogroup", 20)).output)
        await box.close()

asyncio.run(look())
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    own, _, word, shared = done.stdout.split()
    assert (word, shared) == ("nice", own)


MEMFDS = """import os
for i in range(6):
    fd = os.memfd_create("x")
    for _ in range(40): os.write(fd, bytes(1 << 20))
print("got it")
"""  # neither the address space nor what processes hold for themselves grows


@needs_groups
def test_a_hog_and_a_fork_bomb_are_the_agents_failure(place: Place) -> None:
    """C6, in a live box: the command is lost, never the box."""
    box = place.run(place.sandbox.create(place.image({PATH: BROKEN}), Limits(memory_mb=128, processes=24)))
    place.run(box.write("hog.py", MEMFDS.encode()))
    done = place.run(box.exec("keep=1; python3 hog.py", 30))
    assert (done.rc, "got it" in done.output) == (137, False)
    assert place.run(box.exec("echo $keep", 20)).output == "1\n"
    bomb = place.run(box.exec("b() { b | b & b; }; b 2>/dev/null", 2))
    assert bomb.timed_out or bomb.rc != 0
    place.run(box.exec("kill -9 -1", 20))
    look, deadline = "echo alive; cat /proc/self/cgroup | cut -d: -f3 | sort -u", time.monotonic() + 30
    while "fork: " in (done := place.run(box.exec(look, 20))).output:
        assert time.monotonic() < deadline, done.output  # the dead count until the box has reaped them
    assert done.output == "alive\n/\n"  # and no path tells of the group
    assert "hog.py" in place.run(box.changes())
    place.run(box.close())


@needs_groups
def test_a_hog_among_the_hidden_tests_fails_them(place: Place) -> None:
    """B15: what the tested code does is a result."""
    body = "".join(f"    {line}\n" for line in MEMFDS.splitlines())
    code = BROKEN.replace("    return [items", f"{body}    return [items", 1)
    graded = place.grade({PATH: code}, Limits(memory_mb=160, seconds=20))
    assert (graded.outcome, graded.passed, graded.score) == (Outcome.SCORED, False, 0.0)
    assert graded.report is not None
    assert graded.report.crashed
    assert not graded.report.timed_out  # it was ended by its memory, not by its deadline
    assert graded.report.outcomes[CHUNKS[0]] != "passed"


def count(groups: Groups) -> int:
    return sum(path.is_dir() for top in groups.tops.values() for path in top.iterdir())


def tops_of(groups: Groups | None) -> list[Path]:
    """The groups of one sandbox: those of others on this machine come and go."""
    assert groups is not None
    tops = list(groups.tops.values())
    assert tops
    assert all(top.is_dir() for top in tops)
    return tops


@needs_groups
def test_groups_go_with_their_boxes(library: Path) -> None:
    async def scenario() -> list[Path]:
        async with open_sandbox(memo=0) as sandbox:
            tops = tops_of(sandbox.backend.groups)
            image = Image(library / "repository", library / "site", {})
            kept = count(sandbox.backend.groups)  # of test runs
            for _ in range(8):
                boxes = [await sandbox.create(image, Limits()) for _ in range(4)]
                await asyncio.gather(*(box.exec("sleep 60 & setsid sleep 60 & true", 20) for box in boxes))
                assert count(sandbox.backend.groups) == kept + 4 * len(sandbox.backend.groups.tops)
                await asyncio.gather(*(box.close() for box in boxes))
                assert count(sandbox.backend.groups) == kept
            for _ in range(5):
                await sandbox.run_tests(image, {}, [f"{PATH}::doctest:chunk"], None, Limits())
            assert count(sandbox.backend.groups) == kept
        return tops

    tops = asyncio.run(asyncio.wait_for(scenario(), 120))
    assert not any(top.exists() for top in tops)


@needs_groups
def test_groups_go_when_the_zygote_is_killed(library: Path) -> None:
    async def scenario() -> list[Path]:
        async with open_sandbox() as sandbox:
            tops = tops_of(sandbox.backend.groups)
            box = await sandbox.create(Image(library / "repository", None, {}), Limits())
            await box.exec("sleep 60 & true", 20)
            os.kill(sandbox.zygote_pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                while sandbox.alive:
                    await asyncio.sleep(0.01)
            await box.close()
        return tops

    tops = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert not any(top.exists() for top in tops)


OWNER = """
import asyncio, sys
from pathlib import Path
from etude.sandbox.base import Image, Limits
from etude.grading.runner import open_sandbox
async def main():
    async with open_sandbox() as sandbox:
        box = await sandbox.create(Image(Path(sys.argv[1]), None, {}), Limits())
        await box.exec("sleep 60 & true", 20)
        print(*sandbox.backend.groups.tops.values(), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@needs_groups
def test_groups_of_a_killed_owner_are_removed_by_the_next(library: Path) -> None:
    assert HERE is not None
    command = [sys.executable, "-c", OWNER, str(library / "repository")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        tops = [Path(word) for word in owner.stdout.readline().split()]
        assert tops
        Groups(HERE).close()
        assert all(top.exists() for top in tops)  # its lock protects them
        owner.kill()
    deadline = time.monotonic() + 20
    while any(top.exists() for top in tops) and time.monotonic() < deadline:  # until its boxes have died, too
        Groups(HERE).close()
        time.sleep(0.05)
    assert not any(top.exists() for top in tops)


@pytest.mark.skipif(os.geteuid() != 0, reason="root hands a group to another user here")
@needs_groups
def test_without_root_in_a_group_of_ones_own() -> None:
    """Delegation: an ordinary user whose own group belongs to them."""
    assert HERE is not None
    if HERE.kind == "v2":
        pytest.skip("root moves processes between groups of v1 here")
    program = "import sys; from etude.cli.doctor_reports import show_machine; sys.exit(show_machine(as_json=True))"
    places = [folder / f"etude-test-{os.getpid()}" for folder in set(HERE.folders.values())]
    with ExitStack() as stack:
        for place in places:
            place.mkdir()
            stack.callback(place.rmdir)
            os.chown(place, 65534, 65534)
            os.chown(place / "cgroup.procs", 65534, 65534)
        join = "; ".join(f"echo 0 > {place}/cgroup.procs" for place in places)
        done = as_nobody(program, proof="rootless", first=join)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert json.loads(done.stdout)["ok"], done.stdout
    assert (checks["boxes: cgroup"]["detail"], checks["boxes: rootless"]["detail"]) == ("v1", "yes")
    assert checks["limits"]["detail"].startswith("control groups v1 (cpu, memory, pids)")


def a_v2_folder() -> tuple[Path, str] | None:
    """A mounted v2 root and one of its controllers, whichever it has."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        folder = Path(left.split(" ")[4])
        if right.startswith("cgroup2") and (words := (folder / "cgroup.controllers").read_text().split()):
            return folder, words[0]
    return None


@pytest.mark.skipif(os.geteuid() != 0 or a_v2_folder() is None, reason="needs root and a mounted v2 hierarchy")
def test_v2_processes_move_aside_for_groups_below() -> None:
    """On the kernel's own v2, with whatever controller is left to it; then `cgroup.kill` and removal."""
    found = a_v2_folder()
    assert found is not None
    folder, controller = found
    own = folder / f"etude-test-{os.getpid()}"
    (folder / "cgroup.subtree_control").write_text(f"+{controller}")
    own.mkdir()
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        (own / "cgroup.procs").write_text(str(sleeper.pid))
        cgroups.hand_down(own, frozenset({controller}))
        assert (own / "cgroup.subtree_control").read_text().split() == [controller]
        assert (own / REST / "cgroup.procs").read_text().split() == [str(sleeper.pid)]
        cgroups.hand_down(own, frozenset({controller}))  # nothing is left to do
        groups = Groups(Hierarchy("v2", {controller: own}))
        (top,) = groups.tops.values()
        box = top / "box"
        box.mkdir()
        (box / "cgroup.procs").write_text(str(sleeper.pid))
        groups.close()
        assert sleeper.wait(20) == -signal.SIGKILL
        assert not top.exists()
    finally:
        sleeper.kill()
        sleeper.wait(20)
        cgroups._emptied(own)
    assert not own.exists()
