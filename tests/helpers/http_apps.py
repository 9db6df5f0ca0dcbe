"""ASGI applications on loopback, on a thread of the test's process."""

import faulthandler
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from etude.protocol.access import LOOPBACK, Access
from etude.protocol.guard import LIMITS, Guarded, ServiceLimits
from etude.protocol.serving import server_config
from etude.protocol.wire import JSON, MSGPACK

_ENDS_SECONDS = 90.0  # a deadline alone; what runs at the end of a whole suite is said by the stacks


@contextmanager
def answering(app: ASGIApp) -> Iterator[str]:
    """The URL at which `app` answers."""
    with _served(uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def guarded(
    app: ASGIApp, access: Access = LOOPBACK, limits: ServiceLimits = LIMITS, operator: tuple[str, ...] = ()
) -> Iterator[int]:
    """The port of loopback at which `app` answers as a server of etude does."""
    server = Guarded(app, access, limits, content_types=(JSON, MSGPACK), operator=operator)
    with _served(server_config(server, limits)) as port:
        yield port


@contextmanager
def _served(config: uvicorn.Config) -> Iterator[int]:
    config.timeout_graceful_shutdown = 1
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(_ENDS_SECONDS)
            if thread.is_alive():
                faulthandler.dump_traceback(all_threads=True)
            assert not thread.is_alive()
