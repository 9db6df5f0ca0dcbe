"""The inference server: token routes for training, OpenAI routes for everyone else, weights followed from a store.

POST /generate                      ids in, a Generation out (JSON or MessagePack)
POST /v1/chat/completions, /v1/completions, /v1/apply;  GET /v1/models        see `openai.py`
POST /score                         sequences in, log-probabilities of their tokens out; 409 if the version changes
GET  /health [?verify=1]            version and digest of the live tensors, load, utilisation, configuration
GET  /metrics                       Prometheus
GET  /weights/chunks/N?version=V    the bytes of a chunk of the weights, for a server that repairs itself
POST /pause?mode=abort|wait|keep&clear_cache=true, /resume;  GET /is_paused        vLLM's verbs

python -m etude.inference.server.server --model DIR [--weights STORE_URL] [--port N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedModel

from etude.errors import UserError
from etude.inference.engine.configuration import configuration, digest_of
from etude.inference.engine.engine import Counters, Engine, EngineLimits
from etude.inference.engine.requests import Request
from etude.inference.server.openai import OpenAI, error, finished
from etude.inference.server.weights import WeightSource, WeightWatcher
from etude.models.loading import load_model, model_id
from etude.processes import die_with_parent
from etude.protocol.client import CONFLICT, MSGPACK, GenerateRequest, Scored, ScoreRequest, frame
from etude.records import Record

_WARM_UP_SECONDS = 300.0
_DRAIN_SECONDS = 5
T = TypeVar("T", bound=Record)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to serve. Port 0 picks a free one; `ready_file` is written once requests are answered."""

    model: Path
    host: str = "127.0.0.1"
    port: int = 8000
    weights: WeightSource | None = None
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    max_batch: int = 128
    max_length: int | None = None
    cache_mb: int = 512
    documents_mb: int = 256
    deterministic: bool = False
    speculate: bool = True
    routes: bool = False
    ready_file: Path | None = None


def serve(
    model: Path | str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    threads: int = 1,
    weights: WeightSource | None = None,
    cache_mb: int = 512,
    documents_mb: int = 256,
) -> None:
    """Serve a Hugging Face model folder until interrupted. Raises UserError for a bad folder or a taken port."""
    options = ServerOptions(
        model=Path(model), host=host, port=port, threads=threads, weights=weights, cache_mb=cache_mb,
        documents_mb=documents_mb,
    )  # fmt: skip
    run(options)


def run(options: ServerOptions) -> None:
    """Load, warm up, answer until SIGINT or SIGTERM. Raises UserError; RuntimeError if the engine died."""
    if options.threads < 1:
        raise UserError(f"--threads {options.threads}: give at least 1")
    with _listen(options.host, options.port) as listener:
        torch.set_num_threads(options.threads)
        # The engine's thread takes the GIL back from the event loop after this long: 5 ms would be a whole step.
        sys.setswitchinterval(0.0005)
        model = load_model(options.model, dtype=getattr(torch, options.dtype), device=options.device)
        limits = EngineLimits(
            rows=options.max_batch,
            cache_bytes=options.cache_mb * 2**20,
            document_bytes=options.documents_mb * 2**20,
            max_length=options.max_length,
            speculate=options.speculate,
            routes=options.routes,
        )
        origin = options.weights and replace(options.weights, model=model_id(options.model))
        try:
            engine = Engine(model, limits=limits, deterministic=options.deterministic)
        except ValueError as e:
            raise UserError(f"{e} (--cache-mb)") from None
        follower = WeightWatcher(engine, model, origin)
        engine.start()
        try:
            follower.start()
            # The kernels compile here, before the first request waits for them.
            engine.generate(Request(ids=[0, 1], max_tokens=3), timeout=_WARM_UP_SECONDS)
            engine.counters = Counters()
            _answer(build_app(engine, follower, model, options.model), engine, listener, options.ready_file)
        finally:
            follower.close()
            engine.close()
    if engine.failure is not None:
        raise RuntimeError(f"the engine died: {engine.failure}") from engine.failure


