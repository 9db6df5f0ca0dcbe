"""Clients that stand still, do not read, or have no token: what a server gives up for them, and what it gives back."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.protocol import Client, asking, guard
from etude.protocol.access import Access
from etude.protocol.guard import HANDLERS, Guarded, ServiceLimits
from tests.helpers.http_apps import guarded
from tests.protocol.test_guard import HEAD, ask, connect, post, read

LIMITS = ServiceLimits(still_seconds=0.5, still_bytes=1000, stall_seconds=0.8)
ended = threading.Semaphore(0)  # streams


async def stream(_: Request) -> Response:
    async def lines():
        try:
            while True:
                yield bytes(1000)
                await asyncio.sleep(0.001)
        finally:
            ended.release()

    return StreamingResponse(lines())


async def who(http: Request) -> Response:
    await http.body()
    return JSONResponse(asking())


async def until_gone(http: Request) -> Response:
    await http.body()
    while (await http.receive())["type"] != "http.disconnect":
        pass
    ended.release()
    return JSONResponse({})


app = Starlette(
    routes=[
        Route("/", who, methods=["GET", "POST"]),
        Route("/pause", who, methods=["POST"]),
        Route("/stream", stream),
        Route("/gone", until_gone),
    ],
    exception_handlers=HANDLERS,
)


@pytest.fixture(scope="module")
def port():
    with guarded(app, limits=LIMITS) as found:
        yield found


def test_a_body_that_stands_still_or_drips_is_cut(port: int) -> None:
    for drip in (b"", b" "):
        with connect(port) as link:
            link.sendall(HEAD + b"Content-Length: 10000\r\n\r\n" + b" " * 5000)
            begun = time.monotonic()
            answer = b""
            while not select.select([link], [], [], 0.05)[0] and time.monotonic() - begun < 5:
                link.sendall(drip)
            with suppress(ConnectionError):
                while part := link.recv(4096):
                    answer += part
            assert answer.startswith(b"HTTP/1.1 408"), answer
            assert b"1000 bytes of it in each 0.5 seconds" in answer
            assert 0.4 < time.monotonic() - begun < 2.5


def test_a_slow_body_that_goes_on_is_taken(port: int) -> None:
    body = json.dumps({"a": "x" * 9990}).encode()
    with connect(port) as link:
        link.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 1500):
            link.sendall(body[start : start + 1500])
            time.sleep(0.15)
        assert read(link)[0] == 200


def test_a_stream_that_nobody_reads_ends(port: int) -> None:
    """Though the system's buffers would take megabytes of it."""
    with connect(port) as link:
        link.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ended.acquire(timeout=10)


def test_a_stream_that_is_read_slowly_goes_on(port: int) -> None:
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        link.connect(("127.0.0.1", port))
        link.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(12):
            time.sleep(0.2)
            assert link.recv(32 << 10)
        assert not ended.acquire(blocking=False)
    assert ended.acquire(timeout=10)


def test_a_client_that_leaves_more_than_is_read_and_goes_is_noticed(port: int) -> None:
    with connect(port) as link:
        link.sendall(b"GET /gone HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"GET /gone HTTP/1.1\r\n" + bytes(200_000))
    assert ended.acquire(timeout=10)


def test_what_changes_a_server_needs_a_token() -> None:
    pause = post(b"{}", path=b"/pause")
    with guarded(app, operator=("/pause",)) as port:
        status, _, body = ask(port, pause)
        assert (status, body["error"]["code"]) == (403, "no_token")
        assert "start it with $ETUDE_API_KEY or --api-key-file" in body["error"]["message"]
        assert ask(port, post(b"{}", path=b"/pause/"))[0] == 403
        assert ask(port, post(b"{}"))[0] == 200
    with guarded(app, Access("s3cret"), operator=("/pause",)) as port:
        assert ask(port, pause)[0] == 401
        assert ask(port, post(b"{}", b"Authorization: Bearer s3cret", path=b"/pause"))[0] == 200


def test_the_application_knows_whose_request_it_answers(port: int) -> None:
    with connect(port) as link, connect(port) as other:
        for each in (link, other):
            each.sendall(post(b"{}"))
        own, others = Client(*read(link)[2]), Client(*read(other)[2])
        assert own == Client("127.0.0.1", str(link.getsockname()[1]))
        assert others.group == own.group
        assert others.member != own.member
    assert ask(port, post(b"{}", b"X-Etude-Asker: k/7"))[2] == ["key k", "7"]


def test_a_server_that_stops_amid_a_body_refuses_it() -> None:
    """Without a traceback of the request, in whatever it waits."""

    async def cut() -> tuple[list[Any], int]:
        parts = [{"type": "http.request", "body": bytes(100_000), "more_body": True}]

        async def receive() -> Any:
            if not parts:
                await asyncio.sleep(30)
            return parts.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        sent: list[Any] = []
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"200000")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        server = Guarded(app, Access())
        request = asyncio.ensure_future(server(scope, receive, send))
        await asyncio.sleep(0.05)
        assert server.held == 100_000
        request.cancel()
        await request
        return sent, server.held

    sent, held = asyncio.run(cut())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert (sent[0]["status"], held) == (503, 0)


def test_memory_of_bodies_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, soon after the last of several, and not for small ones."""
    returned = threading.Semaphore(0)
    monkeypatch.setattr(guard, "return_memory", returned.release)
    monkeypatch.setattr(guard, "_TRIM_SECONDS", 0.2)
    with guarded(app, limits=LIMITS) as port, ExitStack() as stack:
        assert ask(port, post(b" " * 70_000 + b"{}"))[0] == 200
        assert not returned.acquire(timeout=0.5)
        for _ in range(4):
            link = stack.enter_context(connect(port))
            link.sendall(HEAD + b"Content-Length: 9000001\r\n\r\n" + bytes(9_000_000))
        assert returned.acquire(timeout=10)
        assert not returned.acquire(timeout=0.5)
