"""What the owner reads of a box is bounded and has types: the agent pays for what cannot be read, and nobody waits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from etude.sandbox import connection as wire
from etude.sandbox.base import Box, BoxDead, BoxError, Garbled, Limits, TooLarge
from etude.sandbox.connection import Connection
from tests.helpers.boxlibrary import BROKEN, CORE, PATH, Place

ROOTS = ("src/lib",)
SPARSE = "mkdir -p {0} && for i in $(seq 20); do truncate -s 10M {0}/hole$i; done"
MANY = "mkdir -p {0} && cd {0} && for i in $(seq 12500); do : > $i; done; cd - >/dev/null"
LONG = 'cd {0}; n=$(printf "%0250d"); for i in 1 2 3 4 5 6; do mkdir $n; cd $n; done; : > file'
ODD = "printf x > {0}/$'\\xff'; printf y > {0}/$'a\\nb'"


@pytest.fixture
def make(place: Place) -> Iterator[Callable[[str], Box]]:
    """A live box after a command."""
    boxes: list[Box] = []

    def new(line: str) -> Box:
        boxes.append(place.run(place.sandbox.create(place.image({PATH: BROKEN}), Limits())))
        assert place.run(boxes[-1].exec(line, 30)).rc == 0
        return boxes[-1]

    yield new
    for box in boxes:
        place.run(box.close())


@pytest.mark.parametrize("line", [SPARSE, MANY, LONG], ids=["holes", "many files", "long paths"])
def test_the_agent_pays_for_what_is_too_much_to_read(place: Place, make: Callable[[str], Box], line: str) -> None:
    """Holes take nothing of a disk, but bytes of whoever reads them. Outside of the roots nobody pays."""
    inside, outside = make(line.format("src/lib")), make(f"printf x > note; {line.format('src')}")
    for roots in (ROOTS, ()):
        with pytest.raises(TooLarge) as refusal:
            place.run(inside.changes(roots))
        assert refusal.value.payer == "agent"
    with pytest.raises(TooLarge):
        place.run(outside.changes())
    place.run(outside.write(PATH, CORE.encode()))
    changes = place.run(outside.changes(ROOTS))
    assert changes[PATH] == CORE.encode()
    assert sum(len(data or b"") for data in changes.values()) < (10 << 20) + len(CORE)
    assert len(changes) <= 2001
    assert place.run(outside.exec("echo still here", 20)).output == "still here\n"


def test_changes_below_roots_are_all_changes_below_them(place: Place, make: Callable[[str], Box]) -> None:
    """However a folder came to be another: deleted, made anew, a file in its place, a link above it."""
    lines = [
        "echo x > src/lib/new.py; rm src/lib/numbers.py README.md; echo y > note",
        "rm -r src/lib",
        "rm -r src; mkdir -p src/lib; echo x > src/lib/core.py",
        "rm -r src; echo x > src",
        "rm -r src/lib; echo x > src/lib",
        "mv src elsewhere; ln -s elsewhere src",
        "mkdir src/libs; echo x > src/libs/x; rm -r src/lib/*; mkdir src/lib/core.py; echo z > src/lib/core.py/in",
    ]  # fmt: skip
    for line in lines:
        box = make(line)
        everything = place.run(box.changes())
        assert place.run(box.changes(ROOTS)) == everything, line  # little enough
        assert any(path.startswith("src/lib/") for path in everything), line
    box = make("echo x >> src/lib/core.py; echo x >> src/lib/numbers.py")
    assert place.run(box.changes(("src/lib/core.py",))).keys() == {PATH, "src/lib/numbers.py"}
    assert place.run(box.changes(("./", "."))).keys() == {PATH, "src/lib/numbers.py"}


def test_names_that_are_no_utf8_come_and_go(place: Place, make: Callable[[str], Box]) -> None:
    box = make(ODD.format("src/lib"))
    for roots in (ROOTS, ()):
        assert place.run(box.changes(roots)) == {"src/lib/\udcff": b"x", "src/lib/a\nb": b"y"}
    assert {"\udcff", "a\nb"} <= set(place.run(box.list("src/lib")))
    assert place.run(box.read("src/lib/\udcff")) == b"x"
    with pytest.raises(BoxError) as refusal:
        place.run(box.read("src/lib/\udcff/x"))
    str(refusal.value).encode()  # can be written anywhere
    assert place.run(box.exec("cat src/lib/$'\\xff'", 20)).output == "x"


def test_a_box_starts_with_any_change(place: Place) -> None:
    """A folder in the place of a file is the agent's good right; a path that no system takes is refused at once."""
    box = place.run(place.sandbox.create(place.image(), Limits()))
    place.run(box.delete("README.md"))
    place.run(box.write("README.md/x", b"x"))
    with pytest.raises(TooLarge):
        place.run(box.write("/".join(["n" * 200] * 30), b""))
    assert place.run(box.exec("cat README.md/x", 20)).output == "x"
    place.run(box.close())


