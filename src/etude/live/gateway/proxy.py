"""The proxy between clients and clusters: answers pass byte for byte, as they come."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from etude.config import LiveConfig
from etude.live.gateway.answer_ids import AnswerId
from etude.live.gateway.keys import KeyCheck
from etude.live.gateway.queue import RecordQueue
from etude.live.gateway.recorder import TurnRecorder
from etude.live.gateway.requests import RequestReader, TurnRequest
from etude.live.gateway.upstream import AWAY, Clusters, Headers, Server, UpstreamAnswer
from etude.live.gateway.view import LogView
from etude.live.log.records import Arm
from etude.live.log.tenants import ApiKey
from etude.protocol import CLIENT_HEADER, TURN_HEADER, WEIGHTS_HEADER, Refusal
from etude.protocol.apis import shaped_refusal

MAX_OPEN = 256
"""Requests of one key at a time: twice what an engine computes at once, and an eighth of the gateway's connections."""
MAX_COPY = 4 << 20
"""Bytes of an answer whose text is recorded, from a server that keeps no turns."""
_BUSY = (502, 503, 504)
# Headers of one connection, with the gateway's own keys, set anew, or that would hide the ids in answers.
_NOT_FORWARDED = frozenset({
    b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"content-length",
    b"authorization", b"x-api-key", b"cookie", b"expect", b"proxy-authorization", b"proxy-connection",
    b"accept-encoding",
})  # fmt: skip
_NOT_RETURNED = frozenset({
    b"connection", b"keep-alive", b"transfer-encoding", b"trailer", b"upgrade", b"proxy-authenticate", b"date",
    b"server", WEIGHTS_HEADER.encode(),
})  # fmt: skip


