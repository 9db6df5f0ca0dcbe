"""Processes of the gateway's benchmark: a server that answers at once, and the plainest proxy before it.

python -m benchmarks.live_stub stub READY_FILE
python -m benchmarks.live_stub proxy READY_FILE URL        Starlette and httpx2 with keep-alive, nothing else
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.protocol.access import LOOPBACK
from etude.protocol.serving import open_listener, run_server, server_config
from etude.protocol.wire import MSGPACK, ServedTokens

Handler = Callable[[Request], Awaitable[Response]]
TEXT = "def chunk(array, size=1):\n    return [array[i : i + size] for i in range(0, len(array), size)]\n"
ANSWER = json.dumps({
    "id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "stub",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 64, "completion_tokens": 32, "total_tokens": 96},
}).encode()  # fmt: skip
TOKENS = msgspec.msgpack.encode(ServedTokens(
    prompt_ids=bytes(256), ids=bytes(128), logprobs=bytes(128), spans=[(0, 32, 0)], temperature=1.0, top_p=1.0,
    finish_reason="stop", plain=True, choices=1, message=json.dumps({"role": "assistant", "content": TEXT}).encode(),
    text=TEXT,
))  # fmt: skip


def stub() -> Starlette:
    """A server with one answer for all."""

    async def chat(http: Request) -> Response:
        await http.body()
        return Response(ANSWER, media_type="application/json")

    async def turn(http: Request) -> Response:
        return Response(TOKENS, media_type=MSGPACK)

    return keeping_server(chat, turn)


def keeping_server(chat: Handler, turn: Handler) -> Starlette:
    """What the gateway asks of an `etude serve`: `chat` answers, `turn` gives the tokens of an answer by its name."""

    async def health(http: Request) -> Response:
        return JSONResponse({"version": 0, "digest": "0", "keeps_turns": True})

    async def models(http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stub"}]})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/turns/{name}", turn),
        ]
    )


def proxy(url: str) -> Starlette:
    """Passes chats on, and their answers back as they come."""
    limits = httpx2.Limits(max_connections=256, max_keepalive_connections=256)
    client = httpx2.AsyncClient(base_url=url, trust_env=False, limits=limits, timeout=60)

    async def chat(http: Request) -> Response:
        body, kind = await http.body(), {"content-type": "application/json"}
        answer = await client.send(client.build_request("POST", http.url.path, content=body, headers=kind), stream=True)
        kept = {k: v for k, v in answer.headers.items() if k in ("content-type", "content-length")}
        return StreamingResponse(_parts(answer), answer.status_code, kept)

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


async def _parts(answer: httpx2.Response):
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


def main(argv: list[str]) -> None:
    """One of the two, until a signal comes."""
    app = stub() if argv[0] == "stub" else proxy(argv[2])
    with open_listener("127.0.0.1", 0, LOOPBACK) as listener:
        run_server(uvicorn.Server(server_config(app)), listener, argv[0], Path(argv[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
