"""The server between users' clients and the clusters that serve the model.

    client -> routes -> proxy -> upstream          the answer goes to the client as it comes
                          |
                       recorder -> queue -> writer -> log

With consent, the tokens of an answer are fetched after it has been sent (`GET /v1/turns/ULID` of `etude serve`) and
queued for the log; the client never waits for that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import uvicorn

from etude.config import LiveConfig
from etude.live.gateway.judging import FollowUpJudge
from etude.live.gateway.keys import KeyCheck
from etude.live.gateway.proxy import AnswerProxy
from etude.live.gateway.queue import RecordQueue
from etude.live.gateway.recorder import TurnRecorder
from etude.live.gateway.requests import RequestReader
from etude.live.gateway.routes import GatewayRoutes
from etude.live.gateway.upstream import Clusters
from etude.live.gateway.view import LogView
from etude.live.gateway.writer import LogWriter
from etude.live.log.accounts import Accounts, open_blobs, open_log
from etude.live.log.privacy import expire
from etude.live.log.records import Arm
from etude.protocol import Access, Guarded, open_listener, raise_file_limit, run_server, server_config
from etude.protocol.apis import shaped_refusal

UPSTREAM_VARIABLE = "ETUDE_UPSTREAM_KEY"
"""The environment variable with the token of the clusters' servers."""
REFRESH_SECONDS = 1.0
"""The time between two reads of keys and releases from the log."""
_EXPIRE_SECONDS = 86_400.0


class Gateway:
    """The parts of the gateway, and their lifetime. `token` is the token of the operator's routes, `upstream_token` the
    token of the clusters' servers. Raises UserError."""

    def __init__(self, config: LiveConfig, token: str | None = None, upstream_token: str | None = None) -> None:
        self._folder = folder = Path(config.folder)
        self.engine = open_log(folder, config.database)
        self.accounts = Accounts(folder).check(self.engine)
        self.queue = RecordQueue(config.gateway.queue, slot_seconds=60 * config.canary.slot_minutes)
        self.view = LogView(self.engine)
        self.clusters = Clusters(config.clusters, upstream_token)
        self._judge = None if config.judge is None else FollowUpJudge(config.judge, self.queue.submit)
        self.recorder = TurnRecorder(self.queue, self.view.directory, self._judge)
        self._blobs = open_blobs(folder)
        self._writer = LogWriter(
            self.queue,
            self.engine,
            self._blobs,
            self.accounts,
            window_seconds=config.labels.window_seconds,
        )
        holdback = config.canary.holdback if self.clusters.of_arm[Arm.HOLDBACK] else 0.0
        reader = RequestReader(self.accounts, self.view, holdback)
        self._keys = KeyCheck(self.view.directory, token)
        proxy = AnswerProxy(config, self.clusters, self.view, self._keys, reader, self.queue, self.recorder)
        self._routes = GatewayRoutes(
            config.model,
            self.clusters,
            self.view,
            self._keys,
            self.accounts,
            self.queue,
            self._writer,
            self.recorder,
            proxy,
        )
        self._failing = set[str]()

    def guarded(self, access: Access) -> Guarded:
        """The application behind its checks. Of `access` only the names count: its token is the operator's."""
        names = Access(None, access.hosts, access.origins)
        return Guarded(self._routes.app, names, authorise=self._keys.authorise, refuse=shaped_refusal)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The lifetime of the gateway: servers and log are watched, and at the end all queued entries are written."""
        await self.clusters.look()
        tasks = [asyncio.create_task(self.clusters.watch()), asyncio.create_task(self._refreshing())]
        tasks.append(asyncio.create_task(self._expiring()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await self.recorder.drain()
            if self._judge is not None:
                await asyncio.to_thread(self._judge.close)
            self.clusters.close()
            await asyncio.to_thread(self._writer.close)
            self.engine.dispose()

    async def _refreshing(self) -> None:
        failure = "the log cannot be read; keys and releases are those of the last look"
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            await self._in_background(failure, self.view.refresh)

    async def _expiring(self) -> None:
        """Deletes contents older than their tenants keep them, now and once a day."""
        failure = "contents that are too old were not deleted; see `etude live expire`"
        while True:
            await self._in_background(failure, partial(expire, self.engine, self._blobs, self._folder))
            await asyncio.sleep(_EXPIRE_SECONDS)

    async def _in_background(self, failure: str, work: Callable[[], object]) -> None:
        """Runs `work` in a thread. A failure is printed once, until the work has succeeded again."""
        try:
            await asyncio.to_thread(work)
        except Exception as e:
            if failure not in self._failing:
                print(f"etude live: {failure} ({type(e).__name__} {e})"[:500], file=sys.stderr, flush=True)
            self._failing.add(failure)
        else:
            self._failing.discard(failure)


class _Serving(uvicorn.Server):
    """A uvicorn server with the lifetime of a gateway."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves while the gateway runs."""
        async with self._gateway.running():
            await super().serve(sockets)


def serve(config: LiveConfig, access: Access, ready_file: Path | None = None) -> None:
    """Serves until SIGINT or SIGTERM. `access` has the operator's token, without which only loopback addresses can be
    listened on; the servers of the clusters get the token of $ETUDE_UPSTREAM_KEY. Raises UserError."""
    raise_file_limit()
    sys.setswitchinterval(0.0001)  # seconds after which the writer's thread yields to the event loop
    with open_listener(config.gateway.host, config.gateway.port, access) as listener:
        gateway = Gateway(config, access.token, os.environ.get(UPSTREAM_VARIABLE) or None)
        server = _Serving(server_config(gateway.guarded(access)), gateway)
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises it again once it has drained
            signal.signal(number, lambda *_: None)
        run_server(server, listener, "gateway", ready_file)
