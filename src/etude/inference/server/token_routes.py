"""The routes of training, with ids as input and output (`etude.protocol.wire`).

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
from etude.inference.engine.requests import Request, RequestFailed, check_sequence
from etude.inference.server.choices import call_on
from etude.inference.server.http import answer, check_room, check_score_room, error_of, generation_of, read_body
from etude.inference.server.weights import WeightWatcher
from etude.protocol import CONFLICT, GenerateRequest, ScoreRequest, SequenceScores, as_one_member, error, frame


class TokenRoutes:
    """The token routes of one engine, whose weights `watcher` follows."""

    def __init__(self, engine: Engine, watcher: WeightWatcher) -> None:
        self._engine, self._watcher = engine, watcher

    def routes(self) -> list[Route]:
        """The routes, to be mounted."""
        return [Route("/generate", self._generate, methods=["POST"]), Route("/score", self._score, methods=["POST"])]

    async def _generate(self, http: HTTPRequest) -> Response:
        as_one_member()
        request = Request(**msgspec.structs.asdict(await read_body(http, GenerateRequest)))
        check_room(self._engine, 1)
        try:
            if request.stream:
                return self._streamed(request)
            return answer(http, await generation_of(http, self._engine.submit(request)))
        except (ValueError, RuntimeError, RequestFailed) as e:
            return error_of(e)

    def _streamed(self, request: Request) -> Response:
        """The sampled ids as they come, all that are ready in one frame, and then the generation."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[int | None] = asyncio.Queue()

        def put(token: int | None) -> None:
            call_on(loop, events.put_nowait, token)

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
                if sequence.future.exception() is None:  # else the answer ends without a generation
                    yield frame(sequence.future.result())
            finally:
                sequence.abort()

        return StreamingResponse(frames(), media_type="application/octet-stream")

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
