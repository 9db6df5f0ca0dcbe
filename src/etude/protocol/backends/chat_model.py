"""A chat model behind an URL: OpenAI's chat completions or Anthropic's messages, with native tool calls.

A conversation is kept in the API's own form (`chat_formats`). Requests to busy servers (429, 5xx, lost connections) are
repeated after the server's retry-after, else after growing pauses, for PATIENCE seconds. A server that refuses a
parameter by name is asked again without it, or by its other name, and is not sent it any more.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import httpx2

from etude.errors import UserError
from etude.protocol.backends.chat_formats import FORMATS, ChatAnswer, ChatModel, Conversation
from etude.protocol.backends.client import EngineError
from etude.renderers import printable_json

log = logging.getLogger(__name__)

PATIENCE = 300.0  # seconds that one turn may wait for busy servers in all
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
LEAST_WAIT = 0.1  # whatever the server says: "retry-after: 0" would be asked without end
REACH_SECONDS = 30.0  # until a server answers its first request
_BUSY = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_WRONG = frozenset({400, 413, 422})  # about a request, not about who sends it and where
_OTHER_NAMES = {"max_tokens": "max_completion_tokens", "seed": "", "temperature": ""}  # "": without it
_UNWANTED = re.compile(
    r"(?i)unsupported|not supported|not support|unknown|unrecogni[sz]ed|unexpected|extra (?:inputs|fields)|"
    r"not permitted|not allowed|deprecated|max_completion_tokens"
)
_TOO_LONG = ("context_length_exceeded", "prompt is too long", "maximum context length", "too many tokens")


class ConversationRefused(Exception):
    """The API refuses this conversation, after it has taken another."""


class ContextSpent(ConversationRefused):
    """The API refuses the conversation because it is too long for the model."""


def check_reachable(model: ChatModel) -> None:
    """Raises UserError if nothing answers at the model's URL; any HTTP status passes. (`ChatClient.answer` waits for a
    server that is away.)"""
    try:
        httpx2.get(model.url, timeout=REACH_SECONDS)
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as e:
        raise UserError(f"{model.url} is no URL of an API: {e}") from None
    except httpx2.TransportError as e:
        reason = str(e) or type(e).__name__
        raise UserError(f"nothing answers at {model.url} ({reason}): check the address, or start the server") from None


class ChatClient:
    """The client of one model, for any number of requests at a time."""

    def __init__(self, model: ChatModel, key: str | None = None, patience: float = PATIENCE) -> None:
        self.model = model
        self.format = FORMATS[model.api]
        self._patience = patience
        self._names: dict[str, str] = {}  # of parameters that the server has refused: its own name, or ""
        self._answered = False
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        headers = self.format.headers(key) if key else {}
        self._http = httpx2.AsyncClient(limits=limits, timeout=None, headers=headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def answer(
        self, conversation: Conversation, tools: Sequence[Mapping[str, Any]], max_tokens: int, seed: int, timeout: float
    ) -> ChatAnswer:
        """The next turn of at most `max_tokens` tokens; `tools` are OpenAI's definitions. Raises TimeoutError if a
        server does not answer within `timeout` seconds, EngineError if servers stay busy, ConversationRefused, and
        UserError for a wrong URL, key or model, or a request that no conversation makes better."""
        started, wait = time.monotonic(), FIRST_WAIT
        while True:
            body, sent = self._body(conversation, tools, max_tokens, seed), time.monotonic()
            try:
                async with asyncio.timeout(timeout):
                    response = await self._http.post(f"{self.model.url.rstrip('/')}{self.format.route}", json=body)
                if response.status_code in _WRONG and self._learns(body, _reason(response)):
                    continue
                if response.status_code not in _BUSY:
                    break
                busy, after = f"status {response.status_code}: {_reason(response)}", _after(response)
            except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as e:
                raise UserError(f"{self.model.url} is no URL of an API: {e}") from None
            except httpx2.TransportError as e:
                busy, after = f"{type(e).__name__} {e}", None
            pause = min(LONGEST_WAIT, max(LEAST_WAIT, after) if after is not None else wait * random.uniform(0.5, 1.0))
            if time.monotonic() - started + pause > self._patience:
                raise EngineError(f"{self.model.url} was busy for {self._patience:.0f} seconds ({busy})")
            await asyncio.sleep(pause)
            wait *= 2
        return self._read(response, sent - started)

    def _body(
        self, conversation: Conversation, tools: Sequence[Mapping[str, Any]], max_tokens: int, seed: int
    ) -> dict[str, Any]:
        body = self.format.body(self.model, conversation, tools, max_tokens, seed)
        renamed = {self._names.get(name, name): value for name, value in body.items()}
        renamed.pop("", None)
        return cast(dict[str, Any], printable_json(renamed))  # results may hold bytes that are no UTF-8

    def _learns(self, body: Mapping[str, Any], reason: str) -> bool:
        """Whether the server refuses a parameter of the request by name, which it is not sent any more then."""
        for name, other in _OTHER_NAMES.items():
            named = name in body and re.search(rf"(?<!\w){name}(?!\w)", reason) and _UNWANTED.search(reason)
            if named and not (other and self.model.api == "anthropic"):  # whose only name it is
                if not other and name not in self._names:
                    log.warning("%s at %s takes no %s: asked without it", self.model.model, self.model.url, name)
                self._names[name] = other
                return True
        return False

    def _read(self, response: httpx2.Response, waited: float) -> ChatAnswer:
        where = f"{self.model.model} at {self.model.url}"
        if response.status_code != 200:
            reason = _reason(response)
            if response.status_code in _WRONG and any(mark in reason.lower() for mark in _TOO_LONG):
                raise ContextSpent(reason)
            if response.status_code in _WRONG and self._answered:
                raise ConversationRefused(f"status {response.status_code}: {reason}")
            raise UserError(f"{where} refuses with status {response.status_code}: {reason}; {_cure(response)}")
        try:
            answer = self.format.read(printable_json(response.json()))
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as e:
            raise EngineError(f"{where} sent what is no answer: {type(e).__name__} {e}") from None
        self._answered = True
        return replace(answer, waited=waited)


def _cure(response: httpx2.Response) -> str:
    if response.status_code in (401, 403):
        return "give the key in the API's environment variable or with --key-file"
    if response.status_code in (404, 405):
        return "give the base of the API, ending in /v1, its kind with --api, and a model that it has with --model"
    return "change the budget or the model"


def _reason(response: httpx2.Response) -> str:
    """The reason of a refusal, with the parameter that it names: an error in OpenAI's form, or a list of details."""
    try:
        data: Any = response.json()
        error = data.get("error") or data
        if isinstance(error, str):
            text = error
        elif details := error.get("detail"):
            entries = details if isinstance(details, list) else [{"msg": details}]
            text = "; ".join(f"{'.'.join(map(str, e.get('loc') or ()))} {e.get('msg') or ''}" for e in entries)
        else:
            named = [error.get(name) for name in ("message", "code", "param")]
            text = " ".join(str(part) for part in named if part) or response.text
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        text = response.text
    return " ".join(text.split())[:300] or "no reason given"


def _after(response: httpx2.Response) -> float | None:
    """The pause in seconds that a busy server demands; None without."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return max(0.0, float(response.headers[name]) / unit)
        except (KeyError, ValueError):  # absent, or a date
            continue
    return None
