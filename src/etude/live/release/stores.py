"""Weight stores of clusters: their update to the content of a release, and the versions that their servers serve.

A store gets other content, old content too, as a new version with a higher number, as a delta against the version
before: servers and signatures never see a downgrade.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from etude.errors import RunFailed, UserError
from etude.failpoints import failpoint
from etude.live.log.records import Release
from etude.live.release.releases import StoreTarget
from etude.protocol import bearer, own_token
from etude.records import PolicyVersion
from etude.store import open_store
from etude.weights import newest_manifest, published_versions, read_manifest

Base = Callable[[str], Mapping[str, Any]]
"""URL of a store -> tensors of the model that its versions began with."""

_CONNECT_SECONDS, _READ_SECONDS = 1.0, 3.0
_MAX_AT_ONCE = 32  # servers at a time
COPIES = 4
"""Stores that are written at a time; each copy holds some tensors."""


@dataclass(frozen=True)
class ServerState:
    """The served version by the server's report; `digest` None for no answer, or a server other than `etude serve`."""

    url: str
    version: int | None
    digest: str | None
    error: str = ""


@dataclass(frozen=True)
class StoreState:
    """A store and its servers. `version` and `error` are the store's."""

    target: StoreTarget
    version: int | None
    servers: tuple[ServerState, ...]
    error: str = ""

    @property
    def lagging(self) -> list[ServerState]:
        """Servers that don't serve the content of the target."""
        return [server for server in self.servers if server.digest != self.target.release.manifest]


def prepare(target: StoreTarget, key: Path | None, base: Base | None = None) -> Callable[[], int]:
    """Writes the objects of the target's release to its store, a few tensors at a time; returns a function that makes
    them a version, and returns its number. Nothing is written if the store's newest version has the content. `base`
    reads the model folder that the versions of a store begin with. Raises UserError."""
    store, release = open_store(target.store, durable=True), target.release
    last = _newest(target.store)
    if last is not None and last.live == release.manifest:
        return lambda: last.version
    from etude.weights.copies import prepare_copy
    from etude.weights.publisher import AlreadyPublished

    source, version = (store, held) if (held := _held(target.store, release)) is not None else _source(release)
    folder = None if base is None else partial(base, source.url)
    create = prepare_copy(source, version, release.manifest, store, last, key, folder)

    def write() -> int:
        failpoint("release.publish")
        try:
            return create().version
        except AlreadyPublished as e:  # by another process that follows the same rows
            if e.manifest.live != release.manifest:
                raise
            return e.manifest.version

    return write


def bring(targets: Sequence[StoreTarget], key: Path | None, base: Base | None = None) -> dict[StoreTarget, str]:
    """Brings every store to its target, concurrently; returns the failed stores with the reasons."""

    def one(target: StoreTarget) -> str:
        try:
            prepare(target, key, base)()
        except (UserError, RunFailed) as e:
            return str(e)
        return ""

    if not targets:
        return {}
    with ThreadPoolExecutor(COPIES) as pool:
        return {target: why for target, why in zip(targets, pool.map(one, targets), strict=True) if why}


def _newest(url: str) -> PolicyVersion | None:
    try:
        return newest_manifest(open_store(url))
    except ValueError as e:
        raise UserError(str(e)) from None


def _held(url: str, release: Release) -> int | None:
    """The newest version of a store with the content of a release, or None."""
    store = open_store(url)
    for number in reversed(published_versions(store)):
        try:
            manifest = read_manifest(store, number)
        except ValueError:
            continue
        if manifest is not None and manifest.live == release.manifest:
            return number
    return None


def _source(release: Release) -> tuple[Any, int]:
    return open_store(release.store), release.version


def store_states(targets: Sequence[StoreTarget]) -> list[StoreState]:
    """The states of stores and servers, read concurrently; a server that hangs takes at most `_READ_SECONDS`."""
    urls = sorted({url for target in targets for url in target.urls})
    with ThreadPoolExecutor(_MAX_AT_ONCE) as pool:
        servers = dict(zip(urls, pool.map(_server, urls), strict=True))
        stores = list(pool.map(_store_version, [target.store for target in targets]))
    return [
        StoreState(target, version, tuple(servers[url] for url in target.urls), error)
        for target, (version, error) in zip(targets, stores, strict=True)
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
            health = answer.json()
            return ServerState(url, int(health["version"]), str(health["digest"]), str(health.get("error", "")))
    except httpx2.HTTPError as e:
        return ServerState(url, None, None, f"{type(e).__name__} {e}".strip())
    except (ValueError, KeyError, TypeError):
        return ServerState(
            url,
            None,
            None,
            "it tells no version and digest: it is no `etude serve`, and no vLLM with etude's TurnKeeper",
        )
