"""Backends whose boxes are machines of somebody else's: the same boxes, runs and refusals as on namespaces."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from etude.config import RLConfig, SandboxConfig, validate, validate_sandbox
from etude.errors import UserError
from etude.grading.runner import EXAMINER, TestRunner
from etude.sandbox.backend import BackendOptions
from etude.sandbox.backends import choose
from etude.sandbox.backends.containers import ENGINES, Containers
from etude.sandbox.backends.remote import RemoteBackend, open_remote
from etude.sandbox.base import BoxDead, Escape, Image, LaunchFailed, Limits, NotFound, NotRegular
from etude.sandbox.egress.policy import Egress
from etude.sandbox.guest import files, linux
from etude.tasks.installed import Library, copies
from etude.tasks.system_index import index_of
from tests.helpers import containers
from tests.helpers.boxlibrary import BROKEN, CHUNKS, CORE, DOCTEST, OTHERS, PATH, Place
from tests.helpers.machines import Local, needs_machines

ENGINES_HERE = [pytest.param("local", marks=needs_machines), pytest.param("podman", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=ENGINES_HERE)
def place(request: pytest.FixtureRequest, library: Path) -> Iterator[Place]:
    host = Local("memory", "processes", "disk") if request.param == "local" else containers.host()
    loop = asyncio.new_event_loop()
    stack = AsyncExitStack()
    backend = loop.run_until_complete(stack.enter_async_context(open_remote(host, BackendOptions(EXAMINER))))
    yield Place(loop, TestRunner(backend, memo=0, outside=False), library)
    loop.run_until_complete(stack.aclose())
    loop.close()


def test_a_live_box_is_that_of_namespaces(place: Place) -> None:
    run = place.run
    box = run(place.sandbox.create(place.image({PATH: BROKEN}), Limits()))
    first = run(box.exec("cd src; export WORD=here; false", 30))
    assert (first.rc, first.timed_out) == (1, False)
    assert run(box.exec("pwd; echo $WORD; tty -s && echo terminal", 30)).output == "/workspace/src\nhere\nterminal\n"
    assert run(box.read(PATH)) == BROKEN.encode()
    assert run(box.changes()) == {}
    assert run(box.exec("stat -c %Y lib/core.py lib/numbers.py", 30)).output == "1700000000\n" * 2
    run(box.write("src/lib/new/deep.py", b"\x00\xff"))
    run(box.write(PATH, CORE.encode()))
    run(box.delete("README.md"))
    assert run(box.exec("touch lib/new/other && echo '#' >> lib/numbers.py && ln -s /etc/passwd link", 30)).rc == 0
    changed = run(box.changes())
    assert {"README.md", PATH, "src/lib/new/deep.py", "src/lib/new/other", "src/lib/numbers.py"} == set(changed)
    assert (changed["README.md"], changed[PATH]) == (None, CORE.encode())
    for path, error in (("src/link", Escape), ("src/none", NotFound), ("src/lib", NotRegular)):
        with pytest.raises(error):
            run(box.read(path))
    report = run(box.run_tests([DOCTEST], 30))
    assert report.outcomes == {DOCTEST: "passed"}
    run(box.close())
    with pytest.raises(BoxDead):
        run(box.exec("true", 5))


@pytest.mark.slow
def test_the_image_of_containers_is_searched_for_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    host = containers.host()

    async def systems() -> tuple[str, Mapping[str, Path]]:
        async with open_remote(host, BackendOptions(EXAMINER)) as backend:
            return backend.image_name, backend.system_folders()

    name, folders = asyncio.run(systems())
    assert re.fullmatch(rf"{containers.NAME} [0-9a-f]{{64}} of podman", name)
    library = Library("textwrap", {"textwrap.py": frozenset({b"TextWrapper", b"wrap", b"fill", b"shorten", b"dedent"})})
    index = index_of("/", folders["/"])
    (place,) = copies(library, index)
    assert re.fullmatch(r"/usr/lib/python3\.\d+/textwrap\.py", index.shown(place))
    assert (folders["/"] / "usr/bin/python3").is_file()
    assert "pytest" in folders
    monkeypatch.setattr(host, "_save", lambda _: pytest.fail("saved again"))
    assert asyncio.run(systems())[1] == folders


def test_the_user_of_a_box_has_no_rights(place: Place) -> None:
    box = place.run(place.sandbox.create(place.image({}), Limits()))
    lines = {
        "id -u | grep -x 0": "",
        "grep -E 'Cap(Prm|Eff|Bnd)' /proc/self/status | grep -v 0000000000000000": "",
        "unshare -Ur true 2>/dev/null && echo made a namespace": "",
        "cat /proc/1/environ /opt/runner/../../etc/shadow 2>/dev/null": "",
        "kill -9 1 2>/dev/null && echo killed": "",
        "touch /opt/runner/x /site/x /usr/x /etc/x 2>/dev/null && echo written": "",
        "grep -c : /proc/net/dev | grep -vx 1; echo": "\n",
    }
    for line, wanted in lines.items():
        assert place.run(box.exec(line, 30)).output == wanted, line
    place.run(box.close())


def test_deadlines_bombs_and_lost_shells(place: Place) -> None:
    limits = Limits(memory_mb=256, processes=24)
    box = place.run(place.sandbox.create(place.image({}), limits))
    late = place.run(box.exec("sleep 60", 1))
    assert late.timed_out
    assert late.rc != 0
    bomb = 'python3 -c \'import subprocess\nfor _ in range(99): subprocess.Popen(["sleep", "60"])\'; kill -9 -1'
    assert "unavailable" in place.run(box.exec(bomb, 30)).output
    assert "MemoryError" in place.run(box.exec("python3 -c 'bytes(1 << 29)'", 30)).output
    assert place.run(box.exec("kill -9 $$", 30)).rc is None
    assert place.run(box.exec("echo alive", 30)).output == "alive\n"
    place.run(box.close())


def test_hidden_tests_grade_a_change_in_a_new_machine(place: Place) -> None:
    tests = (*CHUNKS, *OTHERS, DOCTEST)
    good = place.test({}, tests)
    assert set(good.outcomes.values()) == {"passed"}, good
    assert good.decided == 0
    bad = place.test({PATH: BROKEN}, tests)
    assert bad.outcomes[CHUNKS[0]] == "failed"
    assert bad.outcomes[OTHERS[0]] == "passed"
    assert not bad.tampered


def test_a_run_ends_with_what_it_left_behind(place: Place) -> None:
    """A daemon that holds the report's pipe open, and one that forges a line."""
    daemon = (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(60)\n"
        "for fd in range(3, 20):\n    try: os.write(fd, b'{\"end\": 1}\\n')\n    except OSError: pass\n"
    )
    report = place.test({PATH: CORE + daemon}, OTHERS, limits=Limits(seconds=20))
    assert report.seconds < 20
    assert report.tampered or report.crashed


