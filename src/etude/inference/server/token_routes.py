"""The routes of training, ids in and ids out (`etude.protocol.wire`).

POST /generate   ids in, a Generation out
POST /score      sequences in, log-probabilities of their tokens out; 409 if the version changes meanwhile
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.inference.server.http import answer, error, generation_of, read_body
from etude.inference.server.weights import WeightWatcher
from etude.protocol.wire import CONFLICT, GenerateRequest, ScoreRequest, SequenceScores, frame


class TokenRoutes:
    """The token routes of one engine, whose weights `watcher` follows."""

    def __init__(self, engine: Engine, watcher: WeightWatcher) -> None:
        self._engine, self._watcher = engine, watcher

    def routes(self) -> list[Route]:
        """The routes, to be mounted."""
        return [Route("/generate", self._generate, methods=["POST"]), Route("/score", self._score, methods=["POST"])]

    async def _generate(self, http: HTTPRequest) -> Response:
        try:
            request = Request(**msgspec.structs.asdict(await read_body(http, GenerateRequest)))
            if request.stream:
                return self._streamed(request)
            sequence = self._engine.submit(request)
        except (msgspec.MsgspecError, ValueError) as e:
            return error(400, str(e))
        except RuntimeError as e:
            return error(503, str(e), "server_error")
        return answer(http, await generation_of(http, sequence))

    def _streamed(self, request: Request) -> Response:
        """The ids as they are sampled, those of a moment in one frame, and then the generation."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[int | None] = asyncio.Queue()

        def put(token: int | None) -> None:
            loop.call_soon_threadsafe(events.put_nowait, token)

        sequence = self._engine.submit(request, lambda token, _: put(token))
        sequence.future.add_done_callback(lambda _: put(None))

        async def frames() -> AsyncIterator[bytes]:
            try:
                token = await events.get()
                while token is not None:
                    ids = [token]
                    while not events.empty() and (token := events.get_nowait()) is not None:
                        ids.append(token)
                    yield frame(ids)
                    token = token if token is None else await events.get()
                yield frame(sequence.future.result())
            finally:
                sequence.abort()

        return StreamingResponse(frames(), media_type="application/octet-stream")

    async def _score(self, http: HTTPRequest) -> Response:
        """Log-probabilities under one version, which is named with its digest."""
        served = self._watcher.served
        try:
            request = await read_body(http, ScoreRequest)
            futures = [self._engine.score(ids) for ids in request.sequences]
            scores = [await asyncio.wrap_future(future) for future in futures]
        except (msgspec.MsgspecError, ValueError) as e:
            return error(400, str(e))
        except RuntimeError as e:
            return error(503, str(e), "server_error")
        if any(version != served.version for version, _ in scores) or self._watcher.served != served:
            return error(CONFLICT, f"version {served.version} was followed by another while it scored", "server_error")
        log_probs = tuple(log_probs for _, log_probs in scores)
        return answer(http, SequenceScores(version=served.version, digest=served.digest, logprobs=log_probs))
