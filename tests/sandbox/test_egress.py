"""The way out of a box: what the policy lets through, what TLS and HTTP say, and real boxes before a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from etude.audit.attacks.gates import GATES
from etude.audit.attacks.outside import NAME, Outside, outside
from etude.config import RLConfig
from etude.errors import UserError
from etude.grading.cheats import CheatSignals, cheat_signals, plant_decoys
from etude.grading.grade import Grade
from etude.grading.runner import open_sandbox
from etude.records import Outcome
from etude.rollout import Taskset, dataset_part
from etude.run.parts import egress_of
from etude.sandbox.base import Box, Image, Limits
from etude.sandbox.egress import parsing
from etude.sandbox.egress.gate import MAX_OPEN
from etude.sandbox.egress.policy import (
    AllowedHost,
    Egress,
    EgressRefused,
    EgressRequest,
    package_index,
    parse_allowed_hosts,
    public,
    resolve,
    wheel_project,
)
from tests.helpers.boxlibrary import TASK, Place, as_nobody

ROOT = Path(__file__).parents[2]

LIST = Egress(
    parse_allowed_hosts(["docs.example.test", "*.mirror.example", "git.example.test:8443", "in.corp.test:80@10.1.2.3"])
)


@pytest.mark.parametrize(
    ("name", "port", "allowed"),
    [
        ("docs.example.test", 443, True),
        ("docs.example.test", 80, True),
        ("docs.example.test", 8443, False),
        ("a.mirror.example", 443, True),
        ("a.b.mirror.example", 443, True),
        ("mirror.example", 443, False),
        ("evilmirror.example", 443, False),
        ("docs.example.test.evil.example", 443, False),
        ("git.example.test", 8443, True),
        ("git.example.test", 443, False),
        ("in.corp.test", 80, True),
        ("10.1.2.3", 80, False),
        ("", 443, False),
        ("docs..example.test", 443, False),
    ],
)
def test_the_list(name: str, port: int, allowed: bool) -> None:
    if allowed:
        assert LIST.find(name, port).covers(name, port)
    else:
        with pytest.raises(EgressRefused):
            LIST.find(name, port)


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "::1", "[::1]", "fe80::1%eth0", "2130706433", "0x7f.1", "127.1", "0177.0.0.1"]
)
def test_addresses_are_no_names(name: str) -> None:
    with pytest.raises(EgressRefused, match="an address"):
        Egress((AllowedHost(name),)).find(name, 80)


@pytest.mark.parametrize(
    "entry", ["", "localhost", "10.0.0.1", "a_b", "https://a.example", "a.example:0", "a.example:x", "a.example@b", "*"]
)
def test_entries_that_are_no_hosts(entry: str) -> None:
    with pytest.raises(UserError, match="no host to allow"):
        parse_allowed_hosts([entry])


@pytest.mark.parametrize(
    ("address", "right"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("172.17.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fd00:ec2::254", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::ffff:169.254.169.254", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b::5db8:d822", True),
        ("2002:a9fe:a9fe::1", False),
        ("2002:5db8:d822::1", True),
    ],
)
def test_private_addresses_however_they_are_written(address: str, right: bool) -> None:
    assert public(address) == right


def test_names_that_lead_into_a_private_network() -> None:
    with pytest.raises(EgressRefused, match="private"):
        asyncio.run(resolve(AllowedHost("localhost"), "localhost", 80))
    assert asyncio.run(resolve(AllowedHost("in.corp.test", (80,), "10.1.2.3"), "in.corp.test", 80)) == ["10.1.2.3"]


def hello(name: str | None) -> bytes:
    """What a TLS client says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def cut(data: bytes, size: int) -> bytes:
    """The same handshake message in records of `size` bytes."""
    message = data[5:]
    parts = [message[i : i + size] for i in range(0, len(message), size)]
    return b"".join(data[:3] + len(part).to_bytes(2) + part for part in parts)


def read(data: bytes) -> tuple[bytes, str | None]:
    async def work() -> tuple[bytes, str | None]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await parsing.read_hello(reader)

    return asyncio.run(work())


@pytest.mark.parametrize("size", [1, 3, 40, 16000])
def test_the_server_name_of_a_client_hello(size: int) -> None:
    for name in ("docs.example.test", None):
        data = cut(hello(name), size)
        assert read(data + b"more") == (data, name)


def test_what_is_no_client_hello() -> None:
    whole = hello("docs.example.test")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"\x16\x03\x01\x00\x00" * 9, b"\x17" + whole[1:]):
        with pytest.raises(EgressRefused):
            read(data)
    with pytest.raises(EgressRefused):
        read(
            b"\x16\x03\x01\x40\x00"
            + b"\x01\x00\xff\xff"
            + bytes((1 << 14) - 4)
            + b"\x16\x03\x01\x10\x00"
            + bytes(1 << 12)
        )
    with pytest.raises(asyncio.IncompleteReadError):
        read(whole[:-1])
    for at in range(38, len(whole) - 5):  # cut inside of the message: refused, or without a name, never a crash
        message = whole[9 : 5 + at]
        with contextlib.suppress(EgressRefused):
            assert parsing.server_name(message) in (None, "docs.example.test")