@needs_machines
def test_what_a_host_lacks_is_refused_at_start(library: Path) -> None:
    async def opened(*limits: str, without: tuple[str, ...] = (), **options: Any) -> RemoteBackend:
        async with open_remote(Local(*limits), BackendOptions(EXAMINER, **options), without) as backend:
            return backend

    with pytest.raises(UserError, match="cannot limit disk"):
        asyncio.run(opened("memory", "processes"))
    backend = asyncio.run(opened("memory", "processes", "cpus", without=("disk",)))
    assert backend.capabilities().limits == ("memory", "processes", "cpus")
    assert not backend.alive
    with pytest.raises(UserError, match="no way out"):
        asyncio.run(opened("memory", "processes", "disk", egress=Egress()))
    with pytest.raises(UserError, match="cannot look like"):
        asyncio.run(opened("memory", "processes", "disk", machine_profiles=[{}]))


@needs_machines
def test_a_machine_that_ends_is_our_failure_and_a_missing_program_is_named(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        host = Local("memory", "processes", "disk")
        async with open_remote(host, BackendOptions(EXAMINER)) as backend:
            sandbox = TestRunner(backend)
            box = await sandbox.create(Image(library / "repository", None, {}), Limits())
            await box.exec("true", 30)
            await host.streams[-1].close()
            with pytest.raises(BoxDead) as caught:
                await box.exec("true", 30)
            assert caught.value.payer == "infra"
            monkeypatch.setattr("tests.helpers.machines.MACHINE", ("sh", "-c", "echo no such program >&2; exit 127"))
            with pytest.raises(LaunchFailed, match="no such program"):
                await sandbox.run_tests(Image(library / "repository", None, {}), {}, [DOCTEST], None, Limits())

    asyncio.run(play())


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"type": "podman"}, "sandbox.image is needed"),
        ({"type": "podman", "image": "x", "egress": ["example.com"]}, "unknown key sandbox.egress with sandbox.type"),
        ({"type": "hyperv", "image": "x"}, "sandbox: Input tag 'hyperv'"),
    ],
)
def test_settings_that_do_not_fit(table: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        validate(RLConfig, {"tasks": {"dataset": "x"}, "sandbox": table}, "test")


def test_an_engine_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    why = asyncio.run(choose.reachable())
    assert {name: f"{name} is not installed" in reason for name, reason in why.items()} == dict.fromkeys(ENGINES, True)
    for name in ENGINES:
        config = validate_sandbox({"type": name, "image": "x"}, name)

        async def enter(config: SandboxConfig = config) -> None:
            async with choose.open_backend(config, BackendOptions(EXAMINER)):
                pass

        with pytest.raises(UserError, match="not installed"):
            asyncio.run(enter())


PODMAN = """#!/bin/bash
echo 'time="2026" level=warning msg="a warning"' >&2
case "$*" in
  info*) echo '{"host": {"security": {"rootless": true}, "cgroupVersion": "v2",' \\
    '"cgroupControllers": ["memory", "pids"]}}';;
  *inspect*) printf 'ab%.0s' {1..32};;
  *python3*) python3 -c "${@: -1}";;
esac
"""


def test_warnings_of_an_engine_are_no_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = tmp_path / "podman"
    engine.write_text(PODMAN)
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    host = Containers("podman", "some:image", None)
    asyncio.run(host.open())
    host.close()
    assert host.image_name == f"some:image {'ab' * 32} of podman"
    assert re.fullmatch(r"\d+\.\d+\.\d+", host.python)
    assert host._accounts.startswith(Path("/etc/passwd").read_text()[:20])


def test_files_are_opened_without_openat2(tmp_path: Path) -> None:
    """What gVisor lacks is done by parts: the same answers as the kernel's own."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("text")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "folder/out").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for path in ("folder/file", "folder", "", "pipe", "link", "link/file", "folder/out", "none", "../x", "pipe/x"):
            found = []
            for how in (files._open, files._open_by_parts):
                try:
                    fd = how(root, path, os.O_RDONLY)
                    found.append(os.fstat(fd).st_ino)
                    os.close(fd)
                except OSError as e:
                    kinds = {errno.ELOOP: "escape", errno.EXDEV: "escape"}
                    found.append(kinds.get(e.errno or 0, e.errno))
            assert found[0] == found[1], path
    finally:
        os.close(root)


def test_the_end_of_a_child_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: int) -> int:
        raise OSError(errno.ENOSYS, "")

    monkeypatch.setattr(os, "pidfd_open", missing)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        theirs.recv(1)
        os._exit(7)
    fd = linux.end_of(pid)
    os.set_blocking(fd, False)
    with pytest.raises(BlockingIOError):
        os.read(fd, 1)
    ours.send(b".")
    os.set_blocking(fd, True)
    assert os.read(fd, 1) == b""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    for end in (ours, theirs):
        end.close()
    os.close(fd)
