"""Helpers of all routes: bodies, answers, errors, and clients that go away."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from etude.inference.engine.requests import RunningSequence
from etude.protocol.wire import MSGPACK
from etude.records import Generation, Record

T = TypeVar("T", bound=Record)


def error(status: int, message: str, kind: str = "invalid_request_error", param: str | None = None) -> JSONResponse:
    """An error in OpenAI's shape."""
    body = {"message": message, "type": kind, "param": param, "code": None if status != 404 else "model_not_found"}
    return JSONResponse({"error": body}, status_code=status)


async def read_body(http: HTTPRequest, kind: type[T]) -> T:
    """The request's body, JSON or MessagePack. Raises msgspec.MsgspecError."""
    packed = http.headers.get("content-type", "").startswith(MSGPACK)
    return (msgspec.msgpack.decode if packed else msgspec.json.decode)(await http.body(), type=kind)


def answer(http: HTTPRequest, record: Record) -> Response:
    """A record in the format that the client accepts."""
    if MSGPACK in http.headers.get("accept", ""):
        return Response(msgspec.msgpack.encode(record), media_type=MSGPACK)
    return Response(msgspec.json.encode(record), media_type="application/json")


async def generation_of(http: HTTPRequest, sequence: RunningSequence) -> Generation:
    """The sequence's generation; the sequence is aborted if the client goes away first."""
    generation = asyncio.wrap_future(sequence.future)
    gone = asyncio.ensure_future(http.receive())  # after the body, the next message is the disconnection
    try:
        await asyncio.wait((generation, gone), return_when=asyncio.FIRST_COMPLETED)
        if not generation.done():
            sequence.abort()
        return await generation
    finally:
        sequence.abort()
        gone.cancel()