def test_a_request_goes_on_without_what_tells_who_asks() -> None:
    head = parsing.parse(
        b"GET http://Docs.Example.test/a?b=1#c HTTP/1.1\r\nHost: docs.example.test\r\nAccept: */*\r\n"
        b"Authorization: Basic eDp5\r\nCookie: a=b\r\nProxy-Connection: keep-alive\r\nConnection: keep-alive\r\n\r\n"
    )
    parsing.check_plain(head)
    assert (head.method, head.host, head.port, head.path) == ("GET", "docs.example.test", 80, "/a?b=1")
    assert head.onward() == (
        b"GET /a?b=1 HTTP/1.1\r\nhost: docs.example.test\r\nconnection: close\r\naccept: */*\r\n\r\n"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example/ SPDY/1\r\n\r\n",
        b"GET http://u:p@a.example/ HTTP/1.1\r\n\r\n",
        b"GET ftp://a.example/ HTTP/1.1\r\n\r\n",
        b"GET http://a.example:99999/ HTTP/1.1\r\n\r\n",
        b"CONNECT a.example:443/x HTTP/1.1\r\n\r\n",
        b"CONNECT u@a.example:443 HTTP/1.1\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nA: b\nHost: c\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nA : b\r\n\r\n",
        b"\xff\xfe\r\n\r\n",
        b"\r\n\r\n",
    ],
)
def test_malformed_requests(data: bytes) -> None:
    with pytest.raises(EgressRefused):
        parsing.parse(data)


def test_names_of_projects() -> None:
    assert wheel_project("pydash-8.1.0") == "pydash"
    assert wheel_project("python-dateutil-2.9.0.post0") == "python-dateutil"
    assert wheel_project("plain") == "plain"
    index = package_index("https://pypi.example/simple", date(2024, 1, 1), ["Zope.Interface"])
    assert (index.url, index.without) == ("https://pypi.example/simple/", {"zope-interface"})
    for url in ("pypi.example", "ftp://pypi.example/", "https:///simple", "http://[x/"):
        with pytest.raises(UserError, match="not the URL of a simple index"):
            package_index(url, date(2024, 1, 1), ["x"])


@dataclass
class Gated:
    """A sandbox whose boxes have a way out to a server of this machine."""

    place: Place
    world: Outside
    log: Path

    def box(self) -> Box:
        limits = Limits(memory_mb=512, processes=48, disk_mb=16)
        return self.place.run(self.place.sandbox.create(self.place.image(), limits))

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture(scope="module")
def gated(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gated]:
    loop = asyncio.new_event_loop()
    log = tmp_path_factory.mktemp("egress") / "egress.jsonl"
    with outside() as world:
        opened = open_sandbox(memo=0, egress=world.egress(log))
        sandbox = loop.run_until_complete(opened.__aenter__())
        yield Gated(Place(loop, sandbox, library), world, log)
        loop.run_until_complete(opened.__aexit__(None, None, None))
    loop.close()


@pytest.mark.parametrize("item", GATES)
def test_the_suites_items_with_a_way_out(gated: Gated, item: str) -> None:
    """A6, D8, D10: nothing is let through that must not be, and the honest requests beside it are."""
    box = gated.box()
    assert gated.place.run(GATES[item](box, gated.world)) == ""
    gated.place.run(box.close())


