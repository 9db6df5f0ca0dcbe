"""A gateway within the tests' process, before applications of the test or a served model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from etude.config import LiveConfig, validate
from etude.live.gateway.gateway import Gateway
from etude.live.log.accounts import Accounts, open_log
from etude.live.log.records import LivePolicy
from etude.live.log.tenants import create_key, digest_of, set_policy
from etude.live.log.users import signature_of
from etude.protocol.access import LOOPBACK
from etude.protocol.serving import server_config


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
