"""The servers behind the gateway: their connections, their health, and the order of servers for an account.

A request whose answer has not begun is sent to another server if its own is away. The connection pool is written on
h11: with httpx2 the gateway answers about half as many requests a second."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

from etude.config.live import ClusterConfig
from etude.live.gateway.arms import Stages
from etude.live.log.records import Arm
from etude.protocol import bearer

_CONNECT_SECONDS = 2.0
_HEALTH_SECONDS = 2.0
_PAUSE_SECONDS = 1.0  # between two requests for a server's health
_IDLE_SECONDS = 4.0  # etude's servers close an idle connection after five
_MAX_IDLE = 256
_READ = 1 << 16
_MAX_BYTES = 64 << 20  # of an answer that is read whole
AWAY = (OSError, EOFError, TimeoutError, h11.ProtocolError)
"""The errors of a server that is away."""

Headers = list[tuple[bytes, bytes]]


class _Link:
    """One HTTP/1.1 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 17)
        self.since = time.monotonic()
        self.abandoned = False

    def abort(self) -> None:
        self.writer.transport.abort()

    async def event(self) -> Any:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.reader.read(_READ))
        return event


@dataclass
class Server:
    """One server of a cluster."""

    url: str
    cluster: str
    token: str | None = field(default=None, repr=False)
    healthy: bool = True  # until the first look
    keeps_turns: bool = False  # it gives out the tokens of turns (`/v1/turns`)
    version: int = 0
    digests: dict[int, str] = field(default_factory=dict[int, str])  # by version, the last few
    model: str | None = None
    failures: int = 0
    answers: int = 0
    _idle: list[_Link] = field(default_factory=list[_Link])
    _waiting: set[_Link] = field(default_factory=set[_Link])

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._path = parts.hostname or "", parts.path.rstrip("/")
        self._port = parts.port or (443 if self._tls else 80)
        self._head: Headers = [(b"host", parts.netloc.encode())]
        self._head += [(name.encode(), value.encode()) for name, value in bearer(self.token).items()]

    async def ask(self, method: str, path: str, headers: Headers, body: bytes, seconds: float) -> UpstreamAnswer:
        """Sends a request and waits for the head of its answer, at most `seconds`. Raises one of AWAY."""
        link = self._kept()
        if link is not None:
            try:
                return await self._ask(link, method, path, headers, body, seconds)
            except TimeoutError:
                raise
            except AWAY:  # closed while it was idle
                if link.abandoned:
                    raise
        opening = asyncio.open_connection(self._host, self._port, ssl=self._tls)
        link = _Link(*await asyncio.wait_for(opening, min(_CONNECT_SECONDS, seconds)))
        return await self._ask(link, method, path, headers, body, seconds)

    async def _ask(
        self, link: _Link, method: str, path: str, headers: Headers, body: bytes, seconds: float
    ) -> UpstreamAnswer:
        sized = [(b"content-length", str(len(body)).encode())] if body or method == "POST" else []
        head = h11.Request(method=method, target=self._path + path, headers=[*self._head, *headers, *sized])
        data = link.http.send(head) or b""
        if body:
            data += link.http.send(h11.Data(data=body)) or b""
        data += link.http.send(h11.EndOfMessage()) or b""
        self._waiting.add(link)
        try:
            async with asyncio.timeout(seconds):
                link.writer.write(data)
                await link.writer.drain()
                while not isinstance(event := await link.event(), h11.Response):
                    if isinstance(event, h11.ConnectionClosed):
                        raise EOFError("the server closed the connection")
        except BaseException:
            link.abort()
            raise
        finally:
            self._waiting.discard(link)
        return UpstreamAnswer(self, link, event.status_code, list(event.headers))

    def _kept(self) -> _Link | None:
        self._end_old_links()
        return self._idle.pop() if self._idle else None

    def _end_old_links(self) -> None:
        """Ends the idle connections that the server has closed or is about to close."""
        old = [link for link in self._idle if time.monotonic() - link.since >= _IDLE_SECONDS or link.reader.at_eof()]
        for link in old:
            self._idle.remove(link)
            link.abort()

    def keep(self, link: _Link) -> None:
        """Returns a connection to the pool, once its answer has been read whole."""
        done = link.http.our_state is h11.DONE and link.http.their_state is h11.DONE
        if not done or len(self._idle) >= _MAX_IDLE:
            link.abort()
            return
        link.http.start_next_cycle()
        link.since = time.monotonic()
        self._idle.append(link)

    async def fetch(self, path: str, seconds: float) -> tuple[int, bytes]:
        """Status and body of a GET. Raises one of AWAY."""
        async with asyncio.timeout(seconds):
            answer = await self.ask("GET", path, [], b"", seconds)
            try:
                body = bytearray()
                async for part in answer.parts():
                    body += part
                    if len(body) > _MAX_BYTES:
                        raise EOFError("the answer is too long")
                return answer.status, bytes(body)
            finally:
                answer.close()

    async def look(self) -> None:
        """Reads the server's health, version, digest and name of the model, and ends idle connections. A server that
        has no `/health` is well while it lists its models."""
        self._end_old_links()
        try:
            status, body = await self.fetch("/health", _HEALTH_SECONDS)
            if status == 404:
                status, body = await self.fetch("/v1/models", _HEALTH_SECONDS)
            well = status == 200
        except AWAY as e:
            self.failures += 1
            self.healthy = self.healthy and isinstance(e, TimeoutError) and self.failures < 2
            return
        self.failures = 0 if well else self.failures + 1
        came_back, self.healthy = well and (not self.healthy or self.model is None), well
        self.keeps_turns = self.keeps_turns and not well  # a server that was started again may keep none
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
            state = json.loads(body)
            self.keeps_turns, self.version = state.get("keeps_turns") is True, int(state["version"])
            self.digests = dict([*self.digests.items(), (self.version, str(state["digest"]))][-64:])
        if came_back:
            with contextlib.suppress(*AWAY, ValueError, KeyError, TypeError, IndexError):
                self.model = str(json.loads((await self.fetch("/v1/models", _HEALTH_SECONDS))[1])["data"][0]["id"])

    def give_up_waiting(self) -> None:
        """Ends the requests whose answers have not begun, so that other servers answer them."""
        for link in list(self._waiting):
            link.abandoned = True
            link.abort()

    def close(self) -> None:
        """Ends the idle connections."""
        while self._idle:
            self._idle.pop().abort()


