"""The server that users' clients talk to, before the clusters that serve the model.

POST /v1/chat/completions, /v1/responses, /v1/messages[/count_tokens], GET /v1/models     passed through
POST /v1/feedback, /v1/suggestions                                                        `feedback.py`
GET  /health, /metrics                                                                    for those who run it

An answer goes to the client as it comes, byte for byte. With consent its tokens are asked for once it has gone out
(`GET /v1/turns/ULID` of `etude serve`) and queued for the log; the client never waits for that.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from etude.config.live import LiveConfig
from etude.live.gateway.arms import Assignment, Stages, assign, read_stages
from etude.live.gateway.feedback import read_signals, read_suggestions
from etude.live.gateway.intake import Intake, Key, ServedEntry, TurnEntry, Unavailable
from etude.live.gateway.observed import LastTurns
from etude.live.gateway.upstream import AWAY, Clusters, Headers, Server, UpstreamAnswer
from etude.live.log import schema
from etude.live.log.accounts import Accounts, open_blobs, open_log
from etude.live.log.consent import HEADER as CONSENT
from etude.live.log.consent import decide
from etude.live.log.journal import reading
from etude.live.log.privacy import expire
from etude.live.log.records import Arm, Consent, ServedTurn, Session, TurnContent, TurnKind, VersionSpan, ulid, ulid_of
from etude.live.log.tenants import ApiKey, Directory
from etude.protocol.access import Access, Refusal, bearers, headers
from etude.protocol.apis.refusals import SHAPED_HANDLERS, shaped
from etude.protocol.guard import Guarded
from etude.protocol.serving import open_listener, raise_file_limit, run_server, server_config
from etude.protocol.wire import TURN_HEADER, WEIGHTS_HEADER, ServedTokens

UPSTREAM_VARIABLE = "ETUDE_UPSTREAM_KEY"
"""The environment variable with the token that the clusters' servers ask for."""
_REFRESH_SECONDS = 1.0
_EXPIRE_SECONDS = 86_400.0
_BLIND_SECONDS = 60.0  # without a look at the log, after which nobody gets the canary: a rollback would not be seen
_SIGNAL_SECONDS = 10.0
_FETCH_SECONDS = 15.0
_MOST_FETCHES = 512
_MOST_FETCHED_BYTES = 256 << 20
_DRAIN_SECONDS = 5.0
_IDLE_SECONDS = 1800.0  # of a session without a name
_MOST_SESSIONS = 100_000
_OPERATOR = ("/health", "/metrics")
_DIALECTS = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "messages"}
_BUSY = (502, 503, 504)
# Of one connection, of the gateway's own keys, or set anew.
_NOT_SENT = frozenset({
    b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"content-length",
    b"authorization", b"x-api-key", b"cookie", b"expect", b"proxy-authorization", b"proxy-connection",
})  # fmt: skip
_NOT_TOLD = frozenset({
    b"connection", b"keep-alive", b"transfer-encoding", b"trailer", b"upgrade", b"proxy-authenticate", b"date",
    b"server", WEIGHTS_HEADER.encode(),
})  # fmt: skip


class _ReadFields(msgspec.Struct):
    """What the gateway reads of a body, whoever agreed to what."""

    model: Any = None
    user: Any = None
    metadata: Any = None


@dataclass
class _Served:
    """One request while it is answered."""

    key: ApiKey
    id: str
    path: str
    body: bytes
    account: str
    consent: Consent
    assignment: Assignment
    session: str
    organisation: str
    client: str
    kind: TurnKind
    began: float = field(default_factory=time.monotonic)
    strayed: int | None = None  # release of the control whose server answered, as no server of the account's arm did

    @property
    def release(self) -> int:
        return self.assignment.release if self.strayed is None else self.strayed

    @property
    def counted(self) -> Key:
        return Key(self.assignment.release, self.assignment.arm, self.account, self.key.tenant)


