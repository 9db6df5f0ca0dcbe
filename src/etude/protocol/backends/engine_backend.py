"""The interface of a backend, and its errors: a server was lost, is busy, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import httpx2
import msgspec

from etude.protocol.wire import GenerateRequest, SequenceScores
from etude.records import Generation

SESSIONS = 10_000  # remembered by a client; the oldest are forgotten first
BUSY_SECONDS = 0.2  # between two attempts at a server that does not answer, or is busy without a retry-after
_BUSY_AT_MOST = 10.0
OnTokens = Callable[[list[int]], None]


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

    async def generate(
        self, http: httpx2.AsyncClient, url: str, request: GenerateRequest, on_tokens: OnTokens | None
    ) -> Generation:
        """Samples one answer."""
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


def reason_of(response: httpx2.Response) -> str:
    """The message in a server's error response."""
    try:
        body = msgspec.json.decode(response.content)
        error = cast(Any, body.get("error", body) if isinstance(body, dict) else None)
        return str(error["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return response.text[:200]


def check_not_busy(response: httpx2.Response) -> None:
    """Raises EngineBusy for status 503 with a retry-after."""
    if response.status_code == 503 and "retry-after" in response.headers:
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
