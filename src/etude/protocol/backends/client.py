"""The client of the inference servers: one connection pool, a deadline on every call, no torch.

`EngineBackend` is the interface of one kind of server, `EtudeBackend` is etude's own kind (`etude.inference.server`),
whose token routes are that interface. A backend makes one attempt at one server; `EngineClient` repeats it, there or at
another server, until the deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, Self, TypeVar, cast

import httpx2
import msgspec

from etude.protocol.access import bearer
from etude.protocol.backends.growing_turn import GrowingTurn
from etude.protocol.wire import CONFLICT, DRAINING, MSGPACK, GenerateRequest, ScoreRequest, SequenceScores, take_frames
from etude.records import Generation

T = TypeVar("T")
OnPart = Callable[[Generation], None]
PART_SECONDS = 0.5
"""Between two parts of an answer, of which nobody reads the tokens as they come. A lost server costs no more."""
SESSIONS = 10_000  # remembered by a client; the oldest are forgotten first
BUSY_SECONDS = 0.2  # between two attempts at a server that does not answer, or is busy without a retry-after
_BUSY_AT_MOST = 10.0
_CONNECT_SECONDS = 5.0
# Servers close a connection that was idle for five seconds. One that is nearly as old may be closed while we send.
_IDLE_SECONDS = 2.0
_LIMITS = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
_HEADERS = {"content-type": MSGPACK, "accept": MSGPACK}


class EngineError(Exception):
    """The engine is dead, cannot be reached before the deadline, or refused the request."""


class EngineLost(EngineError):
    """The server was lost during an attempt, which may be repeated there or at another server."""


class EngineBusy(EngineError):
    """The server is busy; `seconds` is its retry-after, at most 10."""

    def __init__(self, response: httpx2.Response) -> None:
        super().__init__(reason_of(response))
        wanted = response.headers["retry-after"]
        self.seconds = min(float(wanted), _BUSY_AT_MOST) if wanted.isdigit() else BUSY_SECONDS


class EngineBackend(Protocol):
    """One kind of server. Every method makes one attempt at the server at `url`. Beside the errors in its docstring it
    raises httpx2.TransportError or EngineLost for a lost server, EngineBusy, and EngineError."""

    follows: bool
    """Whether the servers follow the store of weights by themselves; `bring` updates others."""

    async def generate(self, http: httpx2.AsyncClient, url: str, request: GenerateRequest, on_part: OnPart) -> None:
        """Samples one answer, in parts of `request.part_seconds`. Without a reason in the last part the server has
        handed the answer back."""
        ...

    async def score(
        self, http: httpx2.AsyncClient, url: str, sequences: Sequence[list[int]], decoded: bool
    ) -> SequenceScores | None:
        """Log-probabilities under one version; None if the version changed meanwhile. `decoded`: the end of each
        sequence by decoding, where the server can."""
        ...

    async def health(self, http: httpx2.AsyncClient, url: str, timeout: float) -> dict[str, Any]:
        """The report of `/health` of etude's server: `status`, `error`, `version`, `digest`, `last_pause_ms`,
        `running`, `waiting`, `generated_tokens`, `busy_seconds`, `configuration` and `documents`."""
        ...

    async def check(self, http: httpx2.AsyncClient, url: str) -> None:
        """Raises UserError for a server that the run cannot use; called before its first request."""
        ...

    async def bring(self, http: httpx2.AsyncClient, url: str, version: int) -> None:
        """Makes a version live, without dropping a request. Raises UserError for an error that repetitions do not
        mend."""
        ...

    def note(self, url: str, version: int) -> None:
        """Notes that another process has made a version live at the server."""
        ...


class EngineClient:
    """The client of the inference servers with the same model, which may come and go. A session stays on one server,
    which holds its keys and values; a new session goes to the server with the fewest requests in flight. A request
    without a session belongs to the session of its asyncio task: an agent loop runs in one task. The turns of a lost
    server go on at another from their tokens. While no server gets turns, requests wait for one. `token` is the
    servers' token, `backend` their kind; `resumed` counts the turns' continuations, `recomputed_tokens` what was
    computed again for them."""

    def __init__(
        self, base_urls: Sequence[str] = (), token: str | None = None, backend: EngineBackend | None = None
    ) -> None:
        self.backend = backend or EtudeBackend()
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_SECONDS)
        self._http = httpx2.AsyncClient(limits=limits, trust_env=False, headers=bearer(token), timeout=_LIMITS)
        self._numbers = itertools.count()
        self._sessions: weakref.WeakKeyDictionary[asyncio.Task[object], str] = weakref.WeakKeyDictionary()
        self._servers: dict[str, str] = {}
        self._serving = dict.fromkeys(url.rstrip("/") for url in base_urls)
        self.resumed = self.recomputed_tokens = 0
        self._attempts: dict[str, set[asyncio.Future[Any]]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    @property
    def serving(self) -> frozenset[str]:
        """The servers that get turns."""
        return frozenset(self._serving)

    def serve(self, url: str, version: int | None = None) -> None:
        """Sends turns to a server, a new one or one that was away. `version` is that of its weights, where another
        process has made it live."""
        self._serving[url] = None
        if version is not None:
            self.backend.note(url, version)

    def drain(self, url: str) -> None:
        """Sends a server no new turns; those that it has begun go on."""
        self._serving.pop(url, None)

    def lose(self, url: str) -> None:
        """Sends a server nothing any more; its turns go to other servers."""
        self._serving.pop(url, None)
        for attempt in list(self._attempts.get(url, ())):
            attempt.cancel()

    def unfinished(self, url: str) -> int:
        """The number of requests in flight at a server."""
        return len(self._attempts.get(url, ()))

    async def generate(
        self,
        request: GenerateRequest,
        timeout: float,
        on_part: OnPart | None = None,
        begun: Generation | None = None,
        *,
        oldest: int = -1,
    ) -> Generation:
        """Samples one answer; `on_part` is called with its parts as they come, one every `request.part_seconds`
        (default: `PART_SECONDS`). `begun` are those that an earlier process has got, joined. No token is sampled by
        weights before version `oldest`. A request to a busy or
        lost server is repeated, there or at another server, until the deadline; what was sampled is kept. Raises
        TimeoutError after `timeout` seconds, EngineError if no server could be reached in that time, or if a server
        refused the request."""
        session = request.session if request.session is not None else self._task_session()
        every = PART_SECONDS if request.part_seconds is None else request.part_seconds
        turn = GrowingTurn(msgspec.structs.replace(request, session=session, part_seconds=every), begun)
        deadline, answers = asyncio.get_running_loop().time() + timeout, False

        async def attempt(url: str) -> None:
            nonlocal answers
            answers, rest, again = False, turn.rest(), bool(turn.ids)
            if rest is None:
                return

            def take(part: Generation) -> None:
                nonlocal answers
                if min(part.versions, default=oldest) < oldest:
                    raise EngineLost(f"{url} serves version {min(part.versions)}, this turn needs version {oldest}")
                self.resumed += again and not answers
                answers = True
                try:
                    added = turn.add(part)
                except ValueError as e:
                    raise EngineError(f"{url} sent what does not follow the tokens before: {e}") from None
                if again and part.finish_reason:
                    self.recomputed_tokens += len(rest.ids) + sum(map(len, rest.documents)) - part.cached_tokens
                if on_part is not None:
                    on_part(added)

            await self.backend.generate(self._http, url, rest, take)
            if turn.rest() is not None:
                raise EngineLost(f"{url} handed a turn back")

        try:
            if turn.rest() is not None:
                await self._reached(lambda avoided: self._server(session, avoided), attempt, timeout)
        except EngineError:
            if answers and asyncio.get_running_loop().time() >= deadline:
                raise TimeoutError from None  # an earlier server was lost, but this one was only slow
            raise
        try:
            return turn.generation()
        except ValueError as e:
            raise EngineError(str(e)) from None

    async def score(
        self, url: str, sequences: Sequence[list[int]], timeout: float, *, decoded: bool = False
    ) -> SequenceScores | None:
        """Log-probabilities of these sequences under the server's weights; with `decoded`, the end of each is
        decoded where the server can (`ScoreRequest`). None if the version changed meanwhile. Raises TimeoutError after
        `timeout` seconds, EngineError if the server cannot be reached, refuses, or scores other sequences."""

        async def attempt(url: str) -> SequenceScores | None:
            return await self.backend.score(self._http, url, sequences, decoded)

        scores = await self._reached(lambda _: url.rstrip("/"), attempt, timeout)
        if scores is not None and [len(logprobs) + 1 for logprobs in scores.logprobs] != [
            len(ids) for ids in sequences
        ]:
            raise EngineError(f"{url} scored other sequences than it was asked to")
        return scores

    async def health(self, url: str, timeout: float = 10.0) -> dict[str, Any]:
        """The server's report (`EngineBackend.health`): version, digest, load and utilisation. Raises EngineError."""
        url = url.rstrip("/")
        try:
            try:
                return await self.backend.health(self._http, url, timeout)
            except (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError):
                # A broken connection does not mean a dead server: try a new one.
                return await self.backend.health(self._http, url, timeout)
        except (httpx2.HTTPError, msgspec.MsgspecError, EngineLost, EngineBusy) as e:
            raise EngineError(f"{url} does not answer: {type(e).__name__} {e}") from None

    async def check(self, url: str) -> None:
        """Raises UserError for a server that cannot be used, EngineError if it does not answer."""
        await self._once(url, self.backend.check(self._http, url))

    async def bring(self, url: str, version: int) -> None:
        """Makes a version live (`EngineBackend.bring`). Raises EngineError if the old version stays, UserError."""
        await self._once(url, self.backend.bring(self._http, url, version))

    async def _once(self, url: str, request: Awaitable[T]) -> T:
        try:
            return await request
        except httpx2.HTTPError as e:
            raise EngineError(f"{url} does not answer: {type(e).__name__} {e}") from None

    async def _reached(
        self, server: Callable[[str | None], str | None], attempt: Callable[[str], Awaitable[T]], timeout: float
    ) -> T:
        """The result of the first attempt that a server answers. `server` chooses the server of an attempt, None while
        there is none; its argument is the server to avoid, which lost the last attempt."""
        lost: Exception | None = None
        url, avoided = "", None
        tried = set[str]()
        try:
            async with asyncio.timeout(timeout):
                while True:
                    if (chosen := server(avoided)) is None:
                        lost = lost or EngineLost("no engine serves")
                        await asyncio.sleep(BUSY_SECONDS)
                        continue
                    url = chosen
                    if url in tried:
                        await asyncio.sleep(lost.seconds if isinstance(lost, EngineBusy) else BUSY_SECONDS)
                    tried.add(url)
                    try:
                        return await self._unless_lost(url, attempt)
                    except (httpx2.TransportError, EngineLost) as e:
                        lost, avoided = e, url
                    except EngineBusy as e:
                        lost = e
        except TimeoutError:
            if isinstance(lost, EngineBusy):
                raise EngineError(f"{url} was busy for {timeout:.1f} seconds: {lost}") from None
            if lost is not None:
                what, why = url or "an engine", f"{type(lost).__name__} {lost}"
                raise EngineError(f"{what} could not be reached for {timeout:.1f} seconds: {why}") from None
            raise

    async def _unless_lost(self, url: str, attempt: Callable[[str], Awaitable[T]]) -> T:
        """The result of an attempt. Raises EngineLost if `lose` is called meanwhile."""
        task = asyncio.ensure_future(attempt(url))
        attempts = self._attempts.setdefault(url, set())
        attempts.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not (current and current.cancelling()):  # `lose` alone cancels an attempt without its caller
                raise EngineLost(f"{url} does not answer any more") from None
            raise
        finally:
            attempts.discard(task)

    def _task_session(self) -> str | None:
        task = asyncio.current_task()
        if task is None:
            return None
        if task not in self._sessions:
            session = f"task-{id(self):x}-{next(self._numbers)}"
            self._sessions[task] = session
            weakref.finalize(task, self._servers.pop, session, None)
        return self._sessions[task]

    def _server(self, session: str | None, avoided: str | None) -> str | None:
        others = [url for url in self._serving if url != avoided] or list(self._serving)
        if not others:
            return None
        url = self._servers.get(session or "")
        if url not in others:
            url = min(others, key=self.unfinished)
        if session is not None:
            self._servers[session] = url
            while len(self._servers) > SESSIONS:
                del self._servers[next(iter(self._servers))]
        return url


