"""The simulated days of `benchmarks.live_days`: their clock, processes that are started again, and their verdict."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from benchmarks.live_days import Legs, checks
from benchmarks.live_services import Front, Service, Services

from etude import processes
from etude.config import LiveConfig, validate
from etude.live.legs import Leg, LegKind
from etude.live.simulate.clients import ARGUMENT, CALL, FunctionRequest, calls_of, judged

SPEED = 1000.0


CLOCKED = """
import json, os, pathlib, subprocess, sys, time
from benchmarks import fast_clock
folder, speed, *command = sys.argv[1:]
first = [time.time_ns(), time.monotonic_ns()]
fast_clock.set_clock(pathlib.Path(folder) / "clock", float(speed))
own = [time.time_ns(), time.monotonic_ns()]
os.environ["PYTHONPATH"] += os.pathsep + folder
child = subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, timeout=60, check=True)
print(json.dumps([first, own, json.loads(child.stdout)]))
"""


def clocked(folder: Path, *command: str) -> list:
    """Time and monotonic time before the clock is set, and after it; and what a child prints, which is JSON."""
    words = [sys.executable, "-c", CLOCKED, str(folder), str(SPEED), *command]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(ran.stdout)


def test_all_processes_have_one_clock_and_the_machines_time_stays(tmp_path: Path) -> None:
    code = "import json, time; print(json.dumps([time.time_ns(), time.monotonic_ns()]))"
    (start, began), *readings = clocked(tmp_path, "-c", code)
    for time_ns, monotonic_ns in readings:
        assert began < monotonic_ns < time.monotonic_ns()
        # two clocks are not read in one moment: a hundredth of a second between them is ten on this clock
        assert time_ns - start == pytest.approx(SPEED * (monotonic_ns - began), rel=0.01, abs=10 * 10**9)


def test_a_command_of_the_loop_waits_on_the_clock_and_servers_have_their_time(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(
        "import json, sys\nfrom etude.live import legs\nfrom etude.live.release import operations as o\n"
        "print(json.dumps([sys.argv[1:], o.TICK_SECONDS, o.DEADLINE, legs.AGAIN_SECONDS]))\n"
    )
    *_, child = clocked(tmp_path, "-m", "benchmarks.fast_clock", "shown", "live", "run")
    assert child == [["live", "run"], 0.06, 60000.0, 3.6]


def test_a_process_is_started_again_once_what_it_needs_listens(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.live_services._AGAIN_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        service = Service("sleeper", lambda: processes.start("sleeper", ["timeit", "-n1", "-r1", "-s",
            "import time", "time.sleep(60)"], tmp_path / "log"), needs=port)  # fmt: skip
        assert service.look() == ""
        first = service.child
        assert first is not None
        assert service.look() == ""
        service.kill()
        assert service.look() == "sleeper is started again"
        assert service.child is not None
        assert service.child.popen.pid != first.popen.pid
        service.child.popen.kill()
        service.child.popen.wait(10)
    assert service.look() == "", "what it needs is gone"
    assert (service.kills, service.ends) == (1, 0)
    service.needs = None
    assert service.look() == "sleeper is started again: the sleeper was killed by SIGKILL"
    assert (service.kills, service.ends) == (1, 1)
    service.child.stop(5)


def test_connections_wait_for_a_gateway_that_is_started_again() -> None:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    Front(*ports)
    deadline = time.monotonic() + 10
    while True:
        try:
            client = socket.create_connection(("127.0.0.1", ports[0]), 5)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    with client:
        client.sendall(b"ask")
        with socket.create_server(("127.0.0.1", ports[1])) as gateway:
            back, _ = gateway.accept()
            with back:
                assert back.recv(3) == b"ask"
                back.sendall(b"answer")
                assert client.recv(6) == b"answer"
        assert client.recv(1) == b"", "the gateway has gone, and the client is told"


def test_legs_are_counted_once_each() -> None:
    legs = Legs()
    for leg in (Leg(LegKind.WAIT, "a"), Leg(LegKind.TRAIN, "1"), Leg(LegKind.TRAIN, "1"), Leg(LegKind.TRAIN, "2")):
        legs.see(leg)
    assert dict(legs.counts) == {LegKind.WAIT: 1, LegKind.TRAIN: 2}


GOOD = {
    "windows": 6, "learned_releases": 3, "planted": ["rolled_back", 1.0, "invalid calls"],
    "learned": {"one": {"turns": 1, "tokens": 9}, "two": {"turns": 1, "tokens": 9}}, "not_killed": [],
    "requests": 9, "failed": {}, "signals": 9, "signals_lost": 0, "signals_refused": 0, "replayed": {1: 0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, []),
        ({"windows": 5}, ["6 windows"]),
        ({"learned_releases": 2}, ["3 learned releases"]),
        ({"planted": None}, ["the planted version was stopped"]),
        ({"planted": ["released", 1.0, ""]}, ["the planted version was stopped"]),
        ({"learned": {"one": {"turns": 1, "tokens": 9}}}, ["every cluster was learned from"]),
        ({"not_killed": ["loop"]}, ["every process was killed"]),
        ({"failed": {"APIError": 1}}, ["no request failed"]),
        ({"signals_lost": 1}, ["no signal was lost"]),
        ({"signals_refused": 1}, ["no signal was lost"]),
        ({"replayed": {1: 0, 2: 1}}, ["the same bits again"]),
        ({"replayed": {}, "requests": 0, "signals": 0},
         ["no request failed", "no signal was lost", "the same bits again"]),
    ],
)  # fmt: skip
def test_each_condition_fails_alone(change: dict, failed: list[str]) -> None:
    assert [name for name, holds in checks({**GOOD, **change}, ["one", "two"]).items() if not holds] == failed


def test_the_clusters_of_the_days_follow_stores_of_their_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.live_services._publish_base", lambda store: store.mkdir(parents=True))
    services = Services(tmp_path, sys.executable)
    config = validate(LiveConfig, tomllib.loads(services.prepare().read_text("utf-8")), "test")
    assert [(c.name, c.urls, c.canary_urls) for c in config.clusters] == [
        (name, (services.url(f"{name}-control"),), (services.url(f"{name}-canary"),)) for name in ("one", "two")
    ]
    stores = [store for c in config.clusters for store in (c.store, c.canary_store)]
    assert stores == [str(tmp_path / "stores" / arm) for arm in services.arms]
    assert config.gateway.port == services.ports["gateway"] != services.ports["front"]


class Message:
    def __init__(self, content: str | None, calls: list | None = None) -> None:
        self.content, self.tool_calls = content, calls


def test_a_call_that_the_server_left_in_the_text_is_read() -> None:
    wrong = "def f(x):\n    if x:\n        return 1"
    right = "def f(x):\n    if not x:\n        return 1"
    request = FunctionRequest("f", "f", "a.py", wrong, right)
    said = f"I see.{CALL}edit{ARGUMENT}    if x:\n{ARGUMENT}    if not x:\n{CALL}test"
    calls = calls_of(Message(said))
    assert judged(request, calls).right
    assert judged(request, calls_of(Message(f"{CALL}edit{ARGUMENT}alone"))).source is None
    assert list(calls_of(Message("no call"))) == []
    assert list(calls_of(Message(None, ["parsed"]))) == ["parsed"]
