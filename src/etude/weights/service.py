"""The common start, output of the URL, and end of the small HTTP processes, the relay and the coordinator."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from etude.errors import UserError
from etude.protocol import (
    TOKEN_VARIABLE,
    Guarded,
    access_of,
    add_access_flags,
    open_listener,
    raise_file_limit,
    run_server,
    server_config,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `serve` reads."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; a token is needed beyond loopback")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--ready-file", type=Path, help="written with url and pid once it answers")
    add_access_flags(parser)


def serve(name: str, build: Callable[[], Starlette], options: argparse.Namespace, *, token: bool = False) -> int:
    """Serves on options.host and options.port until SIGINT or SIGTERM. Writes options.ready_file. Returns the exit
    code. `token`: requests change what others serve, so that a token is needed on loopback, too."""
    raise_file_limit()
    try:
        access = access_of(options)
        if token and access.token is None:
            raise UserError(
                f"any process of this machine could ask the {name}: give a token that its servers send, in "
                f"${TOKEN_VARIABLE} or with --api-key-file"
            )
        app = Guarded(build(), access)
        listener = open_listener(options.host, options.port, access)
    except UserError as e:
        print(f"etude: {e}", file=sys.stderr)
        return 2
    with listener:
        run_server(uvicorn.Server(server_config(app)), listener, name, options.ready_file)
    return 0