NOBODY = """
import asyncio, tempfile
from pathlib import Path
from etude.audit.attacks.gates import GATES
from etude.audit.attacks.outside import outside
from etude.sandbox.base import Image, Limits
from etude.grading.runner import open_sandbox
async def main(folder):
    with outside() as world:
        async with open_sandbox(memo=0, egress=world.egress(None)) as sandbox:
            print("began", flush=True)
            for item in ("D8", "D10"):
                box = await sandbox.create(Image(Path(folder), None, {}), Limits())
                print(item, repr(await GATES[item](box, world)))
                await box.close()
with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root then")
def test_the_way_out_without_root() -> None:
    done = as_nobody(NOBODY, proof="began")
    assert done.stdout == "began\nD8 ''\nD10 ''\n", done.stderr


def test_each_request_is_a_line_of_the_log(gated: Gated) -> None:
    box, before = gated.box(), len(gated.log.read_text().splitlines()) if gated.log.exists() else 0
    url = f"http://{NAME}:{gated.world.port}/page?q=1"
    line = f"python3 -c 'import urllib.request as u; print(u.urlopen(\"{url}\").read().decode())'"
    assert gated.place.run(box.exec(line, 30)).output == "a page from outside\n\n"
    gated.place.run(box.exec(line.replace(NAME, "evil.example.com") + " 2>/dev/null", 30))
    gated.place.run(box.close())
    first, second = gated.lines()[before:]
    assert {key: first[key] for key in ("method", "host", "port", "path", "allowed", "why")} == {
        "method": "GET", "host": NAME, "port": gated.world.port, "path": "/page?q=1", "allowed": True, "why": "",
    }  # fmt: skip
    assert isinstance(first["sent"], int)
    assert isinstance(first["received"], int)
    assert first["sent"] > 50 < first["received"]
    assert (second["host"], second["allowed"], second["received"]) == ("evil.example.com", False, 0)
    assert first["box"] == second["box"]
    requests = box.requests()
    assert requests is not None
    assert [request.why for request in requests] == ["", "not on the list"]


def test_a_box_that_is_closed_ends_its_requests(gated: Gated) -> None:
    """With their lines in the log, and no task left."""
    box = gated.box()
    client = (
        "import socket, time\nlinks = [socket.create_connection(('127.0.0.1', 3128)) for _ in range(3)]\n"
        f"for link in links: link.sendall(b'CONNECT {NAME}:{gated.world.port} HTTP/1.1\\r\\n\\r\\n')\n"
        "for link in links: print(link.recv(99), flush=True)\ntime.sleep(60)\n"
    )
    gated.place.run(box.write("client.py", client.encode()))
    line = (
        "mkfifo /tmp/said; python3 client.py > /tmp/said & for i in 1 2 3; do read line; echo $line; done < /tmp/said"
    )
    assert gated.place.run(box.exec(line, 30)).output.count("200 Connection established") == 3
    gated.place.run(box.close())
    requests = box.requests()
    assert requests is not None
    assert [request.why for request in requests] == ["the box was closed"] * 3
    assert len(asyncio.all_tasks(gated.place.loop)) <= 1  # the sandbox's own watch


def test_connections_are_counted(gated: Gated) -> None:
    box = gated.box()
    client = (
        "import socket\nlinks = [socket.create_connection(('127.0.0.1', 3128)) for _ in range(40)]\n"
        "for link in links[MOST:]:\n  try: print(len(link.recv(9)))\n  except ConnectionResetError: print(0)\n"
    )
    done = gated.place.run(box.exec(f"python3 - <<'END'\nMOST = {MAX_OPEN}\n{client}END", 30))
    assert done.output == "0\n" * (40 - MAX_OPEN)
    gated.place.run(box.close())
    requests = box.requests()
    assert requests is not None
    assert [(request.why, request.allowed) for request in requests] == [("too many requests", False)] * (40 - MAX_OPEN)


def test_what_a_configuration_lets_boxes_reach(tmp_path: Path) -> None:
    tiny = Taskset((dataset_part(ROOT / "tests/tasks/data/tiny"),))

    def found(**sandbox: object) -> Egress | None:
        return egress_of(RLConfig.model_validate({"tasks": {"repository": "x"}, "sandbox": sandbox}), tiny, tmp_path)

    assert found() is None
    assert found(egress=["a.example"]) == Egress((AllowedHost("a.example"),), None, tmp_path / "egress.jsonl")
    egress = found(index="https://pypi.example/simple", index_before="2024-05-01", index_without=["Tiny_Fork"])
    assert egress is not None
    assert egress.index is not None
    assert egress.index.before == datetime(2024, 5, 1, tzinfo=UTC)
    assert egress.index.without >= {"tiny-fork", "tiny"}
    with pytest.raises(UserError, match="no host to allow"):
        found(egress=["10.0.0.1"])


def test_without_a_way_out_there_is_no_trace_of_one(place: Place) -> None:
    box = place.run(place.sandbox.create(place.image(), Limits()))
    done = place.run(box.exec("env | grep -i -E 'proxy|pip_|uv_'; tail -n +2 /proc/net/tcp", 20))
    assert done.output == ""
    assert box.requests() is None
    place.run(box.close())


def request(host: str, allowed: bool) -> EgressRequest:
    return EgressRequest("GET", host, 80, "/", 10, 20, allowed, "" if allowed else "not on the list")


def test_what_a_box_asked_for_marks_its_episode(tmp_path: Path) -> None:
    decoys = plant_decoys(TASK, 3)
    graded = Grade(Outcome.SCORED, 1.0, True, "", None)
    image = Image(tmp_path, None, {})

    def found(*requests: EgressRequest) -> CheatSignals:
        return cheat_signals(TASK, image, {}, (), decoys, graded, False, requests)

    assert found(request(NAME, True)).flags == ()
    assert found(request(NAME, True), request(NAME, True)).figures["egress/bytes"] == 40.0
    assert "egress" in found(request(NAME, True), request("evil.example.com", False)).flags
    assert "decoy" in found(request(f"{decoys.secrets[2]}.internal", False)).flags
