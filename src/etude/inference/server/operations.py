"""The operator's routes: health, metrics, pauses, and the weights for other servers.

GET  /health [?verify=1]            version and digest of the live tensors, load, utilisation, configuration
GET  /metrics                       Prometheus
GET  /weights/chunks/N?version=V    the bytes of a chunk of the weights, for a server that repairs itself
POST /pause?mode=abort|wait|keep&clear_cache=true, /resume;  GET /is_paused        vLLM's verbs
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.inference.engine.configuration import configuration, digest_of
from etude.inference.engine.engine import Engine
from etude.inference.server.draining import Drain
from etude.inference.server.weights import WeightWatcher
from etude.protocol import DRAINING, error

OPERATIONS = ("/health", "/metrics", "/weights/", "/pause", "/resume", "/is_paused")
"""Beginnings of the paths of these routes, which a server that drains answers, too."""
OPERATOR_PATHS = ("/pause", "/resume")
"""The routes that change the server for everybody."""
_NUMBER = re.compile(r"[0-9]{1,15}")


class OperationRoutes:
    """The operator's routes of one engine, whose weights `watcher` follows, and of its server's `drain`."""

    def __init__(self, engine: Engine, watcher: WeightWatcher, drain: Drain) -> None:
        self._engine, self._watcher, self._drain = engine, watcher, drain
        self._device = str(next(engine.model.parameters()).device)
        self._configuration = configuration(engine)
        self._started = time.monotonic()
        self._verifying = asyncio.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def routes(self) -> list[Route]:
        """The routes, to be mounted."""
        return [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/weights/chunks/{number}", self._chunk),
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/is_paused", self._is_paused),
        ]

    async def _health(self, http: HTTPRequest) -> Response:
        watcher, engine = self._watcher, self._engine
        served = watcher.served
        running, waiting = engine.load
        body: dict[str, object] = {
            "status": self._status(),
            "keeps_turns": True,
            "version": served.version,
            "digest": served.digest,
            "error": str(engine.failure or watcher.trouble),
            "repaired_chunks": watcher.repairs,
            "pid": os.getpid(),
            "device": self._device,
            "uptime_seconds": time.monotonic() - self._started,
            "running": running,
            "waiting": waiting,
            "generated_tokens": engine.counters.sampled_tokens,
            "last_pause_ms": engine.last_pause * 1e3,
            **{k: v for k, v in vars(engine.counters).items() if k != "sampled_tokens"},
            "documents": engine.documents.stats(),
            "configuration": self._configuration,
            "configuration_digest": digest_of(self._configuration),
        }
        if http.query_params.get("verify"):
            async with self._verifying:  # it reads all weights
                body["digest"] = await asyncio.to_thread(watcher.live_digest)
        return JSONResponse(body)

    def _status(self) -> str:
        """ "ok"; "repairing": the old version is served until the newest has been fetched again; "failed": no tries are
        left; "draining": the server ends."""
        if self._engine.failure is not None or self._watcher.error:
            return "failed"
        if self._drain.begun:
            return DRAINING
        return "repairing" if self._watcher.trouble else "ok"

    async def _chunk(self, http: HTTPRequest) -> Response:
        number, version = http.path_params["number"], http.query_params.get("version", "")
        if not _NUMBER.fullmatch(number) or not _NUMBER.fullmatch(version):
            return error(400, "name the chunk and its version by their numbers", param="version")
        data = await asyncio.to_thread(self._watcher.chunk, int(number), int(version))
        if data is None:
            return error(404, f"this server has no such chunk of version {version}", code="not_found")
        return Response(data, media_type="application/octet-stream")

    async def _metrics(self, http: HTTPRequest) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _pause(self, http: HTTPRequest) -> Response:
        query = http.query_params
        try:
            self._engine.pause(query.get("mode", "abort"), query.get("clear_cache", "true").lower() != "false")
        except ValueError as e:
            return error(400, str(e), param="mode")
        return JSONResponse({"status": "paused"})

    async def _resume(self, http: HTTPRequest) -> Response:
        self._engine.resume()
        return JSONResponse({"status": "resumed"})

    async def _is_paused(self, http: HTTPRequest) -> Response:
        return JSONResponse({"is_paused": self._engine.is_paused})

    def collect(self) -> Iterable[Metric]:
        """The metrics at a scrape; called by the Prometheus client."""
        engine = self._engine
        for name, value in vars(engine.counters).items():
            yield CounterMetricFamily(f"etude_engine_{name}", name.replace("_", " "), value=value)
        for name, value in vars(engine.documents.counters).items():
            yield CounterMetricFamily(f"etude_documents_{name}", name.replace("_", " "), value=value)
        yield GaugeMetricFamily("etude_documents_bytes", "keys and values kept", value=engine.documents.used)
        running, waiting = engine.load
        yield GaugeMetricFamily("etude_engine_requests_running", "requests being computed", value=running)
        yield GaugeMetricFamily("etude_engine_requests_waiting", "requests waiting for a slot", value=waiting)
        yield GaugeMetricFamily("etude_weights_version", "weight version served", value=self._watcher.served.version)
        yield GaugeMetricFamily("etude_weights_pause_ms", "last pause for a swap", value=engine.last_pause * 1e3)
