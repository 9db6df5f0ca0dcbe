"""The controller's side of the engine: no torch, one connection pool, a deadline on every call."""

from __future__ import annotations

import asyncio
import itertools
import struct
import weakref
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import httpx2
import msgspec

from etude.records import Generation, Record

MSGPACK = "application/msgpack"
T = TypeVar("T")
_SESSIONS = 10_000  # whose servers are remembered; those that are tasks are forgotten with them
_RETRY_SECONDS = 0.2  # between two attempts to reach a server that does not answer
_CONNECT_SECONDS = 5.0
# Servers close a connection that was idle for five seconds. One that is nearly as old may be closed while we send.
_IDLE_SECONDS = 2.0
_LIMITS = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
_HEADERS = {"content-type": MSGPACK, "accept": MSGPACK}
CONFLICT = 409  # another version came while a server scored


class EngineError(Exception):
    """The engine is dead, cannot be reached before the deadline, or refused the request."""


class GenerateRequest(Record, frozen=True, kw_only=True):
    """Body of `POST /generate`, as JSON or MessagePack."""

    ids: list[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[int, ...] = ()
    seed: int = 0
    session: str | None = None
    routes_from: int | None = None
    documents: tuple[list[int], ...] = ()
    stream: bool = False  # answer in frames, see `frame`: ids as they are sampled, the Generation last


def frame(part: list[int] | Generation) -> bytes:
    """One part of a streamed answer: four bytes of length, little-endian, and MessagePack."""
    data = msgspec.msgpack.encode(part)
    return struct.pack("<I", len(data)) + data


class ScoreRequest(Record, frozen=True, kw_only=True):
    """Body of `POST /score`, as JSON or MessagePack."""

    sequences: tuple[list[int], ...]


class Scored(Record, frozen=True, kw_only=True):
    """Log-probabilities of given ids: of each sequence's tokens but the first, given those before, at temperature 1."""

    version: int
    digest: str  # of the tensors that the server says it serves
    logprobs: tuple[list[float], ...]


class EngineClient:
    """Talks to one or several inference servers that serve the same model.

    A session stays on one server, where its keys and values are; a new one goes to the server with the fewest calls
    in flight. Without a name for it, the asyncio task that calls is the session: an agent loop plays in one.
    """

    def __init__(self, base_urls: Sequence[str]) -> None:
        if not base_urls:
            raise ValueError("the engine client needs at least one URL")
        self.base_urls = [url.rstrip("/") for url in base_urls]
        self._in_flight = dict.fromkeys(self.base_urls, 0)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_SECONDS)
        self._http = httpx2.AsyncClient(limits=limits, trust_env=False)
        self._numbers = itertools.count()
        self._sessions: weakref.WeakKeyDictionary[asyncio.Task[object], str] = weakref.WeakKeyDictionary()
        self._servers: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def generate(
        self,
        ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop: Sequence[int],
        seed: int,
        timeout: float,
        session: str | None = None,
        routes_from: int | None = None,
        documents: Sequence[list[int]] = (),
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> Generation:
        """At most `max_tokens` tokens after `ids`, the stop token included; with the experts of the positions from
        `routes_from` on, where that is given.

        `documents` stand before `ids`; each sees itself only and is computed once for all requests (docs/documents.md).
        `on_tokens` is called with the sampled ids as they come.
        A server that cannot be reached is tried again until the deadline. Raises TimeoutError after `timeout` seconds,
        EngineError if no server could be reached in that time, or if one refused the request.
        """
        session = session if session is not None else self._task_session()
        request = GenerateRequest(
            ids=ids, max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=tuple(stop), seed=seed,
            session=session, routes_from=routes_from, documents=tuple(documents), stream=on_tokens is not None,
        )  # fmt: skip
        body = msgspec.msgpack.encode(request)
        url = self._server(session)
        self._in_flight[url] += 1
        try:
            if on_tokens is not None:
                return await self._follow(url, body, timeout, on_tokens)
            response = await self._post(f"{url}/generate", body, timeout)
        finally:
            self._in_flight[url] -= 1
        _accepted(url, response)
        try:
            return msgspec.msgpack.decode(response.content, type=Generation)
        except msgspec.MsgspecError as e:
            raise EngineError(f"{url} sent an answer that is not a generation: {e}") from None

    async def score(self, url: str, sequences: Sequence[list[int]], timeout: float) -> Scored | None:
        """What the server's weights say of these sequences, each computed alone, with fresh keys and values.

        None if another version came while it scored. Raises TimeoutError after `timeout` seconds, EngineError if the
        server cannot be reached, refuses, or answers another question.
        """
        body = msgspec.msgpack.encode(ScoreRequest(sequences=tuple(sequences)))
        response = await self._post(f"{url.rstrip('/')}/score", body, timeout)
        if response.status_code == CONFLICT:
            return None
        if response.status_code != 200:
            raise EngineError(f"{url} refused to score ({response.status_code}): {_reason(response)}")
        try:
            scored = msgspec.msgpack.decode(response.content, type=Scored)
        except msgspec.MsgspecError as e:
            raise EngineError(f"{url} sent an answer that is not a score: {e}") from None
        if [len(found) + 1 for found in scored.logprobs] != [len(ids) for ids in sequences]:
            raise EngineError(f"{url} scored other sequences than it was asked to")
        return scored

    async def health(self, url: str, timeout: float = 10.0) -> dict[str, object]:
        """What the server says of itself: status, version, digest, load and utilisation. Raises EngineError."""
        route = f"{url.rstrip('/')}/health"
        try:
            try:
                response = await self._http.get(route, timeout=timeout)
            except (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError):
                # A connection that broke says nothing of the server: whether it lives is asked on a new one.
                response = await self._http.get(route, timeout=timeout)
            return msgspec.json.decode(response.content, type=dict[str, object])
        except (httpx2.HTTPError, msgspec.MsgspecError) as e:
            raise EngineError(f"{url} does not answer: {type(e).__name__} {e}") from None

    async def _post(self, route: str, body: bytes, timeout: float) -> httpx2.Response:
        def attempt() -> Awaitable[httpx2.Response]:
            return self._http.post(route, content=body, headers=_HEADERS, timeout=_LIMITS)

        return await self._reached(route, attempt, timeout)

    async def _follow(
        self, url: str, body: bytes, timeout: float, on_tokens: Callable[[list[int]], None]
    ) -> Generation:
        """A streamed generation. Once tokens have been told, a lost server is an error: others must not follow them."""

        async def attempt() -> Generation:
            told = False
            buffer = bytearray()
            try:
                async with self._http.stream(
                    "POST", f"{url}/generate", content=body, headers=_HEADERS, timeout=_LIMITS
                ) as response:
                    if response.status_code != 200:
                        await response.aread()
                        _accepted(url, response)
                    async for chunk in response.aiter_bytes():
                        buffer += chunk
                        for part in _frames(buffer):
                            if isinstance(part, Generation):
                                return part
                            told = True
                            on_tokens(part)
            except httpx2.TransportError as e:
                if not told:
                    raise
                raise EngineError(f"{url} was lost in the middle of a turn: {type(e).__name__} {e}") from None
            except msgspec.MsgspecError as e:
                raise EngineError(f"{url} sent an answer that is not a generation: {e}") from None
            raise EngineError(f"{url} ended its answer in the middle of a turn")

        return await self._reached(f"{url}/generate", attempt, timeout)

    async def _reached(self, route: str, attempt: Callable[[], Awaitable[T]], timeout: float) -> T:
        """What the first attempt gives that reaches the server."""
        lost: httpx2.HTTPError | None = None
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        return await attempt()
                    except httpx2.TransportError as e:
                        lost = e
                    await asyncio.sleep(_RETRY_SECONDS)
        except TimeoutError:
            if lost is not None:
                why = f"{type(lost).__name__} {lost}"
                server = route.rpartition("/")[0]
                raise EngineError(f"{server} could not be reached for {timeout:.1f} seconds: {why}") from None
            raise

    def _task_session(self) -> str | None:
        task = asyncio.current_task()
        if task is None:
            return None
        if task not in self._sessions:
            session = f"task-{id(self):x}-{next(self._numbers)}"
            self._sessions[task] = session
            weakref.finalize(task, self._servers.pop, session, None)
        return self._sessions[task]

    def _server(self, session: str | None) -> str:
        url = self._servers.get(session or "") or min(self.base_urls, key=self._in_flight.__getitem__)
        if session is not None:
            self._servers[session] = url
            while len(self._servers) > _SESSIONS:
                del self._servers[next(iter(self._servers))]
        return url


def _accepted(url: str, response: httpx2.Response) -> None:
    if response.status_code != 200:
        raise EngineError(f"{url} refused a request ({response.status_code}): {_reason(response)}")


def _frames(buffer: bytearray) -> list[list[int] | Generation]:
    """Takes the whole parts off the front of `buffer`."""
    parts: list[list[int] | Generation] = []
    while len(buffer) >= 4 and len(buffer) >= (end := 4 + struct.unpack_from("<I", buffer)[0]):
        parts.append(msgspec.msgpack.decode(bytes(buffer[4:end]), type=list[int] | Generation))
        del buffer[:end]
    return parts


def _reason(response: httpx2.Response) -> str:
    try:
        return str(msgspec.json.decode(response.content)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return response.text[:200]
