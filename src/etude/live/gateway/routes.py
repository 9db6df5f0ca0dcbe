"""The gateway's routes.

POST /v1/chat/completions, /v1/responses, /v1/messages[/count_tokens], GET /v1/models     `proxy.py`
POST /v1/feedback, /v1/suggestions                                                        `feedback.py`
GET  /health, /metrics                                                                    for operators
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from etude.live.gateway.entries import SignalEntry, SuggestionEntry
from etude.live.gateway.feedback import read_signals, read_suggestions
from etude.live.gateway.keys import KeyCheck
from etude.live.gateway.metrics import MEDIA_TYPE, metrics_text
from etude.live.gateway.proxy import AnswerProxy
from etude.live.gateway.queue import RecordQueue, Unavailable
from etude.live.gateway.recorder import TurnRecorder
from etude.live.gateway.requests import DIALECTS, user_of
from etude.live.gateway.upstream import Clusters
from etude.live.gateway.view import BLIND_SECONDS, LogView
from etude.live.gateway.writer import LogWriter
from etude.live.log.accounts import Accounts
from etude.protocol import Refusal
from etude.protocol.apis import SHAPED_HANDLERS

SIGNAL_SECONDS = 10.0
"""The longest time that a client waits until its signals are on the disk."""
_WHY = {
    "unknown": "the key's tenant has no turn, suggestion or session of that id",
    "ambiguous": "several answers have that id: give the header x-etude-generation of the one",
    "conflict": "another signal has this event_id: give each its own",
}


class GatewayRoutes:
    """The HTTP application `app`. `model` is the one model of the clusters by its name for clients; None: each server
    lists its own."""

    def __init__(
        self,
        model: str | None,
        clusters: Clusters,
        view: LogView,
        keys: KeyCheck,
        accounts: Accounts,
        queue: RecordQueue,
        writer: LogWriter,
        recorder: TurnRecorder,
        proxy: AnswerProxy,
    ) -> None:
        self._model = model
        self._clusters = clusters
        self._view = view
        self._keys = keys
        self._accounts = accounts
        self._queue = queue
        self._writer = writer
        self._recorder = recorder
        self.app = Starlette(
            routes=[
                *(Route(path, proxy, methods=["POST"]) for path in (*DIALECTS, "/v1/messages/count_tokens")),
                Route("/v1/models", proxy if model is None else self._models, methods=["GET"]),
                Route("/v1/feedback", self._feedback, methods=["POST"]),
                Route("/v1/suggestions", self._suggest, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers=SHAPED_HANDLERS,
        )

    async def _feedback(self, http: HTTPRequest) -> Response:
        tenant = self._keys.key(http.scope).tenant
        entries = read_signals(await http.body(), tenant, self._account(http, tenant))
        return await self._commit(tenant, entries, [(entry.signal.event, entry.signal.subject) for entry in entries])

    async def _suggest(self, http: HTTPRequest) -> Response:
        tenant = self._keys.key(http.scope).tenant
        entries = read_suggestions(await http.body(), tenant, self._accounts, self._account(http, tenant))
        return await self._commit(tenant, entries, [(entry.suggestion.id, entry.suggestion.turn) for entry in entries])

    def _account(self, http: HTTPRequest, tenant: str) -> str:
        """The account of the user that a request names; "" without."""
        user = user_of(http.scope)
        return self._accounts.name(tenant, user) if user else ""

    async def _commit(
        self, tenant: str, entries: Sequence[SignalEntry | SuggestionEntry], names: list[tuple[str, str]]
    ) -> JSONResponse:
        """The status of each entry, once all are on the disk; `names` are their events and subjects. An entry on a turn
        that is not queued yet waits for the turn. Raises Refusal."""
        turns = [self._recorder.waiting(tenant, subject) for _, subject in names]
        try:
            async with asyncio.timeout(SIGNAL_SECONDS):
                statuses = await asyncio.wrap_future(self._queue.submit(entries))
                early = [n for n, turn in enumerate(turns) if turn is not None and statuses[n] == "unknown"]
                if early:
                    await asyncio.gather(*(turn.wait() for n in early if (turn := turns[n]) is not None))
                    again = await asyncio.wrap_future(self._queue.submit([entries[n] for n in early]))
                    later = dict(zip(early, again, strict=True))
                    statuses = [later.get(n, status) for n, status in enumerate(statuses)]
        except (Unavailable, TimeoutError):
            message = "the log cannot be written now, or the answer has not ended: send it again later"
            raise Refusal(503, message, "overloaded", headers={"retry-after": "5"}) from None
        results = [
            {"event": name, "status": status} | ({"message": _WHY[status]} if status in _WHY else {})
            for (name, _), status in zip(names, statuses, strict=True)
        ]
        codes = {"unknown": 404, "conflict": 409, "ambiguous": 422}
        return JSONResponse({"results": results}, next((codes[name] for name in codes if name in statuses), 200))

    async def _models(self, http: HTTPRequest) -> Response:
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "etude"}
        return JSONResponse({"object": "list", "data": [card]})

    async def _health(self, http: HTTPRequest) -> Response:
        servers = [
            {"url": s.url, "cluster": s.cluster, "healthy": s.healthy, "version": s.version, "tokens": s.keeps_turns}
            for s in self._clusters.all
        ]
        stages, age = self._view.stages, self._view.age
        reachable = any(server.healthy for server in self._clusters.all)
        body = {
            "status": "ok" if reachable and age < BLIND_SECONDS else "degraded",
            "servers": servers,
            "released": stages.released,
            "canary": stages.canary,
            "share": stages.share,
            "log_seen_seconds": round(age, 1),
            "waiting": self._queue.waiting,
            "drops": dict(self._queue.counters.drops),
        }
        return JSONResponse(body, 200 if reachable else 503)

    async def _metrics(self, http: HTTPRequest) -> Response:
        text = metrics_text(self._queue, self._writer, self._recorder, self._clusters)
        return PlainTextResponse(text, media_type=MEDIA_TYPE)
