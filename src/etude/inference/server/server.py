"""The inference server: token routes for training, OpenAI's routes for all other clients, weights from a store.

`token_routes.py`   /generate, /score
`openai.py`         the /v1 routes of OpenAI and Anthropic, /v1/apply, vLLM's /tokenize, /detokenize, /version, /ping
`operations.py`     /health, /metrics, /pause, /resume, /is_paused, /weights/chunks/N
`draining.py`       SIGTERM

`etude serve` calls `run`. Runs and evaluations start a process that dies with its parent (`etude.run.engines`):

    python -m etude.inference.server.server CONFIG       a `ServerConfig` as JSON; the token is in $ETUDE_API_KEY
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from starlette.applications import Starlette
from starlette.middleware import Middleware

from etude.config import ServerConfig, validate
from etude.errors import UserError
from etude.inference.engine.engine import Engine
from etude.inference.engine.loading import described, load_engine
from etude.inference.engine.requests import Request
from etude.inference.server.draining import Drain, DrainedServer, Draining
from etude.inference.server.openai import OpenAI
from etude.inference.server.operations import OPERATIONS, OPERATOR_PATHS, OperationRoutes
from etude.inference.server.token_routes import TokenRoutes
from etude.inference.server.weights import WeightWatcher
from etude.models.dtypes import published_dtypes, round_to
from etude.models.kernels import BLOCK
from etude.models.key_values import positions
from etude.models.loading import model_id
from etude.protocol import (
    JSON,
    LOOPBACK,
    MSGPACK,
    Access,
    Guarded,
    open_listener,
    own_token,
    raise_file_limit,
    run_server,
    server_config,
)
from etude.protocol.apis import SHAPED_HANDLERS, shaped_refusal

_WARM_UP_SECONDS = 300.0


def run(config: ServerConfig, access: Access = LOOPBACK) -> None:
    """Load the model, warm up, and answer until SIGINT, or until SIGTERM and the end of what runs. Raises UserError;
    RuntimeError if the engine failed."""
    raise_file_limit()
    with open_listener(config.host, config.port, access) as listener:
        torch.set_num_threads(config.threads)
        # After this time the engine's thread takes the GIL from the event loop; the default, 5 ms, is a whole step.
        sys.setswitchinterval(0.0005)
        name = (*config.served_model_name, Path(config.model).resolve().name)[0]
        with _stage(f"loading {name} on {config.device}, and trying it"):
            engine = load_engine(
                config.model,
                config,
                max_length=config.max_model_len,
                deterministic=config.deterministic,
                routes=config.routes,
            )
        print(f"weights: {described(engine)}", flush=True)
        watcher = _watcher(engine, config)
        engine.start()
        try:
            watcher.start()
            with _stage("compiling kernels and measuring passes"):  # before the first request waits for them
                _warm_up(engine)
            drain = Drain(engine)
            app = build_app(engine, watcher, Path(config.model), config.served_model_name, drain)
            app = Guarded(app, access, content_types=(JSON, MSGPACK), operator=OPERATOR_PATHS, refuse=shaped_refusal)
            print(context_line(engine), flush=True)
            _answer(app, drain, engine, listener, config.ready_file)
        finally:
            watcher.close()
            engine.close()
    if engine.failure is not None:
        raise RuntimeError(f"the engine died: {engine.failure}") from engine.failure


@contextmanager
def _stage(what: str) -> Iterator[None]:
    """Prints a stage of the start, and the seconds it took."""
    print(f"{what} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"  {time.monotonic() - start:.1f} s", flush=True)


def _watcher(engine: Engine, config: ServerConfig) -> WeightWatcher:
    """The thread that keeps the engine on the newest version of its source, if it has one."""
    source, folder = config.source, Path(config.model)
    types = published_dtypes(folder, engine.model, getattr(torch, source.trainer_dtype if source else "float32"))
    if source is not None:
        round_to(engine.model, types)  # as the trainer does: these weights are its version 0
    return WeightWatcher(engine, source, model_id(folder) if source else "", types, folder)


def _warm_up(engine: Engine) -> None:
    """Compiles the kernels before the first request. Raises UserError."""
    try:
        engine.generate(Request(ids=[0, 1], max_tokens=3), timeout=_WARM_UP_SECONDS)
    except Exception as e:
        why = str(e).strip().partition("\n")[0]
        raise UserError(f"the first request failed, so no other is taken: {type(e).__name__} {why}".rstrip()) from None
    engine.counters.reset()


def context_line(engine: Engine) -> str:
    """A line with the longest context, and its bound."""
    whole, cache = positions(engine.model.config), engine.cache
    line = f"context: {engine.max_length} tokens of prompt and answer"
    if engine.max_length < whole:
        held = cache.num_pages * cache.page_bytes / 2**20
        line += f", of the model's {whole} (--max-model-len; the cache of {held:.0f} MB holds "
        line += f"{cache.num_pages * BLOCK} tokens in all: --cache-mb)"
    return line


def build_app(
    engine: Engine, watcher: WeightWatcher, folder: Path, names: Sequence[str] = (), drain: Drain | None = None
) -> Starlette:
    """The ASGI application on a running engine. `names` are the model's names; by default its folder's name."""
    drain = drain or Drain(engine)
    parts = TokenRoutes(engine, watcher, drain), OperationRoutes(engine, watcher, drain), OpenAI(engine, folder, names)
    routes = [route for part in parts for route in part.routes()]
    counted = Middleware(Draining, drain=drain, open_paths=OPERATIONS)
    return Starlette(routes=routes, middleware=[counted], exception_handlers=SHAPED_HANDLERS)


def _answer(app: Guarded, drain: Drain, engine: Engine, listener: socket.socket, ready_file: Path | None) -> None:
    """Answer on `listener` until a signal comes or the engine fails."""
    server = DrainedServer(server_config(app), drain)
    engine.on_failure = lambda: setattr(server, "should_exit", True)
    for number in (signal.SIGINT, signal.SIGTERM):  # after the server's end: a requested one is not a failure
        signal.signal(number, lambda *_: None)
    run_server(server, listener, "serving", ready_file)


def main(argv: Sequence[str]) -> int:
    """Runs the server with the configuration file in `argv`, as a child process. Returns the exit code, 2 for a
    UserError."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request
    try:
        run(validate(ServerConfig, json.loads(Path(argv[0]).read_text()), argv[0]), Access(own_token()))
    except UserError as e:
        print(f"etude: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
