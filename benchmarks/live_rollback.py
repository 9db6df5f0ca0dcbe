"""A rollback under load: two clusters of one real server each stream answers of models/nano all the time.

rollback/seconds   from the decision until the last answer that began with the bad version has ended; of the cluster
                   whose server is stopped (SIGSTOP) meanwhile, from its return; the greater of the two. The baseline
                   says how many answers there were; that none failed is a check.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.table import row
from etude import processes
from etude.config import ServerConfig, WeightSource, find_model, validate
from etude.config.live import LiveConfig
from etude.live.log.records import Release, ReleaseStage
from etude.live.release import operations, releases
from etude.live.release.reports import GateReport, keep_report
from etude.models.dtypes import main_dtype
from etude.models.loading import load_model, named_tensors
from etude.protocol.wire import WEIGHTS_HEADER
from etude.records import PolicyVersion
from etude.run.engines import engine_url, spawn_engine
from etude.store import open_store
from etude.weights.manifest import newest_manifest
from etude.weights.publisher import Publisher

STREAMS = 2  # for each cluster
TOKENS = 24


@dataclass(frozen=True)
class StreamedAnswer:
    """When an answer ended, and the version of the cluster's store that it began with; None: it failed."""

    cluster: str
    version: int | None
    ended: float
    error: str = ""


@dataclass
class Rollback:
    """What became of the answers. Times are those of `time.time`."""

    decided: float
    returned: float  # the server that was stopped
    bad: int  # version of the stores
    good: int
    answers: list[StreamedAnswer] = field(default_factory=list[StreamedAnswer])

    @property
    def failed(self) -> list[StreamedAnswer]:
        """Answers with an error."""
        return [answer for answer in self.answers if answer.version is None]

    def seconds(self, cluster: str, since: float) -> float:
        """From a time until the last answer that began with the bad version ended."""
        ends = [answer.ended for answer in self.answers if answer.cluster == cluster and answer.version == self.bad]
        return max(0.0, max(ends) - since)


def rows(quick: bool) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Rows and checks; a server is stopped for 30 seconds, `quick` for 2."""
    with tempfile.TemporaryDirectory() as folder:
        done = drive(Path(folder), *((2.0, 1.0) if quick else (30.0, 2.0)))
    worst = max(done.seconds("east", done.decided), done.seconds("west", done.returned))
    checks = {"rollback within 5 seconds": worst <= 5.0, "no request failed": not done.failed}
    return [row("rollback/seconds", worst, "s", f"{len(done.answers)} answers")], checks


def drive(folder: Path, stopped_seconds: float, warm_seconds: float) -> Rollback:
    """Rolls a release back that every server serves, while the one of "west" is stopped for so long; `warm_seconds` of
    load before the decision, and after the last server follows."""
    stores = {name: folder / name for name in ("east", "west")}
    base, worse = _versions(folder / "trained")
    with _servers(folder, stores) as (children, urls):
        clusters = [{"name": name, "urls": [urls[name]], "store": str(stores[name])} for name in stores]
        site = operations.open_site(
            validate(LiveConfig, {"folder": str(folder / "live"), "clusters": clusters}, "bench")
        )
        for manifest in (base, worse):
            _release(site, folder / "trained", manifest)
            late = [state for state in operations.wait(site, 120.0) if state.lagging]
            assert not late, f"the servers do not follow: {late}"
        load = _Load(urls)
        time.sleep(warm_seconds)
        os.kill(children["west"].popen.pid, signal.SIGSTOP)
        stopped = time.time()
        bad = _version(stores["east"])
        operations.rollback(site, "a benchmark", "bench")
        decided = site.read().states[-1].events[0].at / 1e9
        time.sleep(max(0.0, stopped + stopped_seconds - time.time()))
        os.kill(children["west"].popen.pid, signal.SIGCONT)
        returned = time.time()
        late = [state for state in operations.wait(site, 60.0) if state.lagging]
        assert not late, f"the servers do not follow: {late}"
        time.sleep(warm_seconds)
        done = Rollback(decided, returned, bad, _version(stores["east"]), load.stop())
        site.engine.dispose()
    return done


def _version(store: Path) -> int:
    manifest = newest_manifest(open_store(str(store)))
    assert manifest is not None
    return manifest.version


def _versions(store: Path) -> tuple[PolicyVersion, PolicyVersion]:
    """The nano model, and one whose weights are all a little larger."""
    tensors = named_tensors(load_model(find_model("nano"), dtype=main_dtype(find_model("nano"))))
    publisher = Publisher(open_store(str(store)))
    base = publisher.publish(0, tensors, (), {})
    return base, publisher.publish(1, {name: tensor * 1.01 for name, tensor in tensors.items()}, (), {})


def _release(site: operations.ReleaseSite, store: Path, manifest: PolicyVersion) -> None:
    """As if it had passed the gate; to every server at once."""
    log = site.read()
    parent = log.current.release.number if log.current else None
    passed = GateReport(
        store=str(store),
        version=manifest.version,
        manifest=manifest.digest,
        incumbent=parent,
        anchor=None,
        parts=(),
        at=0,
    )
    made = Release(
        number=log.next_number,
        store=str(store),
        version=manifest.version,
        manifest=manifest.digest,
        parent=parent,
        anchor=None,
        report=keep_report(passed, None),
        window=None,
        at=0,
    )
    releases.begin(site.engine, made, ReleaseStage.GATE, "a benchmark", "bench")
    operations.start(site, manifest.digest, manifest.version)


@contextmanager
def _servers(folder: Path, stores: dict[str, Path]) -> Iterator[tuple[dict[str, processes.Child], dict[str, str]]]:
    model = str(find_model("nano"))
    children: dict[str, processes.Child] = {}
    try:
        for number, (name, store) in enumerate(stores.items()):
            store.mkdir()
            config = ServerConfig(model=model, port=0, threads=1, source=WeightSource(weights=str(store)))
            children[name] = spawn_engine(config, folder, number, token=None)
        yield children, {name: engine_url(child, folder, n) for n, (name, child) in enumerate(children.items())}
    finally:
        for child in children.values():
            os.kill(child.popen.pid, signal.SIGCONT)
            child.stop(10)


class _Load:
    """Clients that each stream one answer after the other."""

    def __init__(self, urls: dict[str, str]) -> None:
        self._stop, self._answers = threading.Event(), list[StreamedAnswer]()
        self._threads = [
            threading.Thread(target=self._stream, args=(name, url), daemon=True)
            for name, url in urls.items()
            for _ in range(STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def _stream(self, cluster: str, url: str) -> None:
        body = {
            "model": "nano",
            "stream": True,
            "max_tokens": TOKENS,
            "temperature": 1.0,
            "messages": [{"role": "user", "content": "Write a function that reverses a list."}],
        }
        with httpx2.Client(timeout=httpx2.Timeout(120.0), trust_env=False) as http:
            while not self._stop.is_set():
                try:
                    with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                        answer.raise_for_status()
                        version = int(answer.headers[WEIGHTS_HEADER])
                        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
                    whole = lines[-1] == "data: [DONE]" and not any("error" in json.loads(li[6:]) for li in lines[:-1])
                    self._answers.append(StreamedAnswer(cluster, version if whole else None, time.time(), lines[-1]))
                except (httpx2.HTTPError, KeyError, ValueError, IndexError) as e:
                    self._answers.append(StreamedAnswer(cluster, None, time.time(), f"{type(e).__name__} {e}"))

    def stop(self) -> list[StreamedAnswer]:
        """All answers, once the last has ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join(150.0)
            assert not thread.is_alive(), "an answer never ended"
        return self._answers
