"""The end of a server that is told to go: it takes nothing new, and what runs ends or is handed back.

SIGTERM -> `begin`: /health says "draining", new requests are refused (503, code "draining") -> what runs has
`HAND_BACK_SECONDS` -> answers in parts end without a reason, and go on elsewhere from their tokens -> `over`
"""

from __future__ import annotations

import signal
import time
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from etude.inference.engine.engine import Engine
from etude.protocol import DRAINING, Refusal
from etude.protocol.apis import shaped_refusal

HAND_BACK_SECONDS = 18.0  # the process must be gone after 25, on a busy machine, too
_LEAVE_SECONDS = 19.5  # what has not ended by then is cut off
_CUT_SECONDS = 1  # to tell it so


def going_away() -> Refusal:
    """The refusal of a request by a server that drains."""
    return Refusal(503, "this server is going away", DRAINING, headers={"retry-after": "1"})


class Drain:
    """The requests of a server whose engine this is, and its drain."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._since = 0.0  # when the drain began; 0: it has not
        self.running = 0  # requests that are answered, but for the operator's
        self.handed_back = False  # turns end without a reason from here on

    @property
    def begun(self) -> bool:
        """Whether new requests are refused."""
        return self._since > 0.0

    def begin(self) -> None:
        """Refuses new requests from here on."""
        self._since = self._since or time.monotonic()

    def over(self) -> bool:
        """Whether the server may go. Hands the turns back when their time is up; call it again and again."""
        if not self.begun:
            return False
        seconds = time.monotonic() - self._since
        if self.running and seconds >= HAND_BACK_SECONDS and not self.handed_back:
            self.handed_back = True
            self._engine.pause("abort", clear_cache=False)
        return not self.running or seconds >= _LEAVE_SECONDS


class Draining:
    """An ASGI application whose requests a drain counts and refuses, except those for the `open` paths."""

    def __init__(self, app: ASGIApp, drain: Drain, open_paths: tuple[str, ...]) -> None:
        self._app, self._drain, self._open = app, drain, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(self._open):
            return await self._app(scope, receive, send)
        drain = self._drain
        if drain.begun:
            return await shaped_refusal(scope, going_away())(scope, receive, send)
        drain.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            drain.running -= 1


class DrainedServer(uvicorn.Server):
    """A server that SIGTERM drains. A second signal ends it at once, and so does SIGINT after the answers that come
    within uvicorn's time."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if sig == signal.SIGTERM and not self._drain.begun and not self.should_exit:
            self._drain.begin()
            return
        self.force_exit = self.should_exit or self._drain.begun
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Whether the server ends; called ten times a second."""
        if self._drain.over():
            self.config.timeout_graceful_shutdown = _CUT_SECONDS
            return True
        return await super().on_tick(counter)
