"""Refusals in the shape of a request's API: Anthropic's for its routes and clients, else OpenAI's."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from etude.protocol.access import Refusal
from etude.protocol.apis import anthropic
from etude.protocol.apis.conversation import RequestRefused
from etude.protocol.guard import HANDLERS, refused, wrong_route


def shaped_refusal(scope: Scope, refusal: Refusal) -> Response:
    """A refusal in the shape of the request's API."""
    keys = [key for key, _ in scope["headers"]]
    if scope["path"].startswith("/v1/messages") or (b"x-api-key" in keys and b"authorization" not in keys):
        return anthropic.refusal_of_server(refusal)
    return refused(scope, refusal)


async def _refusing(http: Request, e: Exception) -> Response:
    assert isinstance(e, Refusal)
    return shaped_refusal(http.scope, e)


def _missing(http: Request, e: Exception) -> Response:
    if not http.url.path.startswith("/v1/messages"):
        return wrong_route(http, e)
    return anthropic.refused(RequestRefused("unknown", f"{http.method} {http.url.path[:200]} is not served here"))


def _broken(http: Request, e: Exception) -> Response:
    return shaped_refusal(http.scope, Refusal(500, f"this server failed: {type(e).__name__}"))


SHAPED_HANDLERS: Any = HANDLERS | {HTTPException: _missing, Refusal: _refusing, Exception: _broken}
"""Exception handlers of an application with routes of both APIs."""
