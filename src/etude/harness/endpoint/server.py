"""The interception endpoint: one HTTP server for many episodes. The key of a request names its episode."""

import asyncio
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.harness.endpoint import anthropic, chat, responses
from etude.harness.endpoint.conversation import RequestRefused
from etude.harness.endpoint.recording import Recording

MODEL = "etude"
MAX_BODY = 16 << 20  # bytes
START_SECONDS = 30.0
STOP_SECONDS = 5
_BACKLOG = 1024
Answer = Callable[["_AgentSession", dict[str, Any]], Awaitable[Response]]


@dataclass
class _AgentSession:
    recording: Recording
    kept: responses.Kept = field(default_factory=dict)


class Endpoint:
    """The application, and the episodes whose requests it answers. `socket` is its unix socket."""

    def __init__(self, path: Path) -> None:
        self.socket = path
        self._episodes: dict[str, _AgentSession] = {}
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._route(chat, partial(_answer, chat)), methods=["POST"]),
                Route("/v1/responses", self._route(responses, _answer_responses), methods=["POST"]),
                Route("/v1/messages", self._route(anthropic, partial(_answer, anthropic)), methods=["POST"]),
                Route("/v1/messages/count_tokens", self._route(anthropic, _count), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
            ],
            exception_handlers={404: _missing, 405: _missing},
        )

    def open(self, recording: Recording) -> str:
        """Returns a new key; requests with it are answered from `recording`."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._episodes[key] = _AgentSession(recording)
        return key

    def close(self, key: str) -> None:
        """Refuses the key from now on."""
        self._episodes.pop(key, None)

    def _episode(self, http: Request) -> _AgentSession:
        scheme, _, bearer = http.headers.get("authorization", "").partition(" ")
        keys = (http.headers.get("x-api-key"), bearer.strip() if scheme.lower() == "bearer" else None)
        session = next((self._episodes[key] for key in keys if key in self._episodes), None)
        if session is None:
            raise RequestRefused("key", "the API key is not that of an episode which is being played")
        return session

    def _route(self, dialect: ModuleType, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def handle(http: Request) -> Response:
            try:
                episode = self._episode(http)
                return await answer(episode, await _body(http))
            except RequestRefused as e:
                return dialect.refused(e)

        return handle

    async def _models(self, http: Request) -> Response:
        """One model, in a shape that clients of OpenAI and of Anthropic read; any name is taken for it."""
        try:
            self._episode(http)
        except RequestRefused as e:
            return (anthropic if "x-api-key" in http.headers else chat).refused(e)
        name = http.path_params.get("name", MODEL)
        dates = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
        model = {"id": name, "object": "model", "type": "model", "display_name": name, "owned_by": MODEL} | dates
        if "name" in http.path_params:
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name})


async def _answer(dialect: ModuleType, episode: _AgentSession, body: dict[str, Any]) -> Response:
    with _refusing_wrong_formats():
        request = dialect.parse_request(body)
    return await dialect.respond(episode.recording.ask(request), request, body)


async def _answer_responses(episode: _AgentSession, body: dict[str, Any]) -> Response:
    with _refusing_wrong_formats():
        request, conversation = responses.parse_request(body, episode.kept)
    return await responses.respond(episode.recording.ask(request), request, conversation, body, episode.kept)


async def _count(episode: _AgentSession, body: dict[str, Any]) -> Response:
    with _refusing_wrong_formats():
        request = anthropic.parse_request(body)
    return JSONResponse({"input_tokens": episode.recording.count(request)})


async def _missing(http: Request, _: Exception) -> Response:
    refusal = RequestRefused("unknown", f"{http.method} {http.url.path} is not served here")
    return (anthropic if http.url.path.startswith("/v1/messages") else chat).refused(refusal)


@contextmanager
def _refusing_wrong_formats() -> Iterator[None]:
    """Refuses a request that is not in the format of its API, with the reason."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as e:
        raise RequestRefused("invalid", f"the request is not in the API's format: {type(e).__name__} {e}") from None


async def _body(http: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises RequestRefused."""
    data = bytearray()
    async for part in http.stream():
        data += part
        if len(data) > MAX_BODY:
            raise RequestRefused("large", f"a request has at most {MAX_BODY} bytes")
    try:
        body = json.loads(bytes(data))
    except (ValueError, RecursionError) as e:
        raise RequestRefused("invalid", f"the request is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise RequestRefused("invalid", "the request is not a JSON object")
    return body


@asynccontextmanager
async def open_endpoint(*listeners: socket.socket) -> AsyncIterator[Endpoint]:
    """An endpoint on a unix socket in a folder of its own, and on `listeners`. It is open to all, but for the keys."""
    folder = Path(tempfile.mkdtemp(prefix="etude-"))
    os.chmod(folder, 0o711)  # boxes run as other users
    path = folder / "endpoint"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o666)
        listener.listen(_BACKLOG)
        endpoint = Endpoint(path)
        config = uvicorn.Config(
            endpoint.app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=STOP_SECONDS
        )
        server = _EndpointServer(config)
        serving = asyncio.create_task(server.serve(sockets=[listener, *listeners]))
        try:
            async with asyncio.timeout(START_SECONDS):
                await server.ready.wait()
            yield endpoint
        finally:
            server.should_exit = True
            await asyncio.wait([serving], timeout=2 * STOP_SECONDS)
    finally:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)


class _EndpointServer(uvicorn.Server):
    """Within a process that has its own handling of signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)  # without capturing signals, which `serve` would do
