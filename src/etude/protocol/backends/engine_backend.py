"""The interface of a backend, and its errors: a server was lost, is busy, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import httpx2
import msgspec

from etude.protocol.wire import GenerateRequest, SequenceScores
from etude.records import Generation

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
