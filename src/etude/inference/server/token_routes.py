"""The routes of training, with ids as input and output (`etude.protocol.wire`).

POST /generate   ids in, a Generation out, whole or in parts
POST /score      sequences in, log-probabilities of their tokens out; 409 if the version changes meanwhile
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request, RequestFailed, RunningSequence, check_sequence
from etude.inference.server.draining import Drain, going_away
from etude.inference.server.http import (
    answer,
    check_room,
    check_score_room,
    error_of,
    generation_of,
    parts_of,
    read_body,
    unless_gone,
)
from etude.inference.server.weights import WeightWatcher
from etude.protocol import CONFLICT, GenerateRequest, ScoreRequest, SequenceScores, as_one_member, error, frame
from etude.records import Generation

_log = logging.getLogger(__name__)
_FRAMES = "application/octet-stream"


class TokenRoutes:
    """The token routes of one engine, whose weights `watcher` follows; a `drain` hands turns back."""

    def __init__(self, engine: Engine, watcher: WeightWatcher, drain: Drain) -> None:
        self._engine, self._watcher, self._drain = engine, watcher, drain

    def routes(self) -> list[Route]:
        """The routes, to be mounted."""
        return [Route("/generate", self._generate, methods=["POST"]), Route("/score", self._score, methods=["POST"])]

    async def _generate(self, http: HTTPRequest) -> Response:
        as_one_member()
        request = Request(**msgspec.structs.asdict(await read_body(http, GenerateRequest)))
        check_room(self._engine, 1)
        try:
            sequence = self._engine.submit(request)
            if request.part_seconds is None:
                generation = await generation_of(http, sequence)
                if not self._outgoing(generation).finish_reason:
                    raise going_away()
                return answer(http, generation)
            return await self._in_parts(http, sequence, request.part_seconds)
        except Exception as e:
            if self._engine.closed:  # whatever ended it was no fault of this request
                raise going_away() from e
            if isinstance(e, ValueError | RuntimeError | RequestFailed):
                return error_of(e)
            raise

    async def _in_parts(self, http: HTTPRequest, sequence: RunningSequence, seconds: float) -> Response:
        """The parts as frames. Raises RequestFailed before the first one; later the last frame says why."""
        parts = parts_of(self._engine, sequence, seconds)
        first = await unless_gone(http, sequence, asyncio.ensure_future(anext(parts)))
        if first.finish_reason:
            return Response(frame(self._outgoing(first)), media_type=_FRAMES)

        async def frames() -> AsyncIterator[bytes]:
            yield frame(first)
            try:
                async for part in parts:
                    yield frame(self._outgoing(part))
            except RequestFailed as e:
                yield frame(str(e))
            except Exception as e:  # the engine ended: without a last part the answer goes on elsewhere
                _log.warning("an answer has lost its engine: %s", e)
            finally:
                sequence.abort()

        return StreamingResponse(frames(), media_type=_FRAMES)

    def _outgoing(self, part: Generation) -> Generation:
        """A part as it is sent: one that a drain ended has no reason, so it goes on elsewhere."""
        back = self._drain.handed_back and part.finish_reason == "abort"
        return msgspec.structs.replace(part, finish_reason="") if back else part

    async def _score(self, http: HTTPRequest) -> Response:
        """Log-probabilities under one version, with its number and digest."""
        served, engine = self._watcher.served, self._engine
        as_one_member()
        request = await read_body(http, ScoreRequest)
        check_score_room(engine, len(request.sequences))
        check_room(engine, len(request.sequences) * request.decoded)
        try:
            for ids in request.sequences:  # check all before the first is queued
                check_sequence(ids, engine.max_length, engine.vocab_size)
            futures = [engine.score(ids, decoded=request.decoded) for ids in request.sequences]
            scores = await asyncio.gather(*map(asyncio.wrap_future, futures))
        except (ValueError, RuntimeError, RequestFailed) as e:
            return error_of(e)
        if any(version != served.version for version, _ in scores) or self._watcher.served != served:
            return error(CONFLICT, f"version {served.version} was followed by another while it scored")
        log_probs = tuple(log_probs for _, log_probs in scores)
        return answer(http, SequenceScores(version=served.version, digest=served.digest, logprobs=log_probs))
