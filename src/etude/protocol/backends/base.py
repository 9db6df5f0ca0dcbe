"""What a backend does, and what all of them share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import httpx2
import msgspec
import numpy as np

from etude.protocol.wire import GenerateRequest, SequenceScores
from etude.records import Generation, Routes

SESSIONS = 10_000  # that are remembered; the oldest are forgotten first
BUSY_SECONDS = 0.2  # until a server that does not answer, or is busy without saying for how long, is asked again
_BUSY_AT_MOST = 10.0
OnTokens = Callable[[list[int]], None]


class EngineError(Exception):
    """The engine is dead, cannot be reached before the deadline, or refused the request."""


class EngineLost(EngineError):
    """An attempt that a server did not live to answer: it may be repeated, here or at another server."""


class EngineBusy(EngineError):
    """The server said to try again later, after so many seconds."""

    def __init__(self, response: httpx2.Response) -> None:
        super().__init__(reason_of(response))
        wanted = response.headers["retry-after"]
        self.seconds = min(float(wanted), _BUSY_AT_MOST) if wanted.isdigit() else BUSY_SECONDS


class EngineBackend(Protocol):
    """One kind of server. Every method asks the server at `url` once; besides what it names it raises
    httpx2.TransportError or EngineLost where the server was lost, EngineBusy, and EngineError."""

    follows: bool
    """Whether the servers follow the store of weights by themselves; `bring` is for those that do not."""

    async def generate(
        self, http: httpx2.AsyncClient, url: str, request: GenerateRequest, on_tokens: OnTokens | None
    ) -> Generation:
        """Samples one answer."""
        ...

    async def score(
        self, http: httpx2.AsyncClient, url: str, sequences: Sequence[list[int]], decoded: bool
    ) -> SequenceScores | None:
        """Log-probabilities under one version; None if another one came meanwhile. `decoded`: the end of each
        sequence by decoding, where the server can."""
        ...

    async def health(self, http: httpx2.AsyncClient, url: str, timeout: float) -> dict[str, Any]:
        """The report of `/health` of etude's server: `status`, `error`, `version`, `digest`, `last_pause_ms`,
        `running`, `waiting`, `generated_tokens`, `busy_seconds`, `configuration` and `documents`."""
        ...

    async def check(self, http: httpx2.AsyncClient, url: str) -> None:
        """Raises UserError for a server that the run cannot use, before anything is asked of it."""
        ...

    async def bring(self, http: httpx2.AsyncClient, url: str, version: int) -> None:
        """Makes a version live, without dropping a request. Raises UserError if no repetition can help."""
        ...


class KeptKeys:
    """Which keys and values a request may reuse, at servers that salt their prefix cache: those of requests whose
    session began under the same version. A new session never sees older keys, and an old one keeps its own."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the run, so that runs that follow each other at one server share nothing
        self._began: dict[str, int] = {}

    def began(self, session: str | None, version: int) -> int:
        """The version under which a session began; `version` for a new one, and for a request without one."""
        if session is None:
            return version
        began = self._began.setdefault(session, version)
        while len(self._began) > SESSIONS:
            del self._began[next(iter(self._began))]
        return began

    def salt(self, began: int) -> str:
        """The salt of a session that began under this version."""
        return f"{self._name}-{began}"


class BusyTime:
    """For how long servers have had at least one request of this client."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._live: dict[str, int] = {}
        self._total: dict[str, float] = {}

    @contextmanager
    def at(self, url: str) -> Iterator[None]:
        """A request is at the server."""
        now = time.monotonic()
        self._live[url] = self._live.get(url, 0) + 1
        self._since.setdefault(url, now)
        try:
            yield
        finally:
            self._live[url] -= 1
            if not self._live[url]:
                self._total[url] = self._total.get(url, 0.0) + time.monotonic() - self._since.pop(url)

    def seconds(self, url: str) -> float:
        """So far."""
        running = time.monotonic() - self._since[url] if url in self._since else 0.0
        return self._total.get(url, 0.0) + running


def unique(prefix: str) -> str:
    """A name that no other call, of any process, has returned."""
    return f"{prefix}-{uuid.uuid4().hex}"


def reason_of(response: httpx2.Response) -> str:
    """Why a server refused, in its own words."""
    try:
        body = msgspec.json.decode(response.content)
        error = cast(Any, body.get("error", body) if isinstance(body, dict) else None)
        return str(error["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return response.text[:200]


def check_not_busy(response: httpx2.Response) -> None:
    """Raises EngineBusy if the server wants to be asked later."""
    if response.status_code == 503 and "retry-after" in response.headers:
        raise EngineBusy(response)


def check_accepted(url: str, response: httpx2.Response) -> None:
    """Raises EngineError unless the server answered with success."""
    if response.status_code != 200:
        raise EngineError(f"{url} refused a request ({response.status_code}): {reason_of(response)}")


def check_answer(url: str, response: httpx2.Response) -> None:
    """Raises EngineBusy, EngineLost for a server that failed, and EngineError for one that refused."""
    check_not_busy(response)
    if response.status_code >= 500:
        raise EngineLost(f"{url} failed ({response.status_code}): {reason_of(response)}")
    check_accepted(url, response)


def finish_reason_of(url: str, reason: str | None) -> str:
    """The reason as a Generation has it. Raises EngineError for one that etude does not know."""
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"{url} ended a turn for {reason!r}, which etude does not know")
    return reason


def routes_of(array_TLK: np.ndarray, first: int, layers: Sequence[int]) -> Routes:
    """Experts of positions from `first` on, of those of a model's layers that have some: `array_TLK` holds all layers.
    Raises EngineError if it has fewer."""
    if array_TLK.ndim != 3 or max(layers) >= array_TLK.shape[1]:
        raise EngineError(f"experts of shape {array_TLK.shape} are no array of this model's")
    chosen_TLK = array_TLK[:, list(layers)]
    wide = array_TLK.dtype.itemsize > 1  # by the type: it must not change within an episode
    data = np.ascontiguousarray(chosen_TLK, "<u2" if wide else "u1").tobytes()
    return Routes(first=first, ids=data, layers=len(layers), slots=array_TLK.shape[2], wide=wide)


def spans_to_versions(spans: Sequence[Mapping[str, Any]] | None, count: int, url: str) -> list[int]:
    """The weight version of each of `count` sampled tokens, from `version`, `start` and `end` of contiguous spans; -1
    for a version that is no number. Raises EngineError if the spans do not cover the tokens once, in order."""
    versions: list[int] = []
    for span in spans or ():
        name = str(span["version"])
        if span["start"] != len(versions):
            break
        versions += [int(name) if name.isdigit() else -1] * (span["end"] - span["start"])
    if len(versions) != count:
        raise EngineError(f"{url} does not say which weights sampled each of {count} tokens: {spans}")
    return versions
