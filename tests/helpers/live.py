"""A gateway within the tests' process, before applications of the test or a served model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import uvicorn
from benchmarks.live_stub import TOKENS
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.config import LiveConfig, validate
from etude.live.gateway.gateway import Gateway
from etude.live.log.accounts import Accounts, open_blobs, open_log, unseal
from etude.live.log.records import LivePolicy
from etude.live.log.tenants import create_key, digest_of, set_policy
from etude.live.log.users import signature_of
from etude.protocol import TURN_HEADER
from etude.protocol.access import LOOPBACK
from etude.protocol.serving import server_config
from etude.protocol.wire import MSGPACK, ServedTokens


def live_config(folder: Path, *urls: str, **more: Any) -> LiveConfig:
    """A loop below `folder` with one cluster of servers at `urls`."""
    clusters = more.pop("clusters", [{"name": "a", "urls": list(urls), "store": str(folder / "store")}])
    given = {"stage": "live", "folder": str(folder / "live"), "clusters": clusters} | more
    return validate(LiveConfig, given, "test")


def new_key(config: LiveConfig, tenant: str = "acme", **policy: Any) -> str:
    """A key of a tenant with this policy."""
    engine = open_log(Path(config.folder), config.database)
    key = create_key(engine, tenant, f"key-{tenant}")
    set_policy(engine, tenant, LivePolicy(**{"requests_per_minute": 10**6} | policy))
    engine.dispose()
    return key


def new_proxy(config: LiveConfig, tenant: str = "acme", **policy: Any) -> tuple[str, str]:
    """A proxy's key of a tenant with this policy, and its secret."""
    engine = open_log(Path(config.folder), config.database)
    key = create_key(engine, tenant, f"proxy-{tenant}", proxy=True)
    set_policy(engine, tenant, LivePolicy(**{"requests_per_minute": 10**6} | policy))
    engine.dispose()
    return key, Accounts(Path(config.folder)).proxy_secret(digest_of(key))


def signed(secret: str, name: str) -> dict[str, str]:
    """The headers of a user whose name a proxy signs."""
    return {"x-etude-user": name, "x-etude-user-signature": signature_of(secret, name)}


@contextmanager
def running_gateway(config: LiveConfig) -> Iterator[tuple[Gateway, str]]:
    """A gateway and its URL, on a thread of its own. What it queued is written at the end."""
    gateway = Gateway(config)
    started, ended = threading.Event(), []
    server = uvicorn.Server(server_config(gateway.guarded(LOOPBACK)))

    async def serve() -> None:
        async with gateway.running():
            task = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            ended.append(server.servers[0].sockets[0].getsockname()[1])
            started.set()
            await task

    server.config.host, server.config.port = "127.0.0.1", 0
    server.config.timeout_graceful_shutdown = 1
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(30)
    try:
        yield gateway, f"http://127.0.0.1:{ended[0]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def client(url: str, key: str, **headers: str) -> httpx2.Client:
    """A client with a key."""
    return httpx2.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {key}", **headers})


def bytes_below(folder: Path) -> bytes:
    """Every file below a folder, one after the other, with its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return b"\n".join(str(path).encode() + b"\n" + path.read_bytes() for path in files)


def readable_bytes(config: LiveConfig) -> bytes:
    """Every file below the folder of a loop, and every content, decrypted."""
    folder, opened = Path(config.folder), list[bytes]()
    engine, accounts, blobs = open_log(folder, config.database), Accounts(folder), open_blobs(folder)
    with engine.connect() as connection:
        for name in blobs.list(""):
            key = accounts.key(connection, name.split("/")[1])
            opened += [] if key is None else [unseal(key, blobs.get(name), name)]
    engine.dispose()
    return b"\n".join([bytes_below(folder), *opened])


class EchoServer:
    """A server whose answers, and their tokens, hold the request; `malformed` calls could not be read."""

    def __init__(self) -> None:
        self.malformed = 0
        self._said: dict[str, str] = {}

    def app(self) -> Starlette:
        """What the gateway asks of an `etude serve`."""
        posts = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
        told = {"version": 0, "digest": "0", "keeps_turns": True}
        return Starlette(
            routes=[
                *(Route(path, self._answer, methods=["POST"]) for path in posts),
                Route("/health", lambda _: JSONResponse(told)),
                Route("/v1/turns/{name}", self._turn),
            ]
        )

    async def _answer(self, http: Request) -> Response:
        body = await http.json()
        self._said[http.headers.get(TURN_HEADER, "")] = json.dumps(body)
        if body.get("stream"):
            return StreamingResponse(iter([b"data: {}\n\n", b"data: [DONE]\n\n"]), media_type="text/event-stream")
        return JSONResponse({"id": "own", "choices": []})

    async def _turn(self, http: Request) -> Response:
        said = self._said.get(http.path_params["name"], "")
        message = json.dumps({"role": "assistant", "content": f"I read {said}"}).encode()
        # each turn has tokens of its own: the same ones would be trained on once
        ids = int.from_bytes(http.path_params["name"].encode()[-8:]).to_bytes(8, "big")[:4] * 2
        change = {"ids": ids, "logprobs": bytes(8), "spans": [(0, 2, 0)], "text": said, "malformed": self.malformed}
        tokens = msgspec.structs.replace(msgspec.msgpack.decode(TOKENS, type=ServedTokens), message=message, **change)
        return Response(msgspec.msgpack.encode(tokens), media_type=MSGPACK)