class UpstreamAnswer:
    """The head of an answer, and its body as it comes."""

    def __init__(self, server: Server, link: _Link, status: int, headers: Headers) -> None:
        self.server, self.status, self.headers = server, status, headers
        self._link, self._whole = link, False

    def header(self, name: bytes) -> str | None:
        """A header of the answer; `name` is in lower case."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)

    async def parts(self) -> AsyncIterator[bytes]:
        """The bytes of the body, each part as soon as it comes. Raises one of AWAY if the body breaks off."""
        while not isinstance(event := await self._link.event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise EOFError("the answer broke off")
            yield bytes(event.data)
        self._whole = True

    def close(self) -> None:
        """Keeps the connection if the body was read whole, and ends it if not."""
        self.server.keep(self._link) if self._whole else self._link.abort()


class Clusters:
    """All servers, by arm. `watch` checks their health until it is cancelled."""

    def __init__(self, clusters: Sequence[ClusterConfig], token: str | None = None) -> None:
        def servers(cluster: ClusterConfig, urls: Sequence[str]) -> list[Server]:
            return [Server(url.rstrip("/"), cluster.name, token) for url in urls]

        self.of_arm: dict[Arm, list[Server]] = {
            Arm.CONTROL: [server for cluster in clusters for server in servers(cluster, cluster.urls)],
            Arm.CANARY: [server for cluster in clusters for server in servers(cluster, cluster.canary_urls)],
            Arm.HOLDBACK: [server for cluster in clusters for server in servers(cluster, cluster.holdback_urls)],
        }
        self.all = [server for servers in self.of_arm.values() for server in servers]
        self._textual = set[str]()  # URLs of servers that keep no turns, of which a line was printed

    def order(self, arm: Arm, account: str, stages: Stages = Stages()) -> list[Server]:
        """The servers for an account, in the order of attempts: healthy ones first, the arm's before the control's. An
        account keeps its order, cluster by cluster, so that its prefixes stay cached. Once all accounts have the
        canary, the control's servers have it, too. Drained clusters come only if there are no others."""

        def rank(server: Server) -> tuple[bool, bytes, bytes]:
            return not server.healthy, _hash(account, server.cluster), _hash(account, server.url)

        def undrained(of: Arm) -> list[Server]:
            return [server for server in self.of_arm[of] if (server.cluster, of) not in stages.drained]

        own, others = undrained(arm), [] if arm == Arm.CONTROL else undrained(Arm.CONTROL)
        if arm == Arm.CANARY and stages.share >= 1:
            own, others = own + others, []
        ranked = [*sorted(own, key=rank), *sorted(others, key=rank)] or sorted(self.of_arm[Arm.CONTROL], key=rank)
        return [server for server in ranked if server.healthy] + [server for server in ranked if not server.healthy]

    async def look(self) -> None:
        """Checks every server once. Prints a line on stderr for a server that goes away, comes back, or keeps no
        turns."""
        before = [server.healthy for server in self.all]
        await asyncio.gather(*(server.look() for server in self.all))
        for server, was_healthy in zip(self.all, before, strict=True):
            if server.healthy != was_healthy:
                _say(server, "answers again" if server.healthy else "does not answer, or is not well: it is asked last")
        for server in self.all:
            if server.keeps_turns or not server.healthy:
                self._textual.discard(server.url)
            elif server.url not in self._textual:
                self._textual.add(server.url)
                _say(server, "keeps no turns: its answers are logged without tokens, and not trained on (docs/live.md)")
        for server in self.all:
            if not server.healthy and any(other.healthy for other in self.all):
                server.give_up_waiting()

    async def watch(self) -> None:
        """Checks the servers every `_PAUSE_SECONDS`."""
        while True:
            await self.look()
            await asyncio.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Ends the idle connections."""
        for server in self.all:
            server.close()


def _say(server: Server, what: str) -> None:
    print(f"etude live: the server {server.url} of cluster {server.cluster} {what}", file=sys.stderr, flush=True)


def _hash(*parts: str) -> bytes:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
