"""Keeps the exact tokens of turns for a gateway, which fetches them after their answer was sent. The answer's `id` ends
in the name of the turn, so that a client that reads no headers can pass it to the gateway.

POST /v1/chat/completions, /v1/responses, /v1/messages      with `X-Etude-Turn: ULID`
GET  /v1/turns/ULID                                         a `ServedTokens` as MessagePack, once
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import numpy as np
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.inference.server.choices import Choice
from etude.inference.server.served_model import ServedModel
from etude.inference.turn_store import WAIT_SECONDS, TurnStore
from etude.protocol import MSGPACK, TURN_HEADER, ServedTokens, error, headers
from etude.protocol.apis import SampledTurn


@dataclass(frozen=True)
class _Kept:
    choice: Choice
    turn: SampledTurn
    choices: int


class KeptTurns:
    """The kept turns of one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._store: TurnStore[_Kept] = TurnStore(lambda kept: kept.choice.sequence.future.done())

    def routes(self) -> list[Route]:
        """The route, to be mounted."""
        return [Route("/v1/turns/{name}", self._take)]

    def keep(self, http: HTTPRequest, choices: list[Choice], turns: list[SampledTurn]) -> None:
        """Keeps the first choice of a request that has the header `X-Etude-Turn`."""
        name = next(headers(http.scope, TURN_HEADER.encode()), "")
        if self._store.keep(name, _Kept(choices[0], turns[0], len(choices)), turns[0].prompt_tokens):
            turns[0].name = name

    async def _take(self, http: HTTPRequest) -> Response:
        if http.method != "GET" or (kept := self._store.take(http.path_params["name"])) is None:
            return error(404, "this server keeps no such turn", code="not_found")
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                whole = await asyncio.shield(asyncio.wrap_future(kept.choice.sequence.future))
        except TimeoutError:
            return error(409, "the turn has not ended", code="not_ended")
        except Exception as e:
            return error(410, f"the turn failed: {type(e).__name__}", code="failed")
        answer = await asyncio.to_thread(self._served_tokens, kept, kept.turn.generation or whole)
        return Response(msgspec.msgpack.encode(answer), media_type=MSGPACK)

    def _served_tokens(self, kept: _Kept, generation) -> ServedTokens:
        request = kept.choice.sequence.request
        ids, versions = generation.ids, generation.versions
        starts = [n for n, version in enumerate(versions) if n == 0 or version != versions[n - 1]]
        spans = zip(starts, [*starts[1:], len(versions)], strict=False)
        tokenizer = self._model.tokenizer
        return ServedTokens(
            prompt_ids=np.array(request.prompt, "<i4").tobytes(),
            ids=np.array(ids, "<i4").tobytes(),
            logprobs=np.array(generation.logprobs, "<f4").tobytes(),
            spans=[(low, high, versions[low]) for low, high in spans],
            temperature=request.temperature,
            top_p=request.top_p,
            finish_reason=generation.finish_reason,
            plain=not request.params.changes_draws and not request.documents,
            choices=kept.choices,
            message=msgspec.json.encode(kept.turn.message),
            text=tokenizer.decode(request.prompt, skip_special_tokens=False)
            + tokenizer.decode(ids, skip_special_tokens=False),
            malformed=kept.turn.malformed,
        )
