"""Test runs: what they report, how they equal fresh imports, and what they remember."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest._io.saferepr import saferepr

from etude.grading.guest import suite
from etude.grading.runner import open_sandbox
from etude.sandbox.base import BoxDead, Image, LaunchFailed, Limits
from etude.sandbox.connection import Connection
from tests.helpers.boxlibrary import BROKEN, CHUNKS, CORE, DOCTEST, NUMBERS, OTHERS, PATH, Place

ALL = (
    *CHUNKS,
    *OTHERS,
    "tests/test_core.py::TestPlaces::test_files",
    DOCTEST,
    "tests/test_unit.py::LastTest::test_last",
)


def test_pristine_library_passes(place: Place) -> None:
    report = place.test({}, ALL)
    assert report.outcomes == dict.fromkeys(ALL, "passed")
    assert report.messages == {}
    assert (report.crashed, report.timed_out, report.tampered) == (False, False, False)


def test_failures_are_one_line_and_repeat(place: Place) -> None:
    first, second = (place.test({PATH: BROKEN}, ALL) for _ in range(2))
    assert first.outcomes == second.outcomes
    assert first.messages == second.messages
    failed = [test for test, outcome in first.outcomes.items() if outcome != "passed"]
    assert failed == [CHUNKS[0], "tests/test_core.py::test_fixture", DOCTEST]
    assert first.messages[CHUNKS[0]] == "AssertionError: assert [[1, 2]] == [[1, 2], [3]]"
    assert first.messages[DOCTEST] == "expected [[1, 2], [3]] got [[1, 2]]"


def test_unittest_cases_fail(place: Place) -> None:
    """They catch what a test raises, and pytest's own hook hands it on; ours has to."""
    test = "tests/test_unit.py::LastTest::test_last"
    for text, message in (("items[0]", "AssertionError: 1 != 2"), ("items[7]", "IndexError: list index out of range")):
        report = place.test({PATH: CORE.replace("return items[-1]", f"return {text}")}, (test,))
        assert (report.outcomes[test], report.messages[test]) == ("failed", message)


def test_addresses_are_masked(place: Place) -> None:
    text = CORE.replace("return items[-1]", "return object()")
    message = place.test({PATH: text}, (OTHERS[1],)).messages[OTHERS[1]]
    assert message == "AssertionError: assert <object object at 0x...> == 'b'"
    text = CORE.replace("return items[-1]", "raise ValueError(object())")
    assert place.test({PATH: text}, (OTHERS[1],)).messages[OTHERS[1]] == "ValueError: <object object at 0x...>"


@dataclass(frozen=True)
class _Shown:
    text: str

    def __repr__(self) -> str:
        return self.text


def test_addresses_that_pytest_has_cut_are_masked() -> None:
    """A long value loses its middle, wherever the address stands in it."""
    for before in range(80):
        for after in range(0, 80, 7):
            told: set[str] = set()
            for address in ("7f21abcdef10", "7fa4b35f2e98"):
                shown = f"{'y' * before}<object object at 0x{address}>{'y' * after}"
                told.add(suite.one_line(f"assert {saferepr(_Shown(shown), 60)} == 1"))
            assert len(told) == 1, told


def test_unknown_tests_and_broken_files_are_errors(place: Place) -> None:
    absent = ("tests/test_core.py::test_absent", "tests/test_none.py::test_x", f"{PATH}::doctest:last")
    report = place.test({}, (*absent, CHUNKS[0]))
    assert [report.outcomes[test] for test in absent] == ["error"] * 3
    assert report.outcomes[CHUNKS[0]] == "passed"
    report = place.test({PATH: "def broken(:\n"}, (CHUNKS[0], DOCTEST))
    assert report.outcomes == {CHUNKS[0]: "error", DOCTEST: "error"}
    assert report.messages[CHUNKS[0]].startswith("SyntaxError")