HEADS: list[Any] = [
    [], None, 1, "x", {"bytes": -1}, {"bytes": 1 << 60}, {"bytes": "1"}, {"bytes": []}, {"id": []}, {"id": 1.5},
    {"id": 1, "refused": "BoxDead"}, {"id": 1, "refused": "__class__"}, {"id": 1, "refused": {}}, {"id": 1, "sizes": 3},
    {"id": 1, "sizes": [-1]}, {"id": 1, "sizes": [1 << 40]}, {"id": 1, "rc": "0"}, {"id": 1, "head": -5},
    {"id": 1, "cut": 10**400}, {"id": 1, "message": "\ud800"}, {"error": []},
]  # fmt: skip


@pytest.mark.parametrize("fault", [Garbled, BoxDead])
@pytest.mark.parametrize(
    "data",
    [*(json.dumps(head).encode() for head in HEADS), b"\xff", b"{", b"NaN", b'{"seconds": NaN}', b"[" * 200_000],
    ids=lambda data: repr(data[:40]),
)
def test_messages_of_another_form_break_the_connection(data: bytes, fault: type[BoxError]) -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            connection = Connection(ours, fault)
            asked = asyncio.create_task(connection.request({}, b"", 20))
            await asyncio.sleep(0)
            await asyncio.to_thread(theirs.sendall, struct.pack("<I", len(data)) + data)
            for call in (asked, connection.request({}, b"", 20)):
                with pytest.raises(fault, match="wrong form"):
                    await call
            connection.close()

    asyncio.run(scenario())


def test_a_head_without_end_is_not_waited_for() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            connection = Connection(ours, Garbled)
            theirs.sendall(b"\xff\xff\xff\x7f")
            with pytest.raises(Garbled, match="a head of 2147483647 bytes"):
                await connection.request({}, b"", 20)

    asyncio.run(scenario())


def test_descriptors_do_not_pile_up() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull) as null:
            connection = Connection(ours, Garbled)
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(wire.MAX_DESCRIPTORS):
                socket.send_fds(theirs, [struct.pack("<I", 2) + b"{}"], [null.fileno()] * 4)
            with pytest.raises(Garbled, match="too many descriptors"):
                await connection.request({}, b"", 20)
            assert len(os.listdir("/proc/self/fd")) < before

    asyncio.run(scenario())


def test_a_head_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the pieces are in which its body comes."""
    parsed: list[int] = []
    decode = wire.msgspec.json.decode

    def counting(data: bytes, **options: Any) -> Any:
        parsed.append(len(data))
        return decode(data, **options)

    monkeypatch.setattr(wire.msgspec.json, "decode", counting)

    async def scenario() -> tuple[Any, bytes]:
        ours, theirs = socket.socketpair()
        with theirs:
            connection = Connection(ours)
            asked = asyncio.create_task(connection.request({}, b"", 20))
            head = json.dumps({"id": 1, "bytes": 3000, "sizes": [1] * 3000}).encode()
            theirs.sendall(struct.pack("<I", len(head)) + head)
            for _ in range(30):
                theirs.sendall(b"x" * 100)
                await asyncio.sleep(0.001)
            try:
                return await asked
            finally:
                connection.close()

    reply, body = asyncio.run(scenario())
    assert (len(reply.sizes), body, len(parsed)) == (3000, b"x" * 3000, 1)
