"""A relay pulls each payload once for its cluster, and whatever it or its link does, nothing wrong is ever served."""

import json
import logging
import os
import signal
import threading
from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import etude.weights.payloads
from etude import processes
from etude.store import Store, open_store
from etude.weights import manifest
from etude.weights.payloads import DamagedVersion, PayloadSource
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver
from etude.weights.relay import Relay, main
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.http_apps import answering
from tests.helpers.small_tensors import nudged, tensors, widened

SECONDS = 60.0


class Logged(Store):
    """A store that notes which keys are read."""

    def __init__(self, url: str):
        super().__init__(url, open_store(url)._backend)
        self.read: list[str] = []

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return super().get(key)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "weights"))


def publish(store: Store, count: int) -> list:
    publisher, current, made = Publisher(store, 8), tensors(0), []
    for version in range(count):
        made.append(publisher.publish(version, current, (), {}))
        current = nudged(current, version)
    return made


def test_three_servers_take_each_payload_once_from_the_store(store):
    origin = Logged(store.url)
    publisher, current = Publisher(store, 8), tensors(0)
    with answering(Relay(origin, 2**20).app()) as url:
        lives = [widened(tensors(9)) for _ in range(3)]
        receivers = [Receiver(store, live, PayloadSource(store, url)) for live in lives]
        for version in range(4):
            published = publisher.publish(version, current, (), {})
            barrier = threading.Barrier(3)

            def go(receiver: Receiver, barrier=barrier) -> None:
                barrier.wait(SECONDS)
                receiver.apply(receiver.poll())

            threads = [threading.Thread(target=go, args=(receiver,)) for receiver in receivers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SECONDS)
            assert [weights_digest(live) for live in lives] == [published.digest] * 3
            current = nudged(current, version)
        health = httpx2.get(f"{url}/health", trust_env=False).json()
    assert sorted(origin.read) == [m.payload[0].key for m in manifest.manifests(store)], (
        "each payload once, and only those"
    )
    assert health["fetched"] == 4
    assert health["served_bytes"] == 3 * sum(m.payload_bytes for m in manifest.manifests(store))


def test_it_keeps_the_last_used_payloads_within_its_budget(store):
    made = publish(store, 4)
    origin = Logged(store.url)
    with answering(Relay(origin, sum(m.payload_bytes for m in made[1:]) - 1).app()) as url:
        source = PayloadSource(store, url)
        for version in (1, 2, 1, 3, 1, 2):
            source.get(version, made[version].payload[0])
        held = httpx2.get(f"{url}/health", trust_env=False).json()
    assert origin.read == [made[v].payload[0].key for v in (1, 2, 3, 2)], "1 was used last when 3 came, so 2 went"
    assert held["payloads"] == 2
    with answering(Relay(origin, 0).app()) as url:  # a payload larger than the budget is served all the same
        assert len(PayloadSource(store, url).get(0, made[0].payload[0])) == made[0].payload_bytes


def test_ranges(store):
    (made,) = publish(store, 1)
    payload = store.get(made.payload[0].key)
    with answering(Relay(store, 2**20).app()) as url, httpx2.Client(base_url=url, trust_env=False) as http:

        def get(wanted: str | None, digest: str = made.payload[0].digest):
            headers = {"range": wanted} if wanted else {}
            return http.get(f"/{made.payload[0].key}", params={"blake3": digest}, headers=headers)

        assert (get(None).status_code, get(None).content) == (200, payload)
        part = get("bytes=10-19")
        assert (part.status_code, part.content) == (206, payload[10:20])
        assert part.headers["content-range"] == f"bytes 10-19/{len(payload)}"
        assert get(f"bytes=10-{2**40}").content == payload[10:]
        for wrong in ("bytes=9-3", f"bytes={len(payload)}-{len(payload) + 5}", "bytes=-5", "lines=1-2"):
            assert get(wrong).status_code == 416
        assert "has another digest" in get(None, "0" * 64).text
        assert http.get("/payloads/nothing", params={"blake3": "0" * 64}).status_code == 404
        for path in ("%2e%2e/versions/00000000.json", "%00", "a" * 600, "ü"):
            assert http.get(f"/payloads/{path}", params={"blake3": "0" * 64}).status_code == 400
        assert http.get("/payloads/nothing", params={"blake3": "0"}).status_code == 400


def test_a_stale_relay_is_passed_by(store, tmp_path, caplog):
    """It stands before a copy of the store that does not have the newest version yet."""
    stale = open_store(str(tmp_path / "stale"))
    publish(stale, 2)
    made = publish(store, 3)
    live = widened(tensors(9))
    with answering(Relay(stale, 2**20).app()) as url, caplog.at_level(logging.WARNING):
        receiver = Receiver(store, live, PayloadSource(store, url))
        receiver.apply(receiver.poll())
    assert weights_digest(live) == made[2].digest
    assert "version 2 comes from the store: relay" in caplog.text
    assert f"has no {made[2].payload[0].key}" in caplog.text


