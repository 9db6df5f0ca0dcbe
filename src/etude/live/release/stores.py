"""Weight stores of clusters: brought to the content of a release, and what their servers serve.

A store goes to other content by a new version with a higher number, as a delta against the version before, also where
the content is an old one: servers and signatures never see a downgrade.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from etude.errors import RunFailed, UserError
from etude.failpoints import failpoint
from etude.live.log.records import Release
from etude.live.release.releases import Pointer
from etude.protocol.access import bearer, own_token
from etude.records import PolicyVersion
from etude.store import open_store
from etude.weights.manifest import newest, read, versions

_CONNECT_SECONDS, _READ_SECONDS = 1.0, 3.0
_MOST = 32  # servers and stores that are asked at a time


@dataclass(frozen=True)
class ServerState:
    """What a server says that it serves; `digest` None: it does not answer, or is no `etude serve`."""

    url: str
    version: int | None
    digest: str | None
    error: str = ""


@dataclass(frozen=True)
class PointerState:
    """A store and its servers. `version` and `error` are the store's."""

    pointer: Pointer
    version: int | None
    servers: tuple[ServerState, ...]
    error: str = ""

    @property
    def lagging(self) -> list[ServerState]:
        """Servers that don't serve the content of the pointer."""
        return [server for server in self.servers if server.digest != self.pointer.release.manifest]


def prepare(pointer: Pointer, key: Path | None) -> Callable[[], int]:
    """Reads what it takes to bring the store to the content of the pointer's release. The result writes the version and
    gives its number; it does nothing if the store holds that content already. Raises UserError."""
    store, release = open_store(pointer.store, durable=True), pointer.release
    last = _newest(pointer.store)
    if last is not None and last.digest == release.manifest:
        return lambda: last.version
    from etude.weights.content import load
    from etude.weights.publisher import AlreadyPublished, Publisher
    from etude.weights.signature import private_key

    source, version = (store, held) if (held := _held(pointer.store, release)) is not None else _source(release)
    manifest, tensors = load(source, version)
    if not isinstance(manifest.adapted, msgspec.UnsetType):
        raise UserError(f"version {version} of {source.url} holds adapters: merge them with `etude weights fetch`, and "
                        "publish the folder")  # fmt: skip
    if manifest.digest != release.manifest:
        raise UserError(f"version {version} of {source.url} has not the content of release {release.number}")
    publisher = Publisher(store, key=private_key(key) if key else None, model=manifest.model)
    if last is not None:
        publisher.resume(last, load(store, last.version)[1])
    number = last.version + 1 if last is not None else 0

    def write() -> int:
        failpoint("release.publish")
        try:
            publisher.publish(number, tensors, (), {}, last=True)
        except AlreadyPublished as e:  # by another process that brings the store to the same rows
            if e.manifest.digest != release.manifest:
                raise
        return number

    return write


def bring(pointers: Sequence[Pointer], key: Path | None) -> dict[Pointer, str]:
    """Brings every store to its pointer, all at a time; the stores that could not be, each with the reason."""

    def one(pointer: Pointer) -> str:
        try:
            prepare(pointer, key)()
        except (UserError, RunFailed) as e:
            return str(e)
        return ""

    if not pointers:
        return {}
    with ThreadPoolExecutor(min(_MOST, len(pointers))) as pool:
        return {pointer: why for pointer, why in zip(pointers, pool.map(one, pointers), strict=True) if why}


def _newest(url: str) -> PolicyVersion | None:
    try:
        return newest(open_store(url))
    except ValueError as e:
        raise UserError(str(e)) from None


def _held(url: str, release: Release) -> int | None:
    """The newest version of a store that has the content of a release."""
    store = open_store(url)
    for number in reversed(versions(store)):
        try:
            manifest = read(store, number)
        except ValueError:
            continue
        if manifest is not None and manifest.digest == release.manifest:
            return number
    return None


def _source(release: Release) -> tuple[Any, int]:
    return open_store(release.store), release.version


def states(pointers: Sequence[Pointer]) -> list[PointerState]:
    """What stores hold and servers serve, asked all at a time; a server that hangs is not waited for beyond three
    seconds."""
    urls = sorted({url for pointer in pointers for url in pointer.urls})
    with ThreadPoolExecutor(_MOST) as pool:
        servers = dict(zip(urls, pool.map(_server, urls), strict=True))
        stores = list(pool.map(_store_version, [pointer.store for pointer in pointers]))
    return [
        PointerState(pointer, version, tuple(servers[url] for url in pointer.urls), error)
        for pointer, (version, error) in zip(pointers, stores, strict=True)
    ]


def _store_version(url: str) -> tuple[int | None, str]:
    try:
        last = _newest(url)
    except UserError as e:
        return None, str(e)
    return (last.version if last is not None else None), ""


def _server(url: str) -> ServerState:
    timeout = httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
    try:
        with httpx2.Client(timeout=timeout, trust_env=False, headers=bearer(own_token())) as http:
            answer = http.get(url.rstrip("/") + "/health")
            answer.raise_for_status()
            told = answer.json()
            return ServerState(url, int(told["version"]), str(told["digest"]), str(told.get("error", "")))
    except httpx2.HTTPError as e:
        return ServerState(url, None, None, f"{type(e).__name__} {e}".strip())
    except (ValueError, KeyError, TypeError):
        return ServerState(url, None, None, "it tells no version and digest: it is no `etude serve`")
