"""The checks of every server before its application sees a request: access, content type, and limits of the body.

Guarded(app, access)      ASGI; refusals are OpenAI's error objects
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.processes import return_memory
from etude.protocol.access import TOKEN_VARIABLE, Access, Refusal, headers
from etude.protocol.clients import begin_asking, client_of
from etude.protocol.wire import JSON

T = TypeVar("T")

_SMALL_BODY = 64 << 10  # bytes; such bodies are always taken, the number of connections bounds them
_INLINE = 16 << 10  # bytes that are parsed on the event loop: it takes less time than a thread does
_MAX_BRACKETS = 1_000_000  # an object takes thirty times its two bytes
_LINGER_SECONDS = 2.0  # a client that is still sending reads no answer from a connection that is closed at once
_RETRY_SECONDS = 1
_TRIMMED_BYTES = 16 << 20  # of released bodies, after which freed memory is returned to the system
_TRIM_SECONDS = 1.0  # after the release: the bodies of a flood are released together
MAX_DEPTH = 64
"""The deepest nesting of arrays and objects in bodies without a schema."""


@dataclass(frozen=True)
class ServiceLimits:
    """The limits of requests to one server."""

    body_bytes: int = 16 << 20
    held_bytes: int = 256 << 20  # of all bodies larger than 64 KiB whose requests are not answered yet
    body_seconds: float = 30.0
    still_seconds: float = 5.0  # during which at least `still_bytes` of a body come; a lost packet takes one or two
    still_bytes: int = 4 << 10
    head_bytes: int = 32 << 10
    head_seconds: float = 10.0
    idle_seconds: int = 5
    stall_seconds: float = 10.0  # during which a client reads nothing of its answer, whose engine's slot others want
    connections: int = 2048


LIMITS = ServiceLimits()


def busy(what: str) -> Refusal:
    """The refusal of a server that has too much to do; clients try again."""
    return Refusal(503, f"{what}: try again later", "overloaded", headers={"retry-after": str(_RETRY_SECONDS)})


def error(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    kind: str = "",
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An error in OpenAI's shape."""
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    again = {"retry-after": str(_RETRY_SECONDS)} if status == 503 else None
    return JSONResponse(body, status, headers or again)


def refused(_: Scope, refusal: Refusal) -> Response:
    """A refusal in OpenAI's shape."""
    return error(refusal.status, str(refusal), param=refusal.param, code=refusal.code, headers=refusal.headers)