DAMAGES = {
    "flipped": lambda part: bytes([part[0] ^ 1]) + part[1:],
    "truncated": lambda part: part[:-1],
    "empty": lambda part: b"",
    "duplicated": lambda part: part + part,
    "another payload": lambda part: bytes(len(part)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_link_damages_comes_from_the_store(store, damage, caplog):
    made = publish(store, 2)

    def wrong(http: Request) -> Response:
        start, stop = http.headers["range"].removeprefix("bytes=").split("-")
        part = store.get(f"payloads/{http.path_params['name']}")[int(start) : int(stop) + 1]
        return Response(DAMAGES[damage](part), 206)

    live = widened(tensors(9))
    with answering(Starlette(routes=[Route("/payloads/{name:path}", wrong)])) as url, caplog.at_level(logging.WARNING):
        receiver = Receiver(store, live, PayloadSource(store, url))
        receiver.apply(receiver.poll())
    assert weights_digest(live) == made[1].digest
    assert caplog.text.count("comes from the store") == 2


@pytest.mark.parametrize("damage", [*DAMAGES, "missing"])
def test_what_is_damaged_in_the_store_is_served_by_nobody(store, damage):
    made = publish(store, 2)
    live = widened(tensors(9))
    with answering(Relay(store, 2**20).app()) as url:
        receiver = Receiver(store, live, PayloadSource(store, url))
        receiver.apply(receiver.poll(0))
        payload = store.get(made[1].payload[0].key)
        if damage == "missing":
            store.delete(made[1].payload[0].key)
        else:
            store.put(made[1].payload[0].key, DAMAGES[damage](payload))
        with pytest.raises(DamagedVersion, match="version 1: its payload"):
            receiver.poll()
        assert (receiver.version, weights_digest(live)) == (0, made[0].digest)
        store.put(made[1].payload[0].key, payload)
        receiver.apply(receiver.poll())
    assert weights_digest(live) == made[1].digest


def test_a_flip_anywhere_in_a_payload_is_found(store):
    made = publish(store, 2)
    receiver = Receiver(store, widened(tensors(9)))
    receiver.apply(receiver.poll(0))
    payload = store.get(made[1].payload[0].key)
    for at in range(0, len(payload), 16):  # far finer than the 4 KiB that a disk writes
        store.put(made[1].payload[0].key, payload[:at] + bytes([payload[at] ^ 0x80]) + payload[at + 1 :])
        with pytest.raises(DamagedVersion):
            receiver.poll()


def test_a_relay_killed_in_mid_transfer(store, tmp_path, monkeypatch, caplog):
    made = publish(store, 1)
    monkeypatch.setattr(etude.weights.payloads, "PIECE", 700)
    assert made[0].payload_bytes > 1400, "the third range is asked of a dead relay"
    ready = tmp_path / "relay.json"
    argv = ["etude.weights.relay", "--store", store.url, "--ready-file", str(ready)]
    child = processes.start("relay", argv, tmp_path / "relay.log", {"ETUDE_FAILPOINT": "relay.range:2"})
    url = json.loads(processes.wait_for_file(ready, child, SECONDS))["url"]
    live = widened(tensors(9))
    with caplog.at_level(logging.WARNING):
        receiver = Receiver(store, live, PayloadSource(store, url))
        receiver.apply(receiver.poll())
    assert child.popen.wait(SECONDS) == -signal.SIGKILL
    assert weights_digest(live) == made[0].digest
    assert "version 0 comes from the store: relay" in caplog.text


def test_a_relay_is_a_process_that_ends_when_it_is_asked_to(store, tmp_path):
    made = publish(store, 1)
    ready = tmp_path / "relay.json"
    argv = ["etude.weights.relay", "--store", store.url, "--ready-file", str(ready), "--budget-mb", "1"]
    child = processes.start("relay", argv, tmp_path / "relay.log")
    found = json.loads(processes.wait_for_file(ready, child, SECONDS))
    assert found["pid"] == child.popen.pid
    assert len(PayloadSource(store, found["url"])._from_relay(made[0].payload[0])) == made[0].payload_bytes
    os.kill(found["pid"], signal.SIGTERM)
    child.popen.wait(SECONDS)
    assert child.log.read_text() == f"relay at {found['url']}\n"


def test_a_wrong_store_is_one_sentence(capsys):
    assert main(["--store", "ftp://nowhere"]) == 2
    assert "cannot be opened as a store" in capsys.readouterr().err
