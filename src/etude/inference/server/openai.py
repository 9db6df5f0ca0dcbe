"""The /v1 routes, and the answers to wrong requests.

POST /v1/completions                          `completions.py`
POST /v1/chat/completions                     `chats.py`
POST /v1/responses, /v1/messages[/count_tokens]   `agent_routes.py`
POST /v1/apply                                here
GET  /v1/turns/ULID                            `kept_turns.py`
POST /tokenize, /detokenize; GET /v1/models, /v1/models/NAME, /version, /ping   `text_routes.py`

`bodies.py` and `grammars.py` read the fields of a body; `choices.py` follows the engine's answers.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.edits import DoesNotFit, Edit
from etude.errors import UserError
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import PromptTooLong, RequestFailed
from etude.inference.server.agent_routes import AgentRoutes
from etude.inference.server.bodies import invalid
from etude.inference.server.chats import Chats
from etude.inference.server.completions import Completions
from etude.inference.server.http import check_room, error_of, generation_of
from etude.inference.server.served_model import ServedModel
from etude.inference.server.text_routes import TextRoutes
from etude.protocol import WEIGHTS_HEADER, Refusal, decoded, error
from etude.protocol.apis import RequestRefused, answering, anthropic, chat
from etude.protocol.apis.chat import usage

Handler = Callable[[HTTPRequest], Awaitable[Response]]


class _ApplyBody(msgspec.Struct, kw_only=True):
    """A file's text and the sketch of an edit."""

    code: str
    update: str
    instruction: str = ""
    model: str = ""
    temperature: float = 0.0
    seed: int = 0
    stream: bool = False


class OpenAI:
    """The /v1 routes of one engine and model folder."""

    def __init__(self, engine: Engine, folder: Path, names: Sequence[str] = ()) -> None:
        self._model = ServedModel(engine, folder, names)
        self._chats = Chats(self._model)

    def routes(self) -> list[Route]:
        """The routes, to be mounted."""
        completions, chats = Completions(self._model), self._chats
        agents, texts = AgentRoutes(self._model, chats), TextRoutes(self._model, chats)
        posts: dict[str, Handler] = {
            "/v1/completions": completions.answer,
            "/v1/chat/completions": chats.completions,
            "/v1/responses": agents.responses,
            "/v1/apply": self._apply,
            "/tokenize": texts.tokenize,
            "/detokenize": texts.detokenize,
        }
        others: dict[str, Handler] = {"/v1/messages": agents.messages, "/v1/messages/count_tokens": agents.count_tokens}
        named = [(path, partial(_answer, partial(self._named, handler))) for path, handler in posts.items()]
        named += [(path, partial(_answer_anthropic, partial(self._named, handler))) for path, handler in others.items()]
        return [
            *(Route(path, handler, methods=["POST"]) for path, handler in named),
            *chats.kept.routes(),
            Route("/v1/models", texts.models),
            Route("/v1/models/{name:path}", texts.model),
            Route("/version", texts.version),
            Route("/ping", texts.ping, methods=["GET", "POST"]),
        ]

    async def _named(self, handler: Handler, http: HTTPRequest) -> Response:
        """The route's answer, with a header that names the version at its beginning."""
        version = self._model.engine.version
        response = await handler(http)
        response.headers[WEIGHTS_HEADER] = str(version)
        return response

    async def _apply(self, http: HTTPRequest) -> Response:
        """The whole new file; 422 if the model did not end it with its closing tag."""
        body = await decoded(http, _ApplyBody)
        model = self._model
        assert model.tokenizer is not None
        if body.stream:
            raise invalid("an applied edit is answered whole: leave stream out", "stream")
        model.must_be_served(body.model)
        model.check_characters(len(body.code) + len(body.update) + len(body.instruction))
        check_room(model.engine, 1)
        edit = Edit(body.code, body.update, body.instruction)
        request, close = await asyncio.to_thread(
            model.applier.request, edit, model.engine.max_length, temperature=body.temperature, seed=body.seed
        )
        collector = model.applier.collector(close)
        sequence = model.engine.submit(request, collector)
        collector.watch(sequence)
        generation = await generation_of(http, sequence)
        with answering():
            try:
                text = collector.text()
            except UserError as e:
                return error(422, str(e), kind="model_error")
            head = {"id": f"apply-{uuid.uuid4().hex}", "object": "apply", "created": int(time.time())}
            counted = usage(len(request.ids), [msgspec.structs.replace(generation, ids=collector.ids)])
            return JSONResponse(head | {"model": model.names[0], "code": text, "usage": counted})


async def _answer(route: Handler, http: HTTPRequest) -> Response:
    """The route's answer, or a refusal in OpenAI's format."""
    try:
        return await route(http)
    except RequestRefused as e:
        return chat.refused(e)
    except UserError as e:
        code = "context_length_exceeded" if isinstance(e, DoesNotFit) else None
        return error(400, str(e), code=code)
    except (ValueError, RuntimeError, RequestFailed) as e:
        return error_of(e)


async def _answer_anthropic(route: Handler, http: HTTPRequest) -> Response:
    """The route's answer, or a refusal in Anthropic's format. Its clients recognise a full context by the text."""
    try:
        return await route(http)
    except RequestRefused as e:
        return anthropic.refused(e)
    except Refusal as e:
        return anthropic.refusal_of_server(e)
    except PromptTooLong as e:
        return anthropic.refused(RequestRefused("context", f"prompt is too long: {e}"))
    except (ValueError, UserError) as e:
        return anthropic.refused(RequestRefused("invalid", str(e)))
    except RequestFailed as e:
        return anthropic.refused(RequestRefused(e.kind, str(e)))
    except RuntimeError as e:
        return anthropic.refused(RequestRefused("lost", str(e)))
