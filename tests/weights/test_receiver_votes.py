"""The members of a replica go to a version together or not at all, whoever fails when."""

import json
import select
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from etude.store import open_store
from etude.weights.coordinator import Coordinator
from etude.weights.publisher import Publisher
from etude.weights.replica import CoordinatorVote
from tests.helpers.http_apps import answering
from tests.helpers.small_tensors import nudged, tensors

SECONDS = 60.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    """The path of a socket: who connects talks to a new process."""
    path = str(tmp_path_factory.mktemp("members") / "socket")
    command = [sys.executable, "-m", "tests.helpers.replica_member", path]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert select.select([parent.stdout], [], [], SECONDS)[0], "the members' parent is silent"
        assert parent.stdout.readline() == "listening\n"
        yield path
        parent.kill()


class Process:
    """A member; `look` makes it look once, `told` is what it has to say then (None: it died)."""

    def __init__(self, zygote: str, store: str, coordinator: str, name: str, failpoint: str):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(SECONDS)
        self._socket.connect(zygote)
        self._file = self._socket.makefile("rw")
        arguments = {"store": store, "coordinator": coordinator, "name": name, "failpoint": failpoint}
        print(json.dumps(arguments), file=self._file, flush=True)
        assert self._file.readline() == "ready\n"

    def look(self) -> None:
        print(file=self._file, flush=True)

    def told(self) -> dict | None:
        line = self._file.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """It ends at the end of its input."""
        with suppress(BrokenPipeError):
            self._file.close()
        self._socket.close()


@pytest.fixture
def replica(tmp_path, zygote):
    """Two members with a store each, so that one can be damaged, and their coordinator."""
    coordinator = Coordinator(2, ready_seconds=3.0, applied_seconds=1.0)
    with answering(coordinator.app()) as url:
        replica = Replica(tmp_path, coordinator, url, zygote)
        try:
            yield replica
        finally:
            for member in replica.running:
                member.close()


class Replica:
    def __init__(self, folder: Path, coordinator: Coordinator, url: str, zygote: str):
        self.folder, self.coordinator, self.url, self._zygote = folder, coordinator, url, zygote
        self.stores = {name: open_store(str(folder / name)) for name in "ab"}
        self._publishers = [Publisher(store, 8) for store in self.stores.values()]
        self._current = tensors(0)
        self.running: list[Process] = []

    def publish(self, version: int):
        self._current = nudged(self._current, version)
        return [publisher.publish(version, self._current, (), {}) for publisher in self._publishers].pop()

    def start(self, name: str, failpoint: str = "") -> Process:
        member = Process(self._zygote, self.stores[name].url, self.url, name, failpoint)
        self.running.append(member)
        return member


def look(*members: Process) -> list[dict | None]:
    """What members have to say that look at the same time."""
    for member in members:
        member.look()
    return [member.told() for member in members]


def test_members_go_together(replica):
    a, b = replica.start("a"), replica.start("b")
    zero = replica.publish(0)
    assert [told["digest"] for told in look(a, b)] == [zero.digest] * 2

    # One cannot stage: none swaps.
    one, store = replica.publish(1), replica.stores["b"]
    payload = store.get(one.payload[0].key)
    store.put(one.payload[0].key, payload[:-1])
    told = look(a, b)
    assert [t["digest"] for t in told] == [zero.digest] * 2
    assert "NotTogether: version 1 waits" in told[0]["error"]
    assert "BrokenObject: version 1: its payload was altered" in told[1]["error"]
    store.put(one.payload[0].key, payload)
    assert [t["digest"] for t in look(a, b)] == [one.digest] * 2
    assert replica.coordinator.committed == 1

    # They see different newest versions: they meet at the lower one.
    two, three = replica.publish(2), replica.publish(3)
    seen, hidden = replica.folder / "b" / "versions" / "00000003.json", replica.folder / "hidden.json"
    shutil.move(seen, hidden)
    told = look(a, b)
    assert [t["digest"] for t in told] == [one.digest] * 2
    assert "the members are ready for different versions" in told[0]["error"]
    assert [t["digest"] for t in look(a, b)] == [two.digest] * 2
    shutil.move(hidden, seen)
    assert [t["digest"] for t in look(a, b)] == [three.digest] * 2


@pytest.mark.parametrize("failpoint", ["receiver.ready", "receiver.swapped"])
def test_one_that_dies_before_it_has_swapped_takes_the_others_back(replica, failpoint):
    a, b = replica.start("a"), replica.start("b", f"{failpoint}:2")
    zero = replica.publish(0)
    assert [told["digest"] for told in look(a, b)] == [zero.digest] * 2
    one = replica.publish(1)
    told = look(a, b)
    assert told[1] is None, "it was killed"
    assert (told[0]["version"], told[0]["digest"]) == (0, zero.digest)
    assert "version 1 was taken back: not all members have swapped" in told[0]["error"]

    again = replica.start("b")
    assert look(again)[0]["digest"] == zero.digest, "one that comes back goes where the others are, not further"
    assert [t["digest"] for t in look(a, again)] == [one.digest] * 2


def test_without_a_coordinator_nobody_swaps():
    votes = CoordinatorVote("http://127.0.0.1:9", "a")
    assert votes.committed() == -1
    decision = votes.ready(1, True)
    assert not decision.go
    assert decision.why == "the coordinator is silent"
    assert not votes.applied(decision, True)