def wrong_route(http: Request, e: Exception) -> Response:
    """An error of routing in OpenAI's shape."""
    assert isinstance(e, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(e.status_code)
    message = f"{http.method} {http.url.path[:200]} is not served here" if code else str(e.detail)
    return error(e.status_code, message, code=code, headers=dict(e.headers or {}))


def _broken(_: Request, e: Exception) -> Response:
    return error(500, f"this server failed: {type(e).__name__}")


def _refusing(_: Request, e: Exception) -> Response:
    assert isinstance(e, Refusal)
    return refused({}, e)


HANDLERS: Any = {HTTPException: wrong_route, Refusal: _refusing, Exception: _broken}
"""Exception handlers of an application: unknown routes, refusals and failures as OpenAI's error objects."""


class Guarded:
    """An ASGI application behind checks of its requests, whose bodies it gets whole. `authorise` checks beside
    `access`; both raise Refusal, from which `refuse` makes the response. `operator` are the paths that change the
    server for everybody: they need the token of `access` always, so without one they are refused."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        limits: ServiceLimits = LIMITS,
        *,
        content_types: tuple[str, ...] = (JSON,),
        operator: Collection[str] = (),
        authorise: Callable[[Scope], None] = lambda _: None,
        refuse: Callable[[Scope, Refusal], Response] = refused,
    ) -> None:
        self._app, self._access, self._limits = app, access, limits
        self._content_types, self._authorise, self._refuse = content_types, authorise, refuse
        self._operator = frozenset(operator)
        self.held = 0  # bytes of larger bodies
        self._released, self._trimming = 0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. A stopping server cancels its requests: a request is refused if no part of its answer was
        sent, and loses its connection otherwise."""
        if scope["type"] != "http":
            return
        held, started = _Held(self), False

        async def forward(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._run(scope, receive, forward, held)
        except asyncio.CancelledError:
            if not started:
                response = self._refuse(scope, busy("this server is stopping"))
                await response({**scope, "type": "http"}, receive, send)
        finally:
            held.release()

    async def _run(self, scope: Scope, receive: Receive, send: Send, held: _Held) -> None:
        """Reads a request and runs the application on it."""
        try:
            begin_asking(client_of(scope))
            self._access.check(scope)
            self._check_operator(scope)
            self._authorise(scope)
            self._check_head(scope)
            body = await self._read(receive, held)
        except ClientGone:
            return
        except Refusal as e:
            held.release()
            await self._answer(scope, receive, send, e)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive, held: _Held) -> bytes:
        body, limits, loop = bytearray(), self._limits, asyncio.get_running_loop()
        end, come = loop.time() + limits.body_seconds, 0  # bytes, when the present span began
        try:
            async with asyncio.timeout(min(limits.body_seconds, limits.still_seconds)) as span:
                async for part in _parts(receive):
                    if len(body) + len(part) > limits.body_bytes:
                        raise self._too_large()
                    body += part
                    held.hold(len(body))
                    if self.held > limits.held_bytes:
                        raise busy("this server holds too many large requests")
                    if len(body) - come >= limits.still_bytes:
                        come = len(body)
                        span.reschedule(min(end, loop.time() + limits.still_seconds))
        except TimeoutError:
            least = f"{limits.still_bytes} bytes of it in each {limits.still_seconds:g} seconds"
            message = f"the body is too slow: it must come within {limits.body_seconds:g} seconds, and {least}"
            raise Refusal(408, message, "timeout") from None
        return bytes(body)

    def released(self, count: int) -> None:
        """Bodies of so many bytes are no longer held. Soon the system gets their memory back, which the allocator would
        keep for as long as the server runs."""
        self._released += count
        if self._released >= _TRIMMED_BYTES and not self._trimming:
            self._trimming = True
            asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._released, self._trimming = 0, False
        asyncio.get_running_loop().run_in_executor(None, return_memory)

    def _check_operator(self, scope: Scope) -> None:
        if self._access.token is None and scope["path"].rstrip("/") in self._operator:
            raise Refusal(
                403,
                f"{scope['path']} changes this server for everybody, so it needs a token, and this server was started "
                f"without one: start it with ${TOKEN_VARIABLE} or --api-key-file",
                "no_token",
            )

    def _check_head(self, scope: Scope) -> None:
        length = next(headers(scope, b"content-length"), "")
        if length and int(length[:20]) > self._limits.body_bytes:
            raise self._too_large()
        has_body = length.strip("0") != "" or any(headers(scope, b"transfer-encoding"))
        if scope["method"] in ("GET", "HEAD", "OPTIONS") or not has_body:
            return
        kind = next(headers(scope, b"content-type"), "").partition(";")[0].strip().lower()
        if kind not in self._content_types:
            wanted = " or ".join(self._content_types)
            raise Refusal(415, f"a body must be of the content type {wanted}, not {kind[:100]!r}", "content_type")

    def _too_large(self) -> Refusal:
        return Refusal(413, f"a request has at most {self._limits.body_bytes} bytes", "body_too_large")

    async def _answer(self, scope: Scope, receive: Receive, send: Send, refusal: Refusal) -> None:
        """Refuses a request, discards the rest of its body for up to `_LINGER_SECONDS`, and ends the connection."""
        response = self._refuse(scope, refusal)
        start = [*response.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": response.status_code, "headers": start})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        try:
            async with asyncio.timeout(_LINGER_SECONDS if refusal.status != 408 else 0):
                async for _ in _parts(receive):
                    pass
        except (TimeoutError, ClientGone):
            pass
        await send({"type": "http.response.body", "body": b""})


class _Held:
    """The bytes that one request holds in a server."""

    def __init__(self, app: Guarded) -> None:
        self._app, self._bytes = app, 0

    def hold(self, count: int) -> None:
        if count > _SMALL_BODY:
            self._app.held += count - self._bytes
            self._bytes = count

    def release(self) -> None:
        if self._bytes:
            self._app.held -= self._bytes
            self._app.released(self._bytes)
            self._bytes = 0


class ClientGone(Exception):
    """The client closed the connection before its request was whole."""


async def _parts(receive: Receive):
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` with the body as one message, then the messages of the connection: its end."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


# Bodies ---------------------------------------------------------------------------------------------------------------


async def decoded(http: Request, kind: type[T], *, packed: bool = False) -> T:
    """The body of a guarded request as a `kind`, from JSON, or from MessagePack if `packed`. Large bodies are parsed in
    a thread. Raises Refusal."""
    data = await http.body()
    if len(data) <= _INLINE:
        return decode(data, kind, packed=packed)
    return await asyncio.to_thread(decode, data, kind, packed=packed)


def decode(data: bytes, kind: type[T], *, packed: bool = False) -> T:
    """A body as a `kind`, from JSON, or from MessagePack if `packed`. Raises Refusal."""
    try:
        if packed:
            return msgspec.msgpack.decode(data, type=kind)
        check_brackets(data)
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError as e:  # msgspec's errors are ValueErrors, too
        raise Refusal(400, str(e)) from None


def check_brackets(data: bytes) -> None:
    """Raises ValueError for JSON that would take many times its size as objects."""
    if data.count(b"[") + data.count(b"{") > _MAX_BRACKETS:
        raise ValueError(f"a body has at most {_MAX_BRACKETS} arrays and objects")


def characters(value: object) -> int:
    """The number of characters in the strings of a body, keys included; every other value counts as 1. Raises Refusal
    for a body nested more than `MAX_DEPTH` deep."""
    count, level = 0, [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, str):
                count += len(item)
            elif isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
            else:
                count += 1
        if not below:
            return count
        level = below
    raise Refusal(400, f"the body is nested too deeply: at most {MAX_DEPTH} arrays and objects within each other")
