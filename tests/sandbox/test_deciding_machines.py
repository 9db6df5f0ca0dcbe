"""Hidden tests decided in a second machine: neither machine has what the other holds, and the end of either is told
apart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from etude.grading.runner import EXAMINER, TestRunner
from etude.records import Outcome
from etude.sandbox.backend import BackendOptions, RunImage
from etude.sandbox.backends.remote import open_remote
from etude.sandbox.base import BoxDead, Image, LaunchFailed, Limits, TestReport
from tests.helpers import containers
from tests.helpers.boxlibrary import BROKEN, CHUNKS, CORE, OTHERS, PATH, Place, write_tree
from tests.helpers.machines import Local, needs_machines

SLEEPS = CORE.replace("    return [items[i", "    import time; time.sleep(60)\n    return [items[i")
DIES = CORE.replace("    return [items[i", "    import os; os.kill(os.getpid(), 9)\n    return [items[i")
EQUAL = """
class Equal(list):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
    __iter__ = lambda self: iter([self])
    __len__ = lambda self: 2


def chunk(items, size=1):
    return Equal()
"""
# What a process of the tested side can see: the hidden tests are none of it.
LOOKS = """
def _seen():
    import os
    for folder in ("/workspace", "/run", "/site", "/tmp", "/home", "/opt", "/proc/1/root"):
        for place, _, names in os.walk(folder):
            for name in names:
                if "test_core" in name or name == "helpers.py":
                    return [place + "/" + name]
    return ["nothing"]


def chunk(items, size=1):
    return _seen()
"""
# Sends what nobody asked for over every socket, and reads nothing.
FLOODS = CORE.replace(
    "    return [items[i",
    "    import os\n    for fd in range(3, 64):\n        try:\n            while True: os.write(fd, bytes(65536))\n"
    "        except OSError: pass\n    return [items[i",
)
OWN_HIDDEN = {
    "tests/__init__.py": "",
    "tests/test_places.py": (
        "import os\n\nimport lib\n\n\ndef test_large():\n    words = ['x' * 3_000_000, 'y' * 3_000_000]\n"
        "    assert lib.chunk(words, 1) == [words[:1], words[1:]]\n\n\ndef test_no_source_is_here():\n"
        "    places = [p for f in ('/workspace', '/site', '/run', '/tmp') for p, _, names in os.walk(f)\n"
        "              if {'core.py', 'numbers.py'} & set(names)]\n"
        "    assert (places, lib.chunk([1], 1)) == ([], [[1]])\n"
        "    assert not any(os.access(f, os.W_OK) for f in ('/workspace', __file__, '/site', '/home/user'))\n"
    ),
}
LARGE, NO_SOURCE = "tests/test_places.py::test_large", "tests/test_places.py::test_no_source_is_here"


@dataclass
class Machines:
    """A place, and the streams of the machines of the run that was made last, by their part."""

    place: Place
    streams: dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[pytest.param("local", marks=needs_machines), pytest.param("podman", marks=pytest.mark.slow)],
)
def machines(request: pytest.FixtureRequest, library: Path) -> Iterator[Machines]:
    host = Local("memory", "processes", "disk") if request.param == "local" else containers.host()
    streams: dict[str, Any] = {}

    async def runs(image: RunImage, limits: Limits, ends: AsyncExitStack, decides: bool = False) -> Any:
        connection = await original(image, limits, ends, decides)
        streams["verifier" if decides else "tested"] = connection._stream
        return connection

    loop = asyncio.new_event_loop()
    stack = AsyncExitStack()
    backend = loop.run_until_complete(stack.enter_async_context(open_remote(host, BackendOptions(EXAMINER))))
    original, backend._runs = backend._runs, runs  # type: ignore[method-assign]
    yield Machines(Place(loop, TestRunner(backend, memo=0), library), streams)
    loop.run_until_complete(stack.aclose())
    loop.close()
    if isinstance(host, containers.Podman):
        assert len(host.names) > 10
        assert containers.left(host.names) == set()


def test_gold_earns_one_and_nothing_earns_none(machines: Machines) -> None:
    place = machines.place
    gold, nothing = place.grade({PATH: CORE}), place.grade({})
    assert (gold.score, gold.passed, gold.flags) == (1.0, True, ())
    assert (nothing.score, nothing.passed, nothing.flags) == (0.0, False, ())
    for grade in (gold, nothing):
        assert grade.report.outside == {*CHUNKS, *OTHERS}
    assert {test for test, outcome in nothing.report.outcomes.items() if outcome != "passed"} == {
        CHUNKS[0],
        "tests/test_core.py::test_fixture",
    }


@pytest.mark.parametrize("program", [EQUAL, LOOKS, DIES, FLOODS], ids=["equal", "looks", "dies", "floods"])
def test_no_attack_is_rewarded(machines: Machines, program: str) -> None:
    text = program if "class Counter" in program else CORE.replace("def last", f"{program}\n\ndef last")
    grade = machines.place.grade({PATH: text})
    assert grade.score == 0.0
    assert grade.outcome in (Outcome.SCORED, Outcome.TAMPERED)  # the agent's, and not ours
    assert grade.report.outside
    if program is LOOKS:
        assert "nothing" in grade.report.messages[CHUNKS[0]]
    if program is DIES:
        assert grade.report.crashed
    if program is FLOODS:
        assert grade.report.tampered


def test_a_run_that_does_not_end(machines: Machines) -> None:
    started = time.monotonic()
    report = machines.place.test({PATH: SLEEPS}, (*CHUNKS, *OTHERS), limits=Limits(seconds=3.0))
    assert time.monotonic() - started < 30
    assert (report.timed_out, report.crashed, report.tampered) == (True, False, False)
    assert report.outcomes[CHUNKS[0]] == "missing"


async def ended(machines: Machines, part: str) -> TestReport:
    """The report on a run one of whose machines ends while a test waits for the library."""
    place = machines.place
    machines.streams.clear()
    changes = {PATH: SLEEPS.encode()}
    run = asyncio.create_task(
        place.sandbox.run_tests(place.image(), changes, CHUNKS, place.hidden, Limits(seconds=30.0))
    )
    while len(machines.streams) < 2:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    await machines.streams[part].close()
    return await run


def test_the_end_of_the_tested_machine_is_the_agents(machines: Machines) -> None:
    machines.place.test({}, CHUNKS)  # recorded
    report = machines.place.run(ended(machines, "tested"))
    assert (report.crashed, report.timed_out, report.seconds < 15) == (True, False, True)
    assert set(report.outcomes.values()) <= {"failed", "error", "missing"}


def test_the_end_of_the_deciding_machine_is_ours(machines: Machines) -> None:
    machines.place.test({}, CHUNKS)
    # The machine may not have begun yet, and then ends "at once"; or its last message says that its process was killed.
    said = r"the machine of a box (has )?ended|the verifier of hidden tests failed: status -9"
    with pytest.raises((BoxDead, LaunchFailed), match=said) as caught:
        machines.place.run(ended(machines, "verifier"))
    assert caught.value.payer == "infra"


def test_large_values_pass_and_no_source_lies_beside_the_tests(machines: Machines, tmp_path: Path) -> None:
    hidden = write_tree(tmp_path / "hidden", OWN_HIDDEN)
    place = machines.place
    report = place.run(
        place.sandbox.run_tests(
            place.image({PATH: BROKEN}), {PATH: CORE.encode()}, (LARGE, NO_SOURCE), hidden, Limits()
        )
    )
    assert report.outcomes == {LARGE: "passed", NO_SOURCE: "passed"}, report.messages
    assert report.outside == {LARGE, NO_SOURCE}


_OWNER = """
import asyncio, json, sys
from pathlib import Path
from etude.grading.runner import EXAMINER, TestRunner
from etude.sandbox.backend import BackendOptions
from etude.sandbox.backends.remote import open_remote
from etude.sandbox.base import Image, Limits
from tests.helpers import containers
from tests.helpers.boxlibrary import CHUNKS
from tests.sandbox.test_deciding_machines import PATH, SLEEPS

