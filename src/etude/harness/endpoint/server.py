"""The interception endpoint: one HTTP server for many episodes. The key of a request names its episode."""

import asyncio
import json
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from etude.harness.endpoint.recording import Recording
from etude.protocol import Access, Guarded, Refusal, bearers, busy, characters, check_brackets, server_config
from etude.protocol.apis import (
    SHAPED_HANDLERS,
    RequestRefused,
    anthropic,
    as_refusal,
    chat,
    failed,
    responses,
    shaped_refusal,
)
from etude.renderers import printable_json

MODEL = "etude"
MAX_REQUESTS = 64  # of one episode at a time, at most
START_SECONDS = 30.0
STOP_SECONDS = 5
_BACKLOG = 1024
_NO_KEY = "the API key is not that of an episode which is being played"
Answer = Callable[["_AgentSession", dict[str, Any]], Awaitable[Response]]


@dataclass
class _AgentSession:
    recording: Recording
    kept: responses.Kept = field(default_factory=dict)
    requests: int = 0  # being answered


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
            exception_handlers=SHAPED_HANDLERS,
        )

    def open(self, recording: Recording) -> str:
        """Returns a new key; requests with it are answered from `recording`."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._episodes[key] = _AgentSession(recording)
        return key

    def close(self, key: str) -> None:
        """Refuses the key from now on."""
        self._episodes.pop(key, None)

    def authorise(self, scope: Scope) -> None:
        """Raises Refusal for a request without the key of an open episode; its body is not read then."""
        if self._session(scope) is None:
            raise Refusal(401, _NO_KEY, "invalid_api_key")

    def _session(self, scope: Scope) -> _AgentSession | None:
        return next((self._episodes[key] for key in bearers(scope) if key in self._episodes), None)

    def _route(self, dialect: ModuleType, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def handle(http: Request) -> Response:
            session = self._session(http.scope)
            try:
                if session is None:  # closed while the body came
                    raise RequestRefused("key", _NO_KEY)
                if session.requests >= MAX_REQUESTS:
                    raise busy("this episode has too many requests at once")
                session.requests += 1
                try:
                    return await answer(session, await _body(http))
                finally:
                    session.requests -= 1
            except RequestRefused as e:
                return dialect.refused(e)
            except Refusal:
                raise
            except Exception as e:
                if session is not None:
                    session.recording.fail(e)
                return dialect.refused(failed(e))

        return handle

    async def _models(self, http: Request) -> Response:
        """The list of one model, for clients of OpenAI and of Anthropic; requests may use any name."""
        name = http.path_params.get("name", MODEL)
        dates = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
        model = {"id": name, "object": "model", "type": "model", "display_name": name, "owned_by": MODEL} | dates
        if "name" in http.path_params:
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name})


async def _answer(dialect: ModuleType, episode: _AgentSession, body: dict[str, Any]) -> Response:
    with as_refusal():
        request = await asyncio.to_thread(dialect.parse_request, body)
    return await dialect.respond(await episode.recording.ask(request), request, body)


async def _answer_responses(episode: _AgentSession, body: dict[str, Any]) -> Response:
    with as_refusal():
        request, conversation = await asyncio.to_thread(responses.parse_request, body, episode.kept)
    turn = await episode.recording.ask(request)
    return await responses.respond(turn, request, conversation, body, episode.kept)


async def _count(episode: _AgentSession, body: dict[str, Any]) -> Response:
    with as_refusal():
        request = await asyncio.to_thread(anthropic.parse_request, body)
    return JSONResponse({"input_tokens": await episode.recording.count(request)})


async def _body(http: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises RequestRefused."""
    data = await http.body()
    try:
        return await asyncio.to_thread(_parsed, data)
    except (ValueError, RecursionError) as e:
        raise RequestRefused("invalid", f"the request is not JSON: {e}") from None


def _parsed(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, with halves of surrogate pairs made printable. Raises ValueError or Refusal."""
    check_brackets(data)
    body = json.loads(data, parse_constant=_no_number)
    if not isinstance(body, dict):
        raise ValueError("it is no object")
    characters(body)
    return cast(dict[str, Any], printable_json(body)) if b"\\u" in data else body


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


@asynccontextmanager
async def open_endpoint(*listeners: socket.socket) -> AsyncIterator[Endpoint]:
    """An endpoint on a unix socket in a folder of its own, and on `listeners`. Keys are its only access control."""
    with (
        tempfile.TemporaryDirectory(prefix="etude-", ignore_cleanup_errors=True) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        os.chmod(folder, 0o711)  # boxes run as other users
        path = Path(folder) / "endpoint"
        listener.bind(str(path))
        os.chmod(path, 0o666)
        listener.listen(_BACKLOG)
        endpoint = Endpoint(path)
        guarded = Guarded(endpoint.app, Access(), authorise=endpoint.authorise, refuse=shaped_refusal)
        server = uvicorn.Server(server_config(guarded))
        # `serve` would take the signals of this process.
        serving = asyncio.create_task(server._serve([listener, *listeners]))
        try:
            async with asyncio.timeout(START_SECONDS):
                while not server.started and not serving.done():
                    await asyncio.sleep(0.01)
            if serving.done():
                await serving
                raise RuntimeError("the endpoint has ended at its start")
            yield endpoint
        finally:
            server.should_exit = True
            await asyncio.wait([serving], timeout=2 * STOP_SECONDS)
