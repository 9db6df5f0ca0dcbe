"""What every server does before its application sees a request, over raw sockets: sizes, deadlines, forms."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.protocol.access import Access, Refusal
from etude.protocol.backends import EngineClient, EngineError
from etude.protocol.guard import HANDLERS, LIMITS, MAX_DEPTH, Guarded, ServiceLimits, busy, characters, decode, decoded
from etude.protocol.wire import GenerateRequest, ScoreRequest
from tests.helpers.http_apps import guarded

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
QUICK = ServiceLimits(
    body_bytes=200_000, held_bytes=400_000, body_seconds=0.6, head_bytes=2000, head_seconds=0.6, idle_seconds=1,
    stall_seconds=0.4, connections=20,
)  # fmt: skip


async def echo(http: Request) -> Response:
    data = await decoded(http, dict[str, Any]) if http.method == "POST" else {}
    return JSONResponse({"keys": sorted(data)})


arrived, go_on = threading.Semaphore(0), threading.Event()  # requests to /wait whose bodies are read; their answers


async def wait(http: Request) -> Response:
    await http.body()
    arrived.release()
    while not go_on.is_set():
        await asyncio.sleep(0.01)
    return JSONResponse({})


async def large(_: Request) -> Response:
    return Response(bytes(50_000_000))


async def fail(_: Request) -> Response:
    raise KeyError("a bug")


async def full(_: Request) -> Response:
    raise busy("this test is full")


app = Starlette(
    routes=[
        Route("/", echo, methods=["GET", "POST"]), Route("/wait", wait, methods=["POST"]), Route("/large", large),
        Route("/fail", fail), Route("/full", full), Route("/generate", full, methods=["POST"]),
    ],
    exception_handlers=HANDLERS,
)  # fmt: skip


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def read(link: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of one answer. Raises ConnectionError if the connection ends before it is whole."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = link.recv(1)  # not a byte of the next answer on this connection
        if not part:
            raise ConnectionError(f"closed after {head[:100]!r}")
        head += part
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = b""
    while left := int(headers["content-length"]) - len(body):
        part = link.recv(min(left, 65536))
        if not part:
            raise ConnectionError("closed within a body")
        body += part
    return int(first.split()[1]), headers, json.loads(body) if "json" in headers.get("content-type", "") else body


def ask(port: int, data: bytes) -> tuple[int, dict[str, str], Any]:
    with connect(port) as link:
        link.sendall(data)
        return read(link)


def post(body: bytes, *headers: bytes, path: bytes = b"/") -> bytes:
    length = b"Content-Length: %d" % len(body)
    return HEAD.replace(b"POST /", b"POST " + path) + b"\r\n".join([length, *headers]) + b"\r\n\r\n" + body


def closed(link: socket.socket) -> bool:
    """Whether the server has closed the connection, waiting as long as `link` does."""
    try:
        return link.recv(65536) == b"" or closed(link)
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with guarded(app) as found:
        yield found


@pytest.fixture(scope="module")
def quick() -> Iterator[int]:
    with guarded(app, limits=QUICK) as found:
        yield found


def test_an_answer(port: int) -> None:
    assert ask(port, post(b'{"b": 1, "a": 2}'))[2] == {"keys": ["a", "b"]}
    chunked = HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n'
    assert ask(port, chunked)[2] == {"keys": ["a"]}
    with connect(port) as link:  # one after the other on one connection, the second sent before the first is answered
        link.sendall(post(b"{}") + post(b'{"c": 1}'))
        assert [read(link)[2]["keys"] for _ in range(2)] == [[], ["c"]]


@pytest.mark.parametrize(("data", "status", "code"), [
    (b"GET /no HTTP/1.1\r\nHost: localhost\r\n\r\n", 404, "not_found"),
    (b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405, "method_not_allowed"),
    (b"GET /fail HTTP/1.1\r\nHost: localhost\r\n\r\n", 500, None),
    (b"GET /full HTTP/1.1\r\nHost: localhost\r\n\r\n", 503, "overloaded"),
    (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403, "host"),
    (b"GET / HTTP/1.0\r\n\r\n", 403, "host"),
    (b"POST / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", 403, "origin"),
    (post(b"{}").replace(b"application/json", b"text/plain"), 415, "content_type"),
    (post(b"{}").replace(b"application/json", b"application/x-www-form-urlencoded"), 415, "content_type"),
    (post(b"{}").replace(b"Content-Type: application/json\r\n", b""), 415, "content_type"),
    (post(b"{}").replace(b"application/json", b"application/json; charset=utf-8"), 200, None),
    (b"GET / HTTP/1.1\r\n\r\n", 400, None),
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, None),
    (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, None),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400, None),
    (post(b"{"), 400, None),
    (post(b"[]"), 400, None),
    (post(b'{"a": NaN}'), 400, None),
    (post(b'{"a": 1e400}'), 400, None),
    (post(b'{"a": "\xff"}'), 400, None),
    (post(b'{"a": "\\ud800"}'), 400, None),
    (post(b'{"a":' * 50_000 + b"}" * 50_000), 400, None),
    (post(b"[" * 1_100_000), 400, None),
])  # fmt: skip
def test_refusals_are_openais_error_objects(port: int, data: bytes, status: int, code: str | None) -> None:
    got, headers, body = ask(port, data)
    assert got == status, body
    if status != 200:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == code
        assert body["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")
        assert len(body["error"]["message"]) < 1000
    assert ("retry-after" in headers) == (status == 503)
    assert "GET, POST" not in headers.get("allow", "") or status == 405


def test_a_body_of_100_mb_is_refused_unread_and_the_answer_arrives(port: int) -> None:
    """Also at a client that reads only once it has sent everything; with a length, and in chunks without one."""
    part = bytes(1 << 20)
    for head in (b"Content-Length: %d\r\n\r\n" % (100 << 20), b"Transfer-Encoding: chunked\r\n\r\n"):
        with connect(port) as link:
            link.sendall(HEAD + head)
            try:
                for _ in range(100):
                    link.sendall(part if b"Length" in head else b"%x\r\n%b\r\n" % (len(part), part))
            except ConnectionError:
                pass  # it sends for longer than the server listens
            status, headers, body = read(link)
            assert (status, headers["connection"], body["error"]["code"]) == (413, "close", "body_too_large")
    with connect(port) as link:
        link.sendall(HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n")
        assert read(link)[0] in (400, 413)


def test_a_head_that_is_too_long_or_too_slow(quick: int) -> None:
    assert ask(quick, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000)[0] == 400
    with connect(quick) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        status, _, body = read(link)
        assert (status, body["error"]["code"]) == (408, "timeout")
        assert closed(link)
    with connect(quick) as link:
        sent = 0
        with suppress(ConnectionError):
            for byte in b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100:
                link.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.05)
        assert sent < 130, "a byte now and then does not help"


def test_a_connection_without_a_request_is_closed(quick: int) -> None:
    with connect(quick) as silent, connect(quick) as idle:
        idle.sendall(post(b"{}"))
        assert read(idle)[0] == 200
        assert closed(silent)
        assert closed(idle)
    with connect(quick) as link:  # half of a second request
        link.sendall(post(b"{}") + b"GET / HT")
        assert read(link)[0] == 200
        assert closed(link)


def test_a_body_that_is_too_slow(quick: int) -> None:
    with connect(quick) as link:
        link.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
        status, _, body = read(link)
        assert (status, body["error"]["code"]) == (408, "timeout")
        assert closed(link)


def test_an_answer_that_nobody_reads(port: int, quick: int) -> None:
    with connect(quick) as link:
        link.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(2.0)
        taken = 0
        try:
            while part := link.recv(1 << 20):
                taken += len(part)
        except ConnectionError:
            pass
    assert taken < 50_000_000


def test_half_requests_make_room_for_whole_ones() -> None:
    limits = ServiceLimits(connections=50)
    with guarded(app, limits=limits) as port, ExitStack() as stack:
        links = [stack.enter_context(connect(port)) for _ in range(300)]
        for link in links:
            with suppress(ConnectionError):
                link.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-")
        assert ask(port, post(b'{"a": 1}'))[2] == {"keys": ["a"]}
        for link in links[:240]:
            assert closed(link)


def test_connections_with_requests_are_not_closed_for_others(quick: int) -> None:
    def run(results: list[int]) -> None:
        results.append(ask(quick, post(b"{}", path=b"/wait"))[0])

    go_on.clear()
    results: list[int] = []
    threads = [threading.Thread(target=run, args=(results,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert arrived.acquire(timeout=30)
    status, headers, _ = ask(quick, post(b"{}"))
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert (status, headers["retry-after"]) == (503, "1")
    assert results == [200] * 20


def test_bodies_together_are_bounded(quick: int) -> None:
    """Small ones are taken all the same."""
    go_on.clear()
    body = b'{"a": "' + b"x" * 190_000 + b'"}'
    with ExitStack() as stack:
        links = [stack.enter_context(connect(quick)) for _ in range(4)]
        for link in links:
            link.sendall(post(body, path=b"/wait"))
        for _ in range(2):
            assert arrived.acquire(timeout=30)
        assert ask(quick, post(b'{"a": 1}'))[0] == 200
        refused: list[socket.socket] = []
        while len(refused) < 2:
            refused, _, _ = select.select(links, [], [], 30)
            assert refused
        assert [read(link)[0] for link in refused] == [503, 503]
        go_on.set()
        assert [read(link)[0] for link in links if link not in refused] == [200, 200]
    assert ask(quick, post(body))[0] == 200, "room is given back"


def test_a_server_that_stops_refuses_what_it_did_not_answer() -> None:
    """Without a traceback of the request, which raises CancelledError wherever it waits."""

    async def cut(path: str) -> list[Any]:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/half":
                await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.sleep(30)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        sent: list[Any] = []
        scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"localhost")]}
        request = asyncio.ensure_future(Guarded(application, Access())(scope, receive, send))
        await asyncio.sleep(0.05)
        request.cancel()
        await request
        return sent

    whole, half = asyncio.run(cut("/")), asyncio.run(cut("/half"))
    assert [message["type"] for message in whole] == ["http.response.start", "http.response.body"]
    assert (whole[0]["status"], json.loads(whole[1]["body"])["error"]["code"]) == (503, "overloaded")
    assert [message["type"] for message in half] == ["http.response.start"], "the connection ends here"


@contextmanager
def refused(status: int = 400) -> Iterator[None]:
    with pytest.raises(Refusal) as found:
        yield
    assert found.value.status == status


def test_bodies_are_decoded_within_bounds() -> None:
    many = [[1]] * 5000
    for kind, body in ((GenerateRequest, {"ids": [1], "max_tokens": 1, "documents": many}),
                       (ScoreRequest, {"sequences": many})):  # fmt: skip
        with refused():
            decode(msgspec.json.encode(body), kind)
        with refused():
            decode(msgspec.msgpack.encode(body), kind, packed=True)
    for bomb in (b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 100_000, b"\xdf\x00\xff\xff\xff", b"\xc1",
                 b"\x81\xa3ids\xdd\x00\xff\xff\xff" + b"\x90" * 1000, b""):  # fmt: skip
        with refused():
            decode(bomb, GenerateRequest, packed=True)


def test_depth_and_length_of_free_parts() -> None:
    assert characters({"a": ["bc", 1, None, {"d": "e"}]}) == 1 + 2 + 1 + 1 + 1 + 1
    deep: Any = "x"
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert characters(deep) == 1
    with refused():
        characters([deep])
    assert characters([{}] * 10) == 0


def test_a_busy_server_is_asked_again(port: int) -> None:
    async def ask_engine() -> None:
        async with EngineClient([f"http://127.0.0.1:{port}"]) as client:
            await client.generate(GenerateRequest(ids=[1], max_tokens=1), 1.5)

    start = time.monotonic()
    with pytest.raises(EngineError, match=r"was busy for 1\.5 seconds: this test is full"):
        asyncio.run(ask_engine())
    assert time.monotonic() - start >= 1.5
    assert LIMITS.body_bytes == 16 << 20