async def main(root):
    host = containers.host()
    async with open_remote(host, BackendOptions(EXAMINER)) as backend:
        image, runner = Image(root / "repository", None, {}), TestRunner(backend)
        box = await runner.create(image, Limits())
        await box.exec("true", 30)
        await runner.run_tests(image, {}, CHUNKS, root / "hidden", Limits())
        arguments = image, {PATH: SLEEPS.encode()}, CHUNKS, root / "hidden", Limits(seconds=120)
        run = asyncio.create_task(runner.run_tests(*arguments))
        while len(containers.left(host.names)) < 3:
            await asyncio.sleep(0.2)
        print(json.dumps(host.names), flush=True)
        await run

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_containers_end_with_their_owner(library: Path) -> None:
    """Also if it is killed; a live box and the two machines of a run are left then."""
    containers.host()
    command = [sys.executable, "-c", _OWNER, str(library)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        names = json.loads(owner.stdout.readline())
        assert len(containers.left(names)) == 3
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while containers.left(names):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.smoke
def test_containers_that_somebody_ends_are_ours_in_one_sentence(library: Path) -> None:
    async def play() -> None:
        host = containers.host()
        async with open_remote(host, BackendOptions(EXAMINER)) as backend:
            runner, image = TestRunner(backend), Image(library / "repository", None, {})
            report = await runner.run_tests(image, {}, CHUNKS, library / "hidden", Limits())
            assert (set(report.outcomes.values()), report.decided) == ({"passed"}, 1.0)
            changes = {PATH: SLEEPS.encode()}
            run = asyncio.create_task(runner.run_tests(image, changes, CHUNKS, library / "hidden", Limits(seconds=60)))
            names: set[str] = set()
            while len(names) < 2:
                await asyncio.sleep(0.5)
                names = containers.left(host.names)
            subprocess.run(["podman", "kill", *names], check=True, capture_output=True, timeout=60)
            # A container that had not begun yet ends "at once".
            with pytest.raises((BoxDead, LaunchFailed), match=r"the machine of a box (has )?ended") as caught:
                await run
            assert caught.value.payer == "infra"
            assert "\n" not in str(caught.value)

    asyncio.run(play())
