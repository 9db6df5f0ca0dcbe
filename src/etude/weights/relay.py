"""The relay of a cluster: fetches each payload once from the store for all servers, and serves it in ranges.

    GET /payloads/KEY?blake3=HEX   bytes, 206 for a Range; 404 if the store has none with this digest
    GET /health                    counts of the payloads in memory and of fetches

The last used payloads stay in memory, up to a budget and at least one. A payload is checked against the digest that the
server took from the manifest, so a relay needs no manifests and serves no damaged payload.

python -m etude.weights.relay --store URL [--port N] [--budget-mb N] [--ready-file FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
from collections import OrderedDict
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.errors import UserError
from etude.failpoints import failpoint
from etude.protocol import (
    HANDLERS,
    Guarded,
    Refusal,
    access_of,
    add_access_flags,
    busy,
    error,
    open_listener,
    raise_file_limit,
    run_server,
    server_config,
)
from etude.store import Store, open_store
from etude.weights.payloads import intact

_log = logging.getLogger(__name__)
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
_KEY = re.compile(r"payloads/[0-9A-Za-z._/-]{1,500}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_LOGGED = 1000
_AT_ONCE = 8  # concurrent fetches from the store


class DigestMismatch(Exception):
    """The store's bytes do not have the requested digest."""


class Relay:
    """Payloads of one store, by key and digest."""

    def __init__(self, store: Store, budget: int):
        self._store = store
        self._budget = budget
        self._held: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._coming: dict[tuple[str, str], asyncio.Task[bytes]] = {}
        self._logged: set[str] = set()  # payloads whose failure is in the log
        self.fetched = 0
        self.served_bytes = 0

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [Route("/health", self._health), Route("/payloads/{name:path}", self._payload)]
        return Starlette(routes=routes, exception_handlers=HANDLERS)

    async def _health(self, _: Request) -> Response:
        held = {"payloads": len(self._held), "bytes": sum(map(len, self._held.values()))}
        return JSONResponse({"status": "ok", **held, "fetched": self.fetched, "served_bytes": self.served_bytes})

    async def _payload(self, http: Request) -> Response:
        key, digest = f"payloads/{http.path_params['name']}", http.query_params.get("blake3", "")
        if not _KEY.fullmatch(key) or ".." in key or not _DIGEST.fullmatch(digest):
            raise Refusal(400, "ask for a payload by its key, and for its digest with ?blake3=")
        try:
            data = await self._get(key, digest)
        except KeyError:
            return error(404, f"the store of this relay has no {key}", code="not_found")
        except DigestMismatch:
            return error(404, f"{key} in the store of this relay has another digest: it is damaged", code="not_found")
        except UserError as e:
            return error(502, str(e))
        wanted = http.headers.get("range")
        if wanted is None:
            self.served_bytes += len(data)
            return Response(data, media_type="application/octet-stream")
        match = _RANGE.fullmatch(wanted)
        start, stop = (int(match[1]), min(int(match[2]) + 1, len(data))) if match else (0, 0)
        if not start < stop:
            return Response(status_code=416, headers={"content-range": f"bytes */{len(data)}"})
        self.served_bytes += stop - start
        headers = {"content-range": f"bytes {start}-{stop - 1}/{len(data)}"}
        failpoint("relay.range")
        return Response(data[start:stop], 206, headers, "application/octet-stream")

    async def _get(self, key: str, digest: str) -> bytes:
        """The payload from memory, else from the store; concurrent requests for a payload share one fetch."""
        name = (key, digest)
        if name in self._held:
            self._held.move_to_end(name)
            return self._held[name]
        if name not in self._coming and len(self._coming) >= _AT_ONCE:
            raise busy("this relay is fetching many payloads")
        if name not in self._coming:
            self._coming[name] = asyncio.create_task(asyncio.to_thread(self._fetch, key, digest))
            self._coming[name].add_done_callback(lambda task: self._arrived(name, task))
        return await asyncio.shield(self._coming[name])

    def _fetch(self, key: str, digest: str) -> bytes:
        data = self._store.get(key)
        if not intact(data, digest):
            raise DigestMismatch(key)
        return data

    def _arrived(self, name: tuple[str, str], task: asyncio.Task[bytes]) -> None:
        del self._coming[name]
        error = task.exception()
        if error is not None:
            # Once per payload: clients decide how often they repeat a request.
            if not isinstance(error, KeyError) and name[0] not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(name[0])
                _log.warning("%s was not fetched: %s %s", name[0], type(error).__name__, error)
            return
        self.fetched += 1
        self._held[name] = task.result()
        while len(self._held) > 1 and sum(map(len, self._held.values())) > self._budget:
            self._held.popitem(last=False)


def main(argv: list[str] | None = None) -> int:
    """Runs a relay until SIGINT or SIGTERM. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m etude.weights.relay", description="Relay payloads to a cluster.")
    parser.add_argument("--store", required=True, help="URL of the store with the versions")
    parser.add_argument("--budget-mb", type=int, default=4096, help="memory for payloads")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; a token is needed beyond loopback")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--ready-file", type=Path, help="written with url and pid once it answers")
    add_access_flags(parser)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    raise_file_limit()
    try:
        access = access_of(options)
        app = Guarded(Relay(open_store(options.store), options.budget_mb * 2**20).app(), access)
        listener = open_listener(options.host, options.port, access)
    except UserError as e:
        print(f"etude: {e}", file=sys.stderr)
        return 2
    with listener:
        run_server(uvicorn.Server(server_config(app)), listener, "relay", options.ready_file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