class EtudeBackend:
    """Servers that follow the store of weights by themselves."""

    follows = True

    async def generate(self, http: httpx2.AsyncClient, url: str, request: GenerateRequest, on_part: OnPart) -> None:
        """One answer, as frames."""
        body, buffer = msgspec.msgpack.encode(request), bytearray()
        async with http.stream("POST", f"{url}/generate", content=body, headers=_HEADERS) as response:
            if response.status_code != 200:
                await response.aread()
                check_not_busy(response)
                check_accepted(url, response)
            async for chunk in response.aiter_bytes():
                buffer += chunk
                try:
                    parts = take_frames(buffer)
                except msgspec.MsgspecError as e:
                    raise EngineError(f"{url} sent an answer that is not a generation: {e}") from None
                for part in parts:
                    if isinstance(part, str):
                        raise EngineError(f"{url} failed in the middle of a turn: {part}")
                    on_part(part)

    async def score(
        self, http: httpx2.AsyncClient, url: str, sequences: Sequence[list[int]], decoded: bool
    ) -> SequenceScores | None:
        """Scores of all sequences in one request."""
        body = msgspec.msgpack.encode(ScoreRequest(sequences=tuple(sequences), decoded=decoded))
        response = await http.post(f"{url}/score", content=body, headers=_HEADERS)
        check_not_busy(response)
        if response.status_code == CONFLICT:
            return None
        if response.status_code != 200:
            raise EngineError(f"{url} refused to score ({response.status_code}): {reason_of(response)}")
        try:
            return msgspec.msgpack.decode(response.content, type=SequenceScores)
        except msgspec.MsgspecError as e:
            raise EngineError(f"{url} sent an answer that is not a score: {e}") from None

    async def health(self, http: httpx2.AsyncClient, url: str, timeout: float) -> dict[str, Any]:
        """The server's own report."""
        response = await http.get(f"{url}/health", timeout=timeout)
        return msgspec.json.decode(response.content, type=dict[str, Any])

    async def check(self, http: httpx2.AsyncClient, url: str) -> None:
        """Does nothing: the server refuses unsupported requests by itself."""

    async def bring(self, http: httpx2.AsyncClient, url: str, version: int) -> None:
        """Does nothing: the server follows the store."""

    def note(self, url: str, version: int) -> None:
        """Does nothing: every token names its version."""


