"""etude's own inference server (`etude.inference.server`): its token routes are the interface of the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx2
import msgspec

from etude.protocol.backends.engine_backend import EngineError, OnTokens, check_accepted, check_not_busy, reason_of
from etude.protocol.wire import CONFLICT, MSGPACK, GenerateRequest, ScoreRequest, SequenceScores, take_frames
from etude.records import Generation

_HEADERS = {"content-type": MSGPACK, "accept": MSGPACK}


class EtudeBackend:
    """Servers that follow the store of weights by themselves."""

    follows = True

    async def generate(
        self, http: httpx2.AsyncClient, url: str, request: GenerateRequest, on_tokens: OnTokens | None
    ) -> Generation:
        """One answer, streamed if there is an `on_tokens`."""
        body = msgspec.msgpack.encode(msgspec.structs.replace(request, stream=on_tokens is not None))
        if on_tokens is not None:
            return await _streamed(http, url, body, on_tokens)
        response = await http.post(f"{url}/generate", content=body, headers=_HEADERS)
        check_not_busy(response)
        check_accepted(url, response)
        try:
            return msgspec.msgpack.decode(response.content, type=Generation)
        except msgspec.MsgspecError as e:
            raise EngineError(f"{url} sent an answer that is not a generation: {e}") from None

    async def score(
        self, http: httpx2.AsyncClient, url: str, sequences: Sequence[list[int]], decoded: bool
    ) -> SequenceScores | None:
        """Scores of all sequences in one request."""
        body = msgspec.msgpack.encode(ScoreRequest(sequences=tuple(sequences), decoded=decoded))
        response = await http.post(f"{url}/score", content=body, headers=_HEADERS)
        check_not_busy(response)
        if response.status_code == CONFLICT:
            return None
        if response.status_code != 200:
            raise EngineError(f"{url} refused to score ({response.status_code}): {reason_of(response)}")
        try:
            return msgspec.msgpack.decode(response.content, type=SequenceScores)
        except msgspec.MsgspecError as e:
            raise EngineError(f"{url} sent an answer that is not a score: {e}") from None

    async def health(self, http: httpx2.AsyncClient, url: str, timeout: float) -> dict[str, Any]:
        """The server's own report."""
        response = await http.get(f"{url}/health", timeout=timeout)
        return msgspec.json.decode(response.content, type=dict[str, Any])

    async def check(self, http: httpx2.AsyncClient, url: str) -> None:
        """Does nothing: the server refuses unsupported requests by itself."""

    async def bring(self, http: httpx2.AsyncClient, url: str, version: int) -> None:
        """Does nothing: the server follows the store."""


async def _streamed(http: httpx2.AsyncClient, url: str, body: bytes, on_tokens: OnTokens) -> Generation:
    buffer = bytearray()
    async with http.stream("POST", f"{url}/generate", content=body, headers=_HEADERS) as response:
        if response.status_code != 200:
            await response.aread()
            check_not_busy(response)
            check_accepted(url, response)
        try:
            async for chunk in response.aiter_bytes():
                buffer += chunk
                for part in take_frames(buffer):
                    if isinstance(part, Generation):
                        return part
                    on_tokens(part)
        except msgspec.MsgspecError as e:
            raise EngineError(f"{url} sent an answer that is not a generation: {e}") from None
    raise EngineError(f"{url} ended its answer in the middle of a turn")
