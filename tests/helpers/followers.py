"""Two clusters whose servers are stand-ins: each tells the newest version of its weight store, as `/health` does."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from etude.config import validate
from etude.config.live import LiveConfig
from etude.live.log.records import Release, ReleaseStage
from etude.live.release import releases
from etude.live.release.operations import ReleaseSite, open_site
from etude.live.release.reports import GateReport, keep_report
from etude.store import open_store
from etude.weights.manifest import newest_manifest
from etude.weights.publisher import Publisher


class Follower:
    """A server of the content of a store; `stuck` keeps what it served last."""

    def __init__(self, store: Path) -> None:
        self.store, self.stuck, self.last = store, False, {"version": 0, "digest": "none"}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"follower": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def health(self) -> dict[str, object]:
        found = newest_manifest(open_store(str(self.store)))
        if found is not None and not self.stuck:
            self.last = {"version": found.version, "digest": found.digest}
        return self.last

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    follower: Follower

    def do_GET(self) -> None:
        body = json.dumps(self.follower.health()).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Site:
    """A live loop of the clusters "east" and "west", and a store of versions to release."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder, self.trained = folder, folder / "trained"
        self.followers = {
            f"{cluster}-{arm}": Follower(folder / f"{cluster}-{arm}") for cluster in ("east", "west")
            for arm in ("control", "canary")
        }  # fmt: skip
        for follower in self.followers.values():
            follower.store.mkdir()
        clusters = [
            {
                "name": cluster, "urls": [self.followers[f"{cluster}-control"].url],
                "store": str(self.followers[f"{cluster}-control"].store),
                "canary_urls": [self.followers[f"{cluster}-canary"].url],
                "canary_store": str(self.followers[f"{cluster}-canary"].store),
            }
            for cluster in ("east", "west")
        ]  # fmt: skip
        (folder / "live").mkdir(mode=0o700)
        self.options = {"folder": str(folder / "live"), "clusters": clusters, **options}
        self.tensors: dict = {}
        self.site: ReleaseSite = open_site(validate(LiveConfig, self.options, "test"))
        self._publisher = Publisher(open_store(str(self.trained)))

    def passed(self, tensors: dict, version: int, window: int | None = None, anchor: int | None = None) -> str:
        """Publishes a version that passes the gate beside the current release; its digest."""
        manifest = self._publisher.publish(version, tensors, (), {})
        found = self.site.read()
        parent = found.current.release.number if found.current else None
        report = GateReport(
            store=str(self.trained), version=version, manifest=manifest.digest, incumbent=parent, anchor=anchor,
            parts=(), at=0,
        )  # fmt: skip
        release = Release(
            number=found.next_number, store=str(self.trained), version=version, manifest=manifest.digest, parent=parent,
            anchor=anchor, report=keep_report(report, self.site.key), window=window, at=0,
        )  # fmt: skip
        releases.begin(self.site.engine, release, ReleaseStage.GATE, "passed", "gate")
        return manifest.digest

    def held(self) -> dict[str, tuple[int, str]]:
        """Version and digest of every cluster's store."""
        found = {name: newest_manifest(open_store(str(f.store))) for name, f in self.followers.items()}
        return {name: (manifest.version, manifest.digest) for name, manifest in found.items() if manifest is not None}


@contextmanager
def site(folder: Path, **options: object):
    """A Site, closed at the end."""
    with ExitStack() as stack:
        made = Site(folder, **options)
        for follower in made.followers.values():
            stack.callback(follower.close)
        stack.callback(made.site.engine.dispose)
        yield made