class Gateway:
    """The application, its clusters and its log. `token` is that of the operator's routes, `upstream_token` that of the
    clusters' servers. Raises UserError."""

    def __init__(self, config: LiveConfig, token: str | None = None, upstream_token: str | None = None) -> None:
        self.config = config
        self._token = token
        folder = Path(config.folder)
        self.engine = open_log(folder, config.database)
        self.accounts = Accounts(folder).check(self.engine)
        self.intake = Intake(
            self.engine, open_blobs(folder), self.accounts, config.gateway.queue,
            slot_seconds=60 * config.canary.slot_minutes, window_seconds=config.labels.window_seconds,
        )  # fmt: skip
        self.clusters = Clusters(config.clusters, upstream_token)
        self._holdback = config.canary.holdback if self.clusters.of_arm[Arm.HOLDBACK] else 0.0
        self._directory, self._stages, self._forgotten = Directory(), Stages(), frozenset[str]()
        self._seen = time.monotonic()
        self._manifests: dict[int, str] = {}
        self._sessions: OrderedDict[tuple[str, ...], tuple[str, float]] = OrderedDict()
        self._last = LastTurns()
        self._fetches: set[asyncio.Task[None]] = set()
        self._fetched_bytes = 0  # of the requests whose tokens are asked for
        self._failing = set[str]()
        self._open: dict[str, asyncio.Event] = {}  # turns that were told of and are not queued yet, and their sessions
        posts: dict[str, Any] = {"/v1/feedback": self._feedback, "/v1/suggestions": self._suggest}
        self._refresh()
        self.app = Starlette(
            routes=[
                *(Route(path, _Raw(self), methods=["POST"]) for path in (*_DIALECTS, "/v1/messages/count_tokens")),
                Route("/v1/models", _Raw(self) if config.model is None else self._models, methods=["GET"]),
                *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers=SHAPED_HANDLERS,
        )

    def guarded(self, access: Access) -> Guarded:
        """The application behind its checks. The names of `access` hold; its token is that of the operator alone."""
        names = Access(None, access.hosts)
        return Guarded(self.app, names, authorise=self._authorise, refuse=shaped)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While it answers: servers and log are looked at. What is queued is written at the end."""
        await self.clusters.look()
        tasks = [asyncio.create_task(self.clusters.watch()), asyncio.create_task(self._refreshing())]
        tasks.append(asyncio.create_task(self._expiring()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            if self._fetches:
                await asyncio.wait(self._fetches, timeout=_DRAIN_SECONDS)
            self.clusters.close()
            await asyncio.to_thread(self.intake.close)
            self.engine.dispose()

    # What is known of keys and releases -------------------------------------------------------------------------------

    async def _refreshing(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            await self._in_background("the log cannot be read; keys and releases are those of the last look",
                                      self._refresh)  # fmt: skip

    async def _expiring(self) -> None:
        """Deletes what is older than its tenant keeps it: now, and once a day."""
        store = open_blobs(Path(self.config.folder))
        while True:
            await self._in_background("contents that are too old were not deleted; see `etude live expire`",
                                      partial(expire, self.engine, store))  # fmt: skip
            await asyncio.sleep(_EXPIRE_SECONDS)

    async def _in_background(self, failure: str, work: Callable[[], object]) -> None:
        """Does it beside the answers. A failure is told once, until it has worked again: the next time comes."""
        try:
            await asyncio.to_thread(work)
        except Exception as e:
            if failure not in self._failing:
                print(f"etude live: {failure} ({type(e).__name__} {e})"[:500], file=sys.stderr, flush=True)
            self._failing.add(failure)
        else:
            self._failing.discard(failure)

    def _refresh(self) -> None:
        with reading(self.engine) as connection:
            self._directory.refresh(connection)
            stages = read_stages(connection)
            forgotten = frozenset(connection.scalars(sa.select(schema.tombstones.c.account)))
        self._stages, self._forgotten, self._seen = stages, forgotten, time.monotonic()

    @property
    def _stages_now(self) -> Stages:
        return self._stages if time.monotonic() - self._seen < _BLIND_SECONDS else self._stages.without_canary

    def _authorise(self, scope: Scope) -> None:
        """Raises Refusal for a request without a valid key, or with one that has made too many requests."""
        if scope["path"] in _OPERATOR:
            if self._token is not None and not any(_same(given, self._token) for given in bearers(scope)):
                raise Refusal(401, "the operator's token is needed", "invalid_api_key")
            return
        key = self._key(scope)
        if scope["method"] == "POST" and (wait := self._directory.wait(key)):
            after = {"retry-after": str(max(1, round(wait + 0.5)))}
            raise Refusal(429, "this key has made too many requests in a minute", "rate_limit", headers=after)

    def _key(self, scope: Scope) -> ApiKey:
        for given in bearers(scope):
            if (key := self._directory.find(given)) is not None:
                return key
        raise Refusal(401, "an API key is needed: `etude live key create` makes one", "invalid_api_key")

    # Answers ----------------------------------------------------------------------------------------------------------

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and its answer back."""
        body = (await receive()).get("body", b"")
        served = self._begin(scope, body)
        leaving = asyncio.ensure_future(_gone(receive))
        answering = asyncio.ensure_future(self._pass(scope, served, send))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                self.intake.count(served.counted, "disconnected")
            with suppress(asyncio.CancelledError):
                await answering
        finally:
            answering.cancel()
            leaving.cancel()

    def _begin(self, scope: Scope, body: bytes) -> _Served:
        """Who asks, whether it may be kept, and which release answers: decided before anything is written."""
        key, head, is_readable = self._key(scope), _ReadFields(), True
        if body:
            try:
                head = msgspec.json.decode(body, type=_ReadFields)
            except (ValueError, RecursionError):  # what is wrong with it, the server says
                is_readable = False  # another parser may find a user in it, who was forgotten
        of_body = head.user or (head.metadata.get("user_id") if isinstance(head.metadata, dict) else None)
        given = {name: _text(next(headers(scope, f"x-etude-{name}".encode()), "")) for name in _GIVEN}
        if given["kind"] not in ("", *TurnKind):
            raise Refusal(400, "X-Etude-Kind is main, side or bot", "kind")
        user = given["user"] or (of_body if isinstance(of_body, str) else "") or f"key {key.name}"
        account = self.accounts.name(key.tenant, user)
        policy = self._directory.policies[key.tenant]
        wishes, now = list(headers(scope, CONSENT.encode())), time.time_ns()
        consent = decide(policy, ",".join(wishes) if wishes else None, account in self._forgotten, now)
        if not is_readable:
            consent = Consent(policy="unreadable", at=now)
        assignment = assign(self.accounts, self._stages_now, self._holdback, account)
        agent = next(headers(scope, b"user-agent"), "").partition(" ")[0]
        client = (given["client"] or agent)[:100]
        parts = (account, client, assignment.arm.value, str(assignment.release))
        organisation = given["organisation"] and self.accounts.digest("organisation", key.tenant, given["organisation"])
        return _Served(
            key, ulid(), scope["path"], body, account, consent, assignment, self._session(parts, given["session"]),
            organisation, client, TurnKind(given["kind"] or TurnKind.MAIN),
        )  # fmt: skip

    def _session(self, parts: tuple[str, ...], name: str) -> str:
        """The session of a client's name for it; without one, of its requests with at most half an hour between."""
        if name:
            return ulid_of(int(self.accounts.digest("session", *parts, name), 16))
        now = time.monotonic()
        session, last = self._sessions.get(parts, ("", -_IDLE_SECONDS))
        session = session if now - last < _IDLE_SECONDS and session else ulid()
        self._sessions[parts] = session, now
        self._sessions.move_to_end(parts)
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    async def _pass(self, scope: Scope, served: _Served, send: Send) -> None:
        """The answer of the first server that gives one. A client that leaves cancels it."""
        recorded = served.consent.granted and served.path in _DIALECTS
        begun = False
        try:
            async with asyncio.timeout(self.config.gateway.seconds):
                answer = await self._asked(scope, served, recorded)
                served.strayed = self._strayed(served, answer.server)
                try:
                    begun = True
                    self._opened(served)
                    await send({"type": "http.response.start", "status": answer.status,
                                "headers": self._told(served, answer, recorded)})  # fmt: skip
                    async for part in answer.parts():
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
                finally:
                    answer.close()
                    if answer.status != 200 or not self._after(served, answer.server, recorded):
                        self._settled(served)
        except asyncio.CancelledError:
            self._count(served, failed=False)
            raise
        except AWAY as e:
            self._count(served, failed=True)
            if begun:
                raise  # the connection ends before the answer does: the client must not take it for whole
            await self._unanswered(scope, send, e)
        else:
            self._count(served, failed=answer.status >= 500 or served.strayed is not None)

    def _strayed(self, served: _Served, server: Server) -> int | None:
        """The control's release, if its server answered because those of the account's own arm are away."""
        own, stages = self.clusters.of_arm[served.assignment.arm], self._stages_now
        everywhere = served.assignment.arm == Arm.CANARY and stages.share >= 1
        return None if everywhere or not own or any(server is each for each in own) else stages.released

    async def _asked(self, scope: Scope, served: _Served, recorded: bool) -> UpstreamAnswer:
        """The head of an answer. Raises one of AWAY if no server gives one."""
        query = scope["query_string"].decode("latin-1")
        path = served.path + (f"?{query}" if query else "")
        sent = [(k, v) for k, v in scope["headers"] if k not in _NOT_SENT and not k.startswith(b"x-etude-")]
        if recorded:
            sent.append((TURN_HEADER.encode(), served.id.encode()))
        failure: Exception = EOFError("no server")
        deadline = time.monotonic() + self.config.gateway.seconds
        servers = self.clusters.order(served.assignment.arm, served.account, self._stages_now)
        for number, server in enumerate(servers):
            left = deadline - time.monotonic()
            try:
                body = self._mapped(served.body, server)
                answer = await server.ask(scope["method"], path, sent, body, left)
            except AWAY as e:
                failure = e
            else:
                if answer.status not in _BUSY or number + 1 == len(servers):
                    return answer
                answer.close()
            self.intake.count(served.counted, "failovers")
        raise failure

    def _mapped(self, body: bytes, server: Server) -> bytes:
        """The body with the server's own name of the model, if it has the gateway's; all else stays as it is."""
        if self.config.model is None or not server.model or not body or self.config.model == server.model:
            return body
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            if msgspec.json.decode(fields.get("model", b"null")) != self.config.model:
                return body
        except (ValueError, RecursionError):
            return body
        return msgspec.json.encode(fields | {"model": server.model})

    def _told(self, served: _Served, answer: UpstreamAnswer, recorded: bool) -> Headers:
        version = answer.header(WEIGHTS_HEADER.encode()) or str(answer.server.version)
        own = {
            "x-etude-generation": served.id, "x-etude-session": served.session,
            "x-etude-version": f"{served.release}/{version}", "x-etude-recorded": str(recorded).lower(),
        }  # fmt: skip
        return [(k, v) for k, v in answer.headers if k not in _NOT_TOLD] + [
            (k.encode(), v.encode()) for k, v in own.items()
        ]

    async def _unanswered(self, scope: Scope, send: Send, e: BaseException) -> None:
        late = isinstance(e, TimeoutError)
        message = "no server of the clusters answered in time" if late else "no server of the clusters can be reached"
        refusal = Refusal(
            504 if late else 503, f"{message}: try again later", "overloaded", headers={"retry-after": "1"}
        )
        await shaped(scope, refusal)(scope, _nothing, send)

    def _count(self, served: _Served, failed: bool) -> None:
        if served.path not in _DIALECTS:
            return
        key = served.counted
        self.intake.count(key, "requests")
        self.intake.count(key, "seconds", time.monotonic() - served.began)
        if failed:
            self.intake.count(key, "errors")

    # Records ----------------------------------------------------------------------------------------------------------

    def _opened(self, served: _Served) -> None:
        """From now on the client knows the turn."""
        self._open[served.id] = self._open[served.session] = asyncio.Event()

    def _settled(self, served: _Served) -> None:
        """The turn is queued, or there will be no record of it."""
        settled = self._open.pop(served.id)
        settled.set()
        if self._open.get(served.session) is settled:
            del self._open[served.session]

    def _after(self, served: _Served, server: Server, recorded: bool) -> bool:
        """Queues what may be kept of an answer that has gone out, or of what the client took of it. True if that is
        still to come: the tokens are asked for first."""
        if served.path not in _DIALECTS:
            return False
        if not recorded:
            self.intake.append(ServedEntry(served.id, served.counted))
        elif len(self._fetches) >= _MOST_FETCHES or self._fetched_bytes + len(served.body) > _MOST_FETCHED_BYTES:
            self.intake.drop("queue_full")
            self.intake.count(served.counted, "dropped")
        else:
            task = asyncio.create_task(self._record(served, server, time.monotonic() - served.began))
            self._fetches.add(task)
            self._fetched_bytes += len(served.body)
            task.add_done_callback(lambda _: self._fetched(task, served))
            return True
        return False

    def _fetched(self, task: asyncio.Task[None], served: _Served) -> None:
        self._fetches.discard(task)
        self._fetched_bytes -= len(served.body)
        self._settled(served)

    async def _record(self, served: _Served, server: Server, seconds: float) -> None:
        tokens = None
        with suppress(*AWAY, ValueError):
            if server.keeps_turns:
                status, body = await server.fetch(f"/v1/turns/{served.id}", _FETCH_SECONDS)
                tokens = msgspec.msgpack.decode(body, type=ServedTokens) if status == 200 else None
        if tokens is not None and tokens.spans and tokens.spans[-1][2] not in server.digests:
            await server.look()  # it went to this version after the last look
        entry = self._entry(served, server, tokens, seconds)
        signals = await asyncio.to_thread(self._last.signals, entry)
        if self.intake.append(entry) and signals:
            self.intake.submit(signals)

    def _entry(self, served: _Served, server: Server, tokens: ServedTokens | None, seconds: float) -> TurnEntry:
        assignment, content = served.assignment, None
        spans = tuple(VersionSpan(low=s[0], high=s[1], version=s[2]) for s in (tokens.spans if tokens else ()))
        version = spans[-1].version if spans else server.version
        if (reason := _untrainable(tokens)) != "no_tokens":
            assert tokens is not None
            content = TurnContent(
                dialect=_DIALECTS[served.path], request=served.body, response=tokens.message,
                prompt_ids=tokens.prompt_ids, ids=tokens.ids, logprobs=tokens.logprobs, temperature=tokens.temperature,
                top_p=tokens.top_p,
            )  # fmt: skip
        session = Session(
            id=served.session, tenant=served.key.tenant, account=served.account, organisation=served.organisation,
            client=served.client, consent=served.consent, arm=assignment.arm, release=assignment.release,
            propensity=assignment.propensity, opened=0,
        )  # fmt: skip
        turn = ServedTurn(
            id=served.id, session=served.session, sequence=0, kind=served.kind, release=served.release,
            manifest=server.digests.get(version, ""), spans=spans, blob=None, reason=reason, scrubbed={}, rules="",
            prompt_tokens=len(tokens.prompt_ids) // 4 if tokens else 0, seconds=seconds, cluster=server.cluster, at=0,
            sampled_tokens=len(tokens.ids) // 4 if tokens else 0, stop=tokens.finish_reason if tokens else "",
        )  # fmt: skip
        keep = self._directory.policies[served.key.tenant].keep
        return TurnEntry(session, turn, content, tokens.text if tokens else "", keep)

    # Signals ----------------------------------------------------------------------------------------------------------

    async def _feedback(self, http: HTTPRequest) -> Response:
        entries = read_signals(await http.body(), self._key(http.scope).tenant)
        return await self._committed(entries, [(entry.signal.event, entry.signal.subject) for entry in entries])

    async def _suggest(self, http: HTTPRequest) -> Response:
        entries = read_suggestions(await http.body(), self._key(http.scope).tenant, self.accounts)
        return await self._committed(entries, [(entry.suggestion.id, entry.suggestion.turn) for entry in entries])

    async def _committed(self, entries: Sequence[Any], named: list[tuple[str, str]]) -> Response:
        """What became of each entry, of these names and subjects, once it is on the disk. What is on a turn that is not
        queued yet waits for that. Raises Refusal."""
        coming = [self._open.get(subject) for _, subject in named]
        try:
            async with asyncio.timeout(_SIGNAL_SECONDS):
                told = await asyncio.wrap_future(self.intake.submit(entries))
                early = [n for n, turn in enumerate(coming) if turn is not None and told[n] == "unknown"]
                if early:
                    await asyncio.gather(*(turn.wait() for n in early if (turn := coming[n]) is not None))
                    again = await asyncio.wrap_future(self.intake.submit([entries[n] for n in early]))
                    told = [dict(zip(early, again, strict=True)).get(n, status) for n, status in enumerate(told)]
        except (Unavailable, TimeoutError):
            message = "the log cannot be written now, or the answer has not ended: send it again later"
            raise Refusal(503, message, "overloaded", headers={"retry-after": "5"}) from None
        results = [{"event": name, "status": status} for (name, _), status in zip(named, told, strict=True)]
        return JSONResponse({"results": results}, 404 if "unknown" in told else 200)

    async def _models(self, http: HTTPRequest) -> Response:
        """The one model of the clusters, by its name for clients."""
        card = {"id": self.config.model, "object": "model", "created": 0, "owned_by": "etude"}
        return JSONResponse({"object": "list", "data": [card]})

    # Operation --------------------------------------------------------------------------------------------------------

    async def _health(self, http: HTTPRequest) -> Response:
        servers = [
            {"url": s.url, "cluster": s.cluster, "healthy": s.healthy, "version": s.version, "tokens": s.keeps_turns}
            for s in self.clusters.all
        ]  # fmt: skip
        stages, blind = self._stages_now, time.monotonic() - self._seen
        well = any(server.healthy for server in self.clusters.all)
        body = {
            "status": "ok" if well and blind < _BLIND_SECONDS else "degraded", "servers": servers,
            "released": stages.released, "canary": stages.canary, "share": stages.share,
            "log_seen_seconds": round(blind, 1), "waiting": self.intake.waiting,
            "drops": dict(self.intake.counters.drops),
        }  # fmt: skip
        return JSONResponse(body, 200 if well else 503)

    async def _metrics(self, http: HTTPRequest) -> Response:
        """Prometheus' text format."""
        counters = self.intake.counters
        lines = [
            f"etude_live_{name}_total {getattr(counters, name)}"
            for name in ("turns", "signals", "duplicates", "commits", "failed_commits", "uncounted")
        ]
        lines += [f'etude_live_drops_total{{reason="{reason}"}} {n}' for reason, n in sorted(counters.drops.items())]
        lines += [f"etude_live_waiting {self.intake.waiting}", f"etude_live_fetches {len(self._fetches)}"]
        for server in self.clusters.all:
            labels = f'{{cluster="{server.cluster}",url="{server.url}"}}'
            told = {"healthy": int(server.healthy), "version": server.version, "answers_total": server.answers}
            lines += [f"etude_live_{name}{labels} {value}" for name, value in told.items()]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


class _Serving(uvicorn.Server):
    """A server whose gateway runs as long as it does."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn's."""
        async with self._gateway.running():
            await super().serve(sockets)


def serve(config: LiveConfig, access: Access, ready_file: Path | None = None) -> None:
    """Answers until SIGINT or SIGTERM. `access` has the operator's token, which another machine's clients need to get
    in; the clusters are asked with that in $ETUDE_UPSTREAM_KEY. Raises UserError."""
    raise_file_limit()
    sys.setswitchinterval(0.0001)  # the writer's thread gives the event loop its turn after this long
    with open_listener(config.gateway.host, config.gateway.port, access) as listener:
        gateway = Gateway(config, access.token, os.environ.get(UPSTREAM_VARIABLE) or None)
        server = _Serving(server_config(gateway.guarded(access)), gateway)
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises it again once it has drained
            signal.signal(number, lambda *_: None)
        run_server(server, listener, "gateway", ready_file)


_GIVEN = ("user", "session", "kind", "organisation", "client")


class _Raw:
    """A route that answers in ASGI itself."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway.answer(scope, receive, send)


def _untrainable(tokens: ServedTokens | None) -> str:
    """Why an answer cannot be trained on; empty if it can."""
    if tokens is None or not tokens.ids or len(tokens.ids) != len(tokens.logprobs):
        return "no_tokens"
    if tokens.choices != 1:
        return "several_choices"
    return "" if tokens.plain else "sampling"


def _text(header: str) -> str:
    """A header's value: UTF-8, as most clients send it, else Latin-1. The same person has the same name in a body."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeDecodeError:
        return header


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("latin-1"), token.encode())


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Any:
    return {"type": "http.disconnect"}