class AnswerProxy:
    """An ASGI application that passes requests on to the clusters, and has their turns recorded."""

    def __init__(
        self,
        config: LiveConfig,
        clusters: Clusters,
        view: LogView,
        keys: KeyCheck,
        requests: RequestReader,
        queue: RecordQueue,
        recorder: TurnRecorder,
    ) -> None:
        self._seconds = config.gateway.seconds
        self._model = config.model
        self._clusters = clusters
        self._view = view
        self._keys = keys
        self._requests = requests
        self._queue = queue
        self._recorder = recorder
        self._open = Counter[str]()  # requests, by the digest of their key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and its answer back. Raises Refusal."""
        key = self._keys.key(scope)
        if self._open[key.digest] >= MAX_OPEN:
            message = f"this key has {MAX_OPEN} requests that are not answered yet: try again later"
            raise Refusal(429, message, "rate_limit", headers={"retry-after": "1"})
        self._open[key.digest] += 1
        try:
            await self._pass_on(key, scope, receive, send)
        finally:
            self._open[key.digest] -= 1
            if not self._open[key.digest]:
                del self._open[key.digest]

    async def _pass_on(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        request = self._requests.read(key, scope, body)
        leaving = asyncio.ensure_future(_disconnected(receive))
        answering = asyncio.ensure_future(self._answer(scope, request, send))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                self._queue.count(request.counter_key, "disconnected")
            with suppress(asyncio.CancelledError):
                await answering
        finally:
            answering.cancel()
            leaving.cancel()

    async def _answer(self, scope: Scope, request: TurnRequest, send: Send) -> None:
        """Sends the answer of the first server that answers. Cancelled when the client leaves."""
        begun = False
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self._ask(scope, request)
                request.strayed = self._strayed(request, answer.server)
                try:
                    begun = True
                    self._recorder.begin(request)
                    head = {"type": "http.response.start", "status": answer.status}
                    await send(head | {"headers": _returned_headers(request, answer)})
                    media = answer.header(b"content-type") or ""
                    name = AnswerId(media, request.dialect or "")
                    request.copy = bytearray() if request.recorded and not answer.server.keeps_turns else None
                    request.is_stream = media.startswith("text/event-stream")
                    async for part in answer.parts():
                        if answer.status == 200 and request.dialect is not None and (own := name.feed(part)):
                            self._recorder.name(request, own)
                        if request.copy is not None:
                            request.copy += part
                            request.copy = request.copy if len(request.copy) <= MAX_COPY else None
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
                finally:
                    answer.close()
                    self._recorder.end(request, answer.server, answer.status)
        except asyncio.CancelledError:
            self._count(request, failed=False)
            raise
        except AWAY as e:
            self._count(request, failed=True)
            if begun:
                raise  # the connection ends before the answer: the client must not take it for complete
            await _refuse(scope, send, e)
        else:
            self._count(request, failed=answer.status >= 500)

    def _strayed(self, request: TurnRequest, server: Server) -> int | None:
        """The control's release if a server of the control answered, because the servers of the account's arm are
        away; else None."""
        own, stages = self._clusters.of_arm[request.assignment.arm], self._view.stages
        everywhere = request.assignment.arm == Arm.CANARY and stages.share >= 1
        return None if everywhere or not own or any(server is each for each in own) else stages.released

    async def _ask(self, scope: Scope, request: TurnRequest) -> UpstreamAnswer:
        """The head of the first server's answer. Raises one of AWAY if no server answers."""
        query = scope["query_string"].decode("latin-1")
        path = request.path + (f"?{query}" if query else "")
        head = [(k, v) for k, v in scope["headers"] if k not in _NOT_FORWARDED and not k.startswith(b"x-etude-")]
        host, port = scope.get("client") or ("", 0)
        head.append((CLIENT_HEADER.encode(), f"{request.key.digest[:32]}/{host}:{port}".encode()))
        if request.recorded:
            head.append((TURN_HEADER.encode(), request.id.encode()))
        failure: Exception = EOFError("no server")
        deadline = time.monotonic() + self._seconds
        servers = self._clusters.order(request.assignment.arm, request.voucher, self._view.stages)
        for number, server in enumerate(servers):
            left = deadline - time.monotonic()
            try:
                body = self._with_model(request.body, server)
                answer = await server.ask(scope["method"], path, head, body, left)
                server.answers += 1
            except AWAY as e:
                failure, request.deserted = e, True
            else:
                if answer.status not in _BUSY or number + 1 == len(servers):
                    return answer
                answer.close()
            self._queue.count(request.counter_key, "failovers")
        raise failure

    def _with_model(self, body: bytes, server: Server) -> bytes:
        """The body with the server's name of the model in place of the gateway's, and otherwise unchanged."""
        if self._model is None or not server.model or not body or self._model == server.model:
            return body
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            if msgspec.json.decode(fields.get("model", b"null")) != self._model:
                return body
        except (ValueError, RecursionError):
            return body
        return msgspec.json.encode(fields | {"model": server.model})

    def _count(self, request: TurnRequest, failed: bool) -> None:
        if request.dialect is None:
            return
        key = request.turn_key
        own = self._clusters.of_arm[request.assignment.arm]
        if request.strayed is not None and (request.deserted or not any(server.healthy for server in own)):
            self._queue.count(request.counter_key, "strays")
        self._queue.count(key, "requests")
        self._queue.count(key, "seconds", time.monotonic() - request.began)
        if failed:
            self._queue.count(key, "errors")


def _returned_headers(request: TurnRequest, answer: UpstreamAnswer) -> Headers:
    """The headers of the server's answer, and the gateway's own."""
    own = {
        "x-etude-generation": request.id,
        "x-etude-session": request.session,
        "x-etude-recorded": str(request.recorded).lower(),
    }
    return [(k, v) for k, v in answer.headers if k not in _NOT_RETURNED] + [
        (k.encode(), v.encode()) for k, v in own.items()
    ]


async def _refuse(scope: Scope, send: Send, error: BaseException) -> None:
    """Sends the refusal for a request that no server answers."""
    late = isinstance(error, TimeoutError)
    message = "no server of the clusters answered in time" if late else "no server of the clusters can be reached"
    refusal = Refusal(504 if late else 503, f"{message}: try again later", "overloaded", headers={"retry-after": "1"})
    await shaped_refusal(scope, refusal)(scope, _empty, send)


async def _disconnected(receive: Receive) -> None:
    """Waits until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _empty() -> Any:
    return {"type": "http.disconnect"}