@pytest.mark.parametrize(
    ("path", "old", "new", "test", "cold"),
    [
        (PATH, "return items[-1]", "return items[0]", "test_last", 0),
        (PATH, "return items[-1]", "x = 0\n    y = x\n    return items[y]", "test_last", 0),
        (PATH, "self.count += n", "self.count -= n", "test_counter", 0),
        (PATH, "counter.count = count", "counter.count = 0", "test_counter", 0),
        (PATH, "FOUR = double(2)", "FOUR = double(3)", "test_four", 1),
        (PATH, "def last(items):", "def last(items, k=1):\n    items = items[:k]", "test_last", 1),
        (PATH, "    return items[-1]\n", "    return items[-1]\n\n\ndef last(items):\n    return 0\n", "test_last", 1),
        ("src/lib/numbers.py", "return 2 * n", "return 3 * n", "test_four", 1),  # it ran at import
        ("src/lib/numbers.py", "return 2 * n", "return 3 * n", "test_half", 1),
        (
            "src/lib/numbers.py",
            "def double(n):",
            "@staticmethod\ndef double(n):\n    return 1\n\n\ndef other(n):",
            "test_half",
            1,
        ),
    ],
)
def test_changed_code_takes_effect(place: Place, path: str, old: str, new: str, test: str, cold: int) -> None:
    """Whether it is swapped into the imported library or needs a fresh import."""
    original = CORE if path == PATH else NUMBERS
    assert old in original
    before = place.sandbox.stats.cold
    test = f"tests/test_core.py::{test}"
    assert place.test({}, (test,)).outcomes == {test: "passed"}
    assert place.test({path: original.replace(old, new)}, (test,)).outcomes == {test: "failed"}
    assert place.sandbox.stats.cold - before == cold


def test_new_and_deleted_modules(place: Place) -> None:
    moved = {
        PATH: CORE.replace("from .numbers", "from .moved"),
        "src/lib/moved.py": NUMBERS,
        "src/lib/numbers.py": None,
    }
    assert place.test(moved, CHUNKS).outcomes == dict.fromkeys(CHUNKS, "passed")
    assert set(place.test({"src/lib/numbers.py": None}, CHUNKS).outcomes.values()) == {"error"}


def test_limits_end_a_run(place: Place) -> None:
    loop = CORE.replace("return items[-1]", "while True:\n        pass")
    report = place.test({PATH: loop}, (CHUNKS[0], OTHERS[1]), limits=Limits(seconds=1.0))
    assert report.timed_out
    assert report.outcomes == {CHUNKS[0]: "passed", OTHERS[1]: "missing"}
    hoard = CORE.replace("return items[-1]", "return len(bytearray(3 << 30))")
    assert place.test({PATH: hoard}, (OTHERS[1],)).outcomes == {OTHERS[1]: "failed"}
    fill = CORE.replace("return items[-1]", "return open('/tmp/big', 'wb').write(bytes(32 << 20))")
    report = place.test({PATH: fill}, (OTHERS[1],), limits=Limits(disk_mb=16))
    assert report.messages[OTHERS[1]].startswith("OSError")


BOMB = """import os, signal
    made = 0
    try:
        while True:
            if os.fork() == 0:
                signal.pause()
            made += 1
    except OSError:
        return made"""


def test_fork_bomb_is_bounded(place: Place) -> None:
    bomb = CORE.replace("return items[-1]", BOMB)
    report = place.test({PATH: bomb}, (OTHERS[1],), limits=Limits(processes=16))
    assert report.messages[OTHERS[1]] == "AssertionError: assert 15 == 'b'"


def test_equal_runs_are_made_once(open_place: Callable[..., Place]) -> None:
    place = open_place(memo=2)
    sandbox = place.sandbox

    async def twice() -> None:
        run = [sandbox.run_tests(place.image(), {PATH: BROKEN.encode()}, CHUNKS, None, Limits()) for _ in range(2)]
        first, second = await asyncio.gather(*run)
        assert first is second

    place.run(twice())
    assert (sandbox.stats.hits, sandbox.stats.misses) == (1, 1)
    for text in (CORE, CORE + "\n", CORE + "\n\n", BROKEN):  # the first result is forgotten
        place.test({PATH: text}, CHUNKS, hidden=False)
    assert (sandbox.stats.hits, sandbox.stats.misses) == (1, 5)


async def forever(call: Callable[[], Awaitable[object]]) -> None:
    while True:
        await call()