def _answer(app: Starlette, engine: Engine, listener: socket.socket, ready_file: Path | None) -> None:
    """Answer on `listener` until a signal comes or the engine dies."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_DRAIN_SECONDS)
    server = uvicorn.Server(config)
    engine.on_failure = lambda: setattr(server, "should_exit", True)
    # uvicorn raises the signal again once it has drained: being asked to end is not a failure.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"serving at {url}", flush=True)
    if ready_file is not None:
        _write_ready(ready_file, url)
    server.run(sockets=[listener])


def build_app(engine: Engine, follower: WeightWatcher, model: PreTrainedModel, folder: Path) -> Starlette:
    """The ASGI application on a running engine."""
    api = _Api(engine, follower, str(next(model.parameters()).device))
    openai = OpenAI(engine, folder)
    return Starlette(
        routes=[
            Route("/generate", api.generate, methods=["POST"]),
            Route("/score", api.score, methods=["POST"]),
            Route("/health", api.health),
            Route("/weights/chunks/{number:int}", api.chunk),
            Route("/metrics", api.metrics),
            Route("/pause", api.pause, methods=["POST"]),
            Route("/resume", api.resume, methods=["POST"]),
            Route("/is_paused", api.is_paused),
            *openai.routes(),
        ]
    )


class _Api:
    """The routes that are not OpenAI's."""

    def __init__(self, engine: Engine, follower: WeightWatcher, device: str) -> None:
        self._engine = engine
        self._follower = follower
        self._device = device
        self._configuration = configuration(engine)
        self._started = time.monotonic()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def generate(self, http: HTTPRequest) -> Response:
        try:
            asked = await _body(http, GenerateRequest)
            request = Request(
                **{name: getattr(asked, name) for name in GenerateRequest.__struct_fields__ if name != "stream"}
            )
            if asked.stream:
                return self._streamed(request)
            row = self._engine.submit(request)
        except (msgspec.MsgspecError, ValueError) as e:
            return error(400, str(e))
        except RuntimeError as e:
            return error(503, str(e), "server_error")
        return _answered(http, await finished(http, row))

    def _streamed(self, request: Request) -> Response:
        """The ids as they are sampled, those of a moment in one frame, and then the generation."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[int | None] = asyncio.Queue()

        def put(token: int | None) -> None:
            loop.call_soon_threadsafe(events.put_nowait, token)

        row = self._engine.submit(request, lambda token, _: put(token))
        row.future.add_done_callback(lambda _: put(None))

        async def frames() -> AsyncIterator[bytes]:
            try:
                token = await events.get()
                while token is not None:
                    ids = [token]
                    while not events.empty() and (token := events.get_nowait()) is not None:
                        ids.append(token)
                    yield frame(ids)
                    token = token if token is None else await events.get()
                yield frame(row.future.result())
            finally:
                row.abort()

        return StreamingResponse(frames(), media_type="application/octet-stream")

    async def score(self, http: HTTPRequest) -> Response:
        """Log-probabilities under one version, which is named with its digest."""
        served = self._follower.served
        try:
            request = await _body(http, ScoreRequest)
            futures = [self._engine.score(ids) for ids in request.sequences]
            found = [await asyncio.wrap_future(future) for future in futures]
        except (msgspec.MsgspecError, ValueError) as e:
            return error(400, str(e))
        except RuntimeError as e:
            return error(503, str(e), "server_error")
        if any(version != served.version for version, _ in found) or self._follower.served != served:
            return error(CONFLICT, f"version {served.version} was followed by another while it scored", "server_error")
        log_probs = tuple(log_probs for _, log_probs in found)
        return _answered(http, Scored(version=served.version, digest=served.digest, logprobs=log_probs))

    async def health(self, http: HTTPRequest) -> Response:
        follower, engine = self._follower, self._engine
        served = follower.served
        running, waiting = engine.load
        body: dict[str, object] = {
            "status": self._status(),
            "version": served.version,
            "digest": served.digest,
            "error": str(engine.failure or follower.trouble),
            "repaired_chunks": follower.repairs,
            "pid": os.getpid(),
            "device": self._device,
            "running": running,
            "waiting": waiting,
            "uptime_seconds": time.monotonic() - self._started,
            "generated_tokens": engine.counters.sampled_tokens,
            "last_pause_ms": engine.last_pause * 1e3,
            **{k: v for k, v in vars(engine.counters).items() if k != "sampled_tokens"},
            "documents": engine.documents.stats(),
            "configuration": self._configuration,
            "configuration_digest": digest_of(self._configuration),
        }
        if http.query_params.get("verify"):
            body["digest"] = await asyncio.to_thread(follower.live_digest)
        return JSONResponse(body)

    def _status(self) -> str:
        """ok; repairing: the old version goes on while the newest is fetched again, or waits; failed: tries ran out."""
        if self._engine.failure is not None or self._follower.error:
            return "failed"
        return "repairing" if self._follower.trouble else "ok"

    async def chunk(self, http: HTTPRequest) -> Response:
        try:
            version = int(http.query_params["version"])
        except (KeyError, ValueError):
            return error(400, "name the version whose chunk is asked for", param="version")
        data = await asyncio.to_thread(self._follower.chunk, http.path_params["number"], version)
        if data is None:
            return error(404, f"this server has no such chunk of version {version}")
        return Response(data, media_type="application/octet-stream")

    async def metrics(self, http: HTTPRequest) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def pause(self, http: HTTPRequest) -> Response:
        query = http.query_params
        try:
            self._engine.pause(query.get("mode", "abort"), query.get("clear_cache", "true").lower() != "false")
        except ValueError as e:
            return error(400, str(e), param="mode")
        return JSONResponse({"status": "paused"})

    async def resume(self, http: HTTPRequest) -> Response:
        self._engine.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, http: HTTPRequest) -> Response:
        return JSONResponse({"is_paused": self._engine.is_paused})

    def collect(self) -> Iterable[Metric]:
        """What Prometheus scrapes."""
        for name, value in vars(self._engine.counters).items():
            yield CounterMetricFamily(f"etude_engine_{name}", name.replace("_", " "), value=value)
        for name, value in vars(self._engine.documents.counters).items():
            yield CounterMetricFamily(f"etude_documents_{name}", name.replace("_", " "), value=value)
        yield GaugeMetricFamily("etude_documents_bytes", "keys and values kept", value=self._engine.documents.used)
        running, waiting = self._engine.load
        yield GaugeMetricFamily("etude_engine_requests_running", "requests being computed", value=running)
        yield GaugeMetricFamily("etude_engine_requests_waiting", "requests waiting for a slot", value=waiting)
        yield GaugeMetricFamily("etude_weights_version", "weight version served", value=self._follower.served.version)
        yield GaugeMetricFamily("etude_weights_pause_ms", "last pause for a swap", value=self._engine.last_pause * 1e3)


async def _body(http: HTTPRequest, kind: type[T]) -> T:
    """The request's body. Raises msgspec.MsgspecError."""
    packed = http.headers.get("content-type", "").startswith(MSGPACK)
    return (msgspec.msgpack.decode if packed else msgspec.json.decode)(await http.body(), type=kind)


