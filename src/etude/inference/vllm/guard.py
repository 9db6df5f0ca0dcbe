"""The token of a vLLM server that a run starts: vLLM's own key covers the routes of clients, but not those by which
weights and workers are changed.

    vllm serve ... --middleware etude.inference.vllm.guard.TokenGuard       with the token in $ETUDE_API_KEY
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from etude.errors import UserError
from etude.protocol import TOKEN_VARIABLE, bearers, own_token

HEALTH = "/health"
"""The one route without a token."""
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class TokenGuard:
    """An ASGI application whose requests all need the token, but those for `HEALTH`. Raises UserError without one."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        token = own_token()
        if token is None:
            raise UserError(f"this server is open to its network: set {TOKEN_VARIABLE} to its token")
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == HEALTH or self._is_shown(scope):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        body = json.dumps({"error": {"message": "a token is needed: send it as `Authorization: Bearer TOKEN`"}})
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode()})

    def _is_shown(self, scope: _Scope) -> bool:
        return any(hmac.compare_digest(shown.encode("latin-1"), self._token) for shown in bearers(scope))