def test_death_of_the_zygote_is_noticed_at_once(library_image: Image) -> None:
    async def scenario() -> None:
        async with open_sandbox() as sandbox:
            loop = {PATH: CORE.replace('"""Lists."""', "while True: pass").encode()}
            run = asyncio.create_task(sandbox.run_tests(library_image, loop, (DOCTEST,), None, Limits(seconds=60)))
            box = await sandbox.create(library_image, Limits())
            await box.exec("true", 20)
            os.kill(sandbox.zygote_pid, signal.SIGKILL)
            async with asyncio.timeout(5):
                with pytest.raises(BoxDead) as death:
                    await run
                assert death.value.payer == "infra"
                with pytest.raises(BoxDead):  # its end takes a moment to get there
                    await forever(lambda: box.exec("true", 1))
                with pytest.raises(BoxDead):
                    await sandbox.run_tests(library_image, {}, (DOCTEST,), None, Limits())

    asyncio.run(scenario())


class NoticedControl:
    """A control socket whose other end has ended by itself, if it is alive, before `close` returns."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self.control, self.stat, self.noticed = control, Path(f"/proc/{pid}/stat"), False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.control, name)

    def close(self) -> None:
        self.control.close()
        deadline = time.monotonic() + 30
        while not self.noticed and time.monotonic() < deadline:
            self.noticed = not self.stat.exists() or ") Z " in self.stat.read_text()
            time.sleep(0.01)


def test_the_end_of_a_sandbox_is_one_of_its_own() -> None:
    """A zygote that ended by itself while it was killed would be reaped twice, and asyncio would print that."""

    async def scenario() -> int | None:
        async with open_sandbox() as sandbox:
            zygote = sandbox.backend.zygote
            zygote.control = control = NoticedControl(zygote.control, zygote.process.pid)
        assert control.noticed
        return zygote.process.returncode

    assert asyncio.run(scenario()) == -signal.SIGKILL


def test_a_lost_template_is_replaced(open_place: Callable[..., Place]) -> None:
    place = open_place(memo=0)
    assert place.test({}, CHUNKS).outcomes == dict.fromkeys(CHUNKS, "passed")
    zygote = place.sandbox.zygote_pid
    with open(f"/proc/{zygote}/task/{zygote}/children") as file:
        killed = [int(pid) for pid in file.read().split()]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    hidden = place.hidden
    with pytest.raises(BoxDead):  # its end takes a moment to get there
        place.run(forever(lambda: place.sandbox.run_tests(place.image(), {}, CHUNKS, hidden, Limits())))
    for _ in killed[1:]:  # each template's end costs at most one run
        with contextlib.suppress(BoxDead):
            place.test({}, CHUNKS)
    assert place.test({}, CHUNKS).outcomes == dict.fromkeys(CHUNKS, "passed")


def test_a_template_gets_the_code_of_files_that_its_task_leaves(
    open_place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a task broke must not come to its template as the code that another template compiled."""
    given: list[tuple[set[str], bool]] = []  # files whose code a template gets, and whether it is told what to import
    request = Connection.request

    async def watched(self: Connection, head: dict[str, Any], payload: bytes, *rest: Any) -> Any:
        if "warm" in head:
            told = json.loads(payload[4 : 4 + int.from_bytes(payload[:4], "little")])
            given.append(({path.rpartition("/")[2] for path, _ in told["changes"]}, bool(told["learned"])))
        return await request(self, head, payload, *rest)

    monkeypatch.setattr(Connection, "request", watched)
    place = open_place(memo=0)
    numbers = "src/lib/numbers.py"
    trees = ({PATH: BROKEN}, {numbers: NUMBERS.replace("2 * n", "3 * n")}, {PATH: BROKEN + "\n"}, {"README.md": ""})
    for changes in trees:
        image = Image(place.root / "repository", None, changes)
        report = place.run(place.sandbox.run_tests(image, {}, (DOCTEST,), None, Limits()))
        assert report.outcomes == {DOCTEST: "failed" if PATH in changes else "passed"}
    assert given == [
        (set(), False), ({"__init__.py"}, True), ({"__init__.py", "numbers.py"}, True),
        ({"__init__.py", "core.py", "numbers.py"}, True),
    ]  # fmt: skip


def test_missing_folder_is_a_launch_failure(place: Place) -> None:
    image = Image(place.root / "absent", None, {})
    with pytest.raises(LaunchFailed, match="absent"):
        place.run(place.sandbox.run_tests(image, {}, (DOCTEST,), None, Limits()))
