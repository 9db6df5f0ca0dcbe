"""How the small HTTP processes beside the engines, the relay and the coordinator, start, tell their URL, and end."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from etude.errors import UserError
from etude.processes import die_with_parent


def serve(name: str, build: Callable[[], Starlette], options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM, on options.host and options.port; the exit code. Writes options.ready_file."""
    if options.parent_death:
        die_with_parent()
    try:
        app = build()
        listener = _listen(options.host, options.port)
    except UserError as e:
        print(f"etude: {e}", file=sys.stderr)
        return 2
    with listener:
        url = f"http://{options.host}:{listener.getsockname()[1]}"
        print(f"{name} at {url}", flush=True)
        if options.ready_file is not None:
            _write(options.ready_file, json.dumps({"url": url, "pid": os.getpid()}))
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=1024)
    except (OSError, OverflowError) as e:
        raise UserError(f"cannot listen on {host}:{port} ({e}): choose another --port, or 0 for a free one") from None


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
