"""Helpers of all routes: bodies, answers, limits on waiting requests, and clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import PromptTooLong, RequestFailed, RunningSequence
from etude.protocol import MSGPACK, asking, busy, decoded, error, headers
from etude.records import Generation, Record

R = TypeVar("R")
T = TypeVar("T", bound=Record)

_WAITING = 1024  # limit on sequences that wait for a slot (at least), and on sequences to score


async def read_body(http: HTTPRequest, kind: type[T]) -> T:
    """The request's body, JSON or MessagePack. Raises Refusal."""
    packed = next(headers(http.scope, b"content-type"), "").lower().startswith(MSGPACK)
    return await decoded(http, kind, packed=packed)


def answer(http: HTTPRequest, record: Record) -> Response:
    """A record in the format that the client accepts."""
    if MSGPACK in http.headers.get("accept", ""):
        return Response(msgspec.msgpack.encode(record), media_type=MSGPACK)
    return Response(msgspec.json.encode(record), media_type="application/json")


def error_of(e: ValueError | RuntimeError | RequestFailed) -> JSONResponse:
    """The answer to a request that the engine refused (ValueError), could not compute (RequestFailed), or does not
    accept because it is closed (RuntimeError)."""
    if isinstance(e, RecursionError):
        return error(400, "the request is nested too deeply")
    if isinstance(e, RequestFailed):
        return error(500 if e.kind == "failed" else 400, str(e))
    if isinstance(e, ValueError):
        return error(400, str(e), code="context_length_exceeded" if isinstance(e, PromptTooLong) else None)
    return error(503, str(e))


def check_room(engine: Engine, sequences: int) -> None:
    """Raises Refusal if too many sequences wait in the engine already. One sequence of a client that has no other is
    always taken: the number of connections bounds them."""
    full = engine.load[1] + sequences > max(_WAITING, 8 * engine.config.max_batch)
    if full and (sequences > 1 or engine.unfinished(asking())):
        raise busy("too many requests wait")


def check_score_room(engine: Engine, sequences: int) -> None:
    """Raises Refusal if too many sequences wait to be scored already."""
    if engine.scoring + sequences > _WAITING:
        raise busy("too many sequences wait to be scored")


async def unless_gone(http: HTTPRequest, sequence: RunningSequence, result: asyncio.Future[R]) -> R:
    """A result of the sequence; aborts the sequence if the client disconnects first."""
    gone = asyncio.ensure_future(http.receive())  # the message after the body is the disconnection
    try:
        await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            sequence.abort()
        return await result
    except BaseException:
        sequence.abort()
        result.cancel()
        raise
    finally:
        gone.cancel()


async def generation_of(http: HTTPRequest, sequence: RunningSequence) -> Generation:
    """The sequence's generation; aborts the sequence if the client disconnects first. Raises RequestFailed."""
    return await unless_gone(http, sequence, asyncio.wrap_future(sequence.future))


async def parts_of(engine: Engine, sequence: RunningSequence, seconds: float) -> AsyncIterator[Generation]:
    """The sequence's generation in parts, at most one in so many seconds; only the last has a reason. Aborts the
    sequence if nobody wants the rest. Raises RequestFailed."""
    whole = asyncio.wrap_future(sequence.future)
    try:
        while not whole.done():
            if seconds:
                await asyncio.wait((whole,), timeout=seconds)
            if not whole.done():
                part = asyncio.wrap_future(engine.next_part(sequence))
                await asyncio.wait((whole, part), return_when=asyncio.FIRST_COMPLETED)
                if part.done():  # the engine resolves it before the whole
                    yield part.result()
        yield await whole
    finally:
        sequence.abort()
