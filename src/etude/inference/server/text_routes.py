"""vLLM's small routes: text to token ids and back, the served models, the version.

POST /tokenize     {"prompt"} or {"messages", "tools"} -> {"count", "max_model_len", "tokens"}
POST /detokenize   {"tokens"} -> {"prompt"}
GET  /v1/models, /v1/models/NAME, /version, /ping
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from etude.inference.server.bodies import ChatBody, invalid, refuse_others
from etude.inference.server.chats import Chats, shown_tools, with_messages
from etude.inference.server.served_model import ServedModel
from etude.protocol import Refusal, decoded

_CHAT = frozenset(
    {
        "model",
        "messages",
        "tools",
        "chat_template_kwargs",
        "reasoning_effort",
        "continue_final_message",
        "add_generation_prompt",
    }
)


class _TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    model: str = ""
    add_special_tokens: bool = True
    return_token_strs: bool = False


class _DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    model: str = ""


class TextRoutes:
    """The routes of one model."""

    def __init__(self, model: ServedModel, chats: Chats) -> None:
        self._model, self._chats = model, chats

    async def tokenize(self, http: HTTPRequest) -> Response:
        """Ids of a text or of a chat. Raises Refusal or ValueError."""
        model = self._model
        fields: dict[str, Any] = await decoded(http, dict[str, Any])
        if "messages" in fields:
            strings = bool(fields.pop("return_token_strs", False))
            refuse_others(fields, _CHAT, {"add_special_tokens": (False,)})
            body = ChatBody.of(fields)
            body.check()
            body, documents = await asyncio.to_thread(with_messages, body)
            model.must_be_served(body.model)
            renderer = self._chats.with_variables(model.chat_renderer, body)
            prompt = await asyncio.to_thread(self._chats.encoded, body, renderer, shown_tools(body))
            encoded = await asyncio.to_thread(self._chats.encoded_documents, documents)
            ids = [token for part in (*encoded, prompt) for token in part]
        else:
            text = msgspec.convert(fields, _TokenizeBody)
            model.must_be_served(text.model)
            strings = text.return_token_strs
            ids = await model.encode(text.prompt, text.add_special_tokens)
        shown = [model.tokenizer.id_to_token(token) for token in ids] if strings else None
        answer = {"count": len(ids), "max_model_len": model.engine.max_length, "tokens": ids, "token_strs": shown}
        return JSONResponse(answer)

    async def detokenize(self, http: HTTPRequest) -> Response:
        """The text of ids. Raises Refusal."""
        body = await decoded(http, _DetokenizeBody)
        self._model.must_be_served(body.model)
        size = self._model.engine.vocab_size
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
            raise invalid(f"a token is outside the vocabulary of {size}", "tokens")
        tokenizer = self._model.tokenizer
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    async def models(self, http: HTTPRequest) -> Response:
        """The served models."""
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._model.names]})

    async def model(self, http: HTTPRequest) -> Response:
        """One served model. Raises Refusal for another name."""
        name = http.path_params["name"]
        if name not in self._model.names:
            message = f"the model {name[:200]!r} is not served here; {self._model.names[0]!r} is"
            raise Refusal(404, message, "model_not_found", param="model")
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._model.created, "owned_by": "etude"}
        # Fields for clients of Anthropic.
        card |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        return card | {"root": self._model.names[0], "parent": None, "max_model_len": self._model.engine.max_length}

    async def version(self, http: HTTPRequest) -> Response:
        """The version of etude."""
        return JSONResponse({"version": version("etude")})

    async def ping(self, http: HTTPRequest) -> Response:
        """Whether the server answers."""
        return JSONResponse({})