def reason_of(response: httpx2.Response) -> str:
    """The message in a server's error response."""
    return _field(response, "message") or response.text[:200]


def _field(response: httpx2.Response, name: str) -> str:
    """A field of a server's error, "" if there is none."""
    try:
        body = msgspec.json.decode(response.content)
        error = cast(Any, body.get("error", body) if isinstance(body, dict) else None)
        return str(error[name])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return ""


def check_not_busy(response: httpx2.Response) -> None:
    """For status 503 with a retry-after raises EngineBusy, and EngineLost if the server is going away."""
    if response.status_code == 503 and "retry-after" in response.headers:
        if _field(response, "code") == DRAINING:
            raise EngineLost(reason_of(response))
        raise EngineBusy(response)


def check_accepted(url: str, response: httpx2.Response) -> None:
    """Raises EngineError unless the status is 200."""
    if response.status_code != 200:
        raise EngineError(f"{url} refused a request ({response.status_code}): {reason_of(response)}")


def check_answer(url: str, response: httpx2.Response) -> None:
    """Raises EngineBusy, EngineLost for another status from 500, and EngineError for the rest except 200."""
    check_not_busy(response)
    if response.status_code >= 500:
        raise EngineLost(f"{url} failed ({response.status_code}): {reason_of(response)}")
    check_accepted(url, response)