def _answered(http: HTTPRequest, answer: Record) -> Response:
    if MSGPACK in http.headers.get("accept", ""):
        return Response(msgspec.msgpack.encode(answer), media_type=MSGPACK)
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises UserError if the port is taken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as e:
        raise UserError(f"cannot listen on {host} ({e.strerror or e}): give the address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as e:
        listener.close()
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise UserError(
            f"cannot listen on {host}:{port} ({reason}): choose another --port, or 0 for a free one"
        ) from None
    # With Nagle's algorithm a small answer would wait for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.listen(1024)
    return listener


def _write_ready(path: Path, url: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    temporary.replace(path)


def _arguments(argv: list[str] | None) -> tuple[ServerOptions, bool]:
    parser = argparse.ArgumentParser(
        prog="python -m etude.inference.server.server", description="Serve a model folder."
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one")
    parser.add_argument("--weights", help="URL of the store whose newest version to serve")
    parser.add_argument("--relay", help="URL of the cluster's relay, asked for payloads before the store is")
    parser.add_argument("--peers", nargs="+", default=[], help="URLs of servers that may repair this one's weights")
    parser.add_argument("--coordinator", help="URL of the coordinator of this server's replica")
    parser.add_argument("--member", default="", help="this server's name in its replica")
    parser.add_argument("--public-key", type=Path, help="serve only versions whose manifests this key has signed")
    parser.add_argument("--accepted", type=Path, help="file that remembers, for --public-key, what was served last")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--max-batch", type=int, default=128, help="rows that run at a time")
    parser.add_argument("--max-length", type=int, help="tokens of prompt and answer; default: the model's context")
    parser.add_argument("--cache-mb", type=int, default=512, help="memory for keys and values")
    parser.add_argument("--documents-mb", type=int, default=256, help="memory for keys and values of documents")
    parser.add_argument("--deterministic", action="store_true", help="reproducible in every bit, whatever runs beside")
    parser.add_argument(
        "--no-speculate", dest="speculate", action="store_false", help="draft no text that answers may repeat"
    )
    parser.add_argument("--routes", action="store_true", help="keep the experts of every token for those who ask")
    parser.add_argument("--ready-file", type=Path, help="written with url and pid once the server answers")
    parser.add_argument("--parent-death", action="store_true", help="die with the process that started this one")
    values = vars(parser.parse_args(argv))
    parent_death = values.pop("parent_death")
    url = values.pop("weights")
    names = [field.name for field in fields(WeightSource) if field.name not in ("store", "model")]
    origin = {name: values.pop(name) for name in names}
    if url is None and any(origin.values()):
        flags = ", ".join("--" + name.replace("_", "-") for name in names)
        parser.error(f"{flags} need --weights")
    if origin["accepted"] and not origin["public_key"]:
        parser.error("--accepted needs --public-key: without a key every manifest is believed")
    values["weights"] = url and WeightSource(store=url, **origin)
    return ServerOptions(**values), parent_death


def main(argv: list[str] | None = None) -> int:
    options, parent_death = _arguments(argv)
    if parent_death:
        die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line per request says nothing that ours do not
    try:
        run(options)
    except UserError as e:
        print(f"etude: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
