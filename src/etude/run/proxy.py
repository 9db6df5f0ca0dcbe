"""The guard of a vLLM server that other hosts reach: every route that a run needs, each behind the run's token.

vLLM's own key covers its inference routes alone, while its development routes change the weights. So a placed server
listens on the loopback device, and this proxy at its host's address. Other routes do not exist here.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from etude.protocol import (
    HANDLERS,
    Access,
    Guarded,
    Refusal,
    bearer,
    open_listener,
    raise_file_limit,
    server_config,
    url_of,
)

GET = ("/health", "/metrics", "/version", "/server_info", "/weight_info", "/is_paused")
UPDATES = ("/collective_rpc", "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version")
POST = ("/inference/v1/generate", *UPDATES)
_CONNECT_SECONDS = 5.0
_LIMITS = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
_KEPT = ("content-type", "retry-after")
_STOP_SECONDS = 5.0


class VllmProxy:
    """A proxy at `host` for the server at `inner`, both with the token. `close` ends it."""

    def __init__(self, inner: str, host: str, token: str) -> None:
        raise_file_limit()
        access = Access(token)
        self._listener = open_listener(host, 0, access)
        self.url = url_of(self._listener)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(
            base_url=inner,
            limits=limits,
            trust_env=False,
            headers={"accept-encoding": "identity", **bearer(token)},
            timeout=_LIMITS,
        )
        routes = [Route(path, self._forward, methods=["GET"]) for path in GET]
        routes += [Route(path, self._forward, methods=["POST"]) for path in POST]
        app = Guarded(Starlette(routes=routes, exception_handlers=HANDLERS), access)
        self._server = uvicorn.Server(server_config(app))
        self._thread = threading.Thread(target=self._server.run, args=[[self._listener]], name="proxy", daemon=True)
        self._thread.start()

    async def _forward(self, http: Request) -> Response:
        """The server's answer, as it comes."""
        kind = http.headers.get("content-type")
        request = self._http.build_request(
            http.method,
            f"{http.url.path}?{http.url.query}".rstrip("?"),
            content=await http.body(),
            headers={"content-type": kind} if kind else {},
        )
        try:
            answer = await self._http.send(request, stream=True)
        except httpx2.TransportError as e:
            raise Refusal(502, f"the server behind this one does not answer ({type(e).__name__})", "lost") from None
        headers = {name: answer.headers[name] for name in _KEPT if name in answer.headers}
        return StreamingResponse(_pieces(answer), answer.status_code, headers)

    def close(self) -> None:
        """Ends the proxy; requests in flight lose their connections."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_STOP_SECONDS)
        self._listener.close()


async def _pieces(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """The body of an answer. A server that is lost in the middle cuts the connection of the client, too."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()
