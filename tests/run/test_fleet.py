"""Whole runs whose engines and players are placed: some are killed or leave, and the run ends like any other."""

import json
import os
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from etude import runfolder
from etude.config import FleetConfig, RLConfig
from etude.errors import UserError
from etude.fleet.jobs import namespace
from etude.fleet.keeper import job_folder
from etude.ledger import Ledger
from etude.run.jobs import RunFleet
from tests.helpers.ray_cluster import TOKEN, Head
from tests.run.test_run import CONFIG, SECONDS, etude, finished, start, undisturbed, versions  # noqa: F401

FLEET = """
[[engines]]
name = "here"
count = 2

[players]
count = 2
episodes = 3
"""


def begin(folder: Path, *arguments: str, config: str = CONFIG, fleet: str = FLEET) -> subprocess.Popen[str]:
    (folder / "run.toml").write_text(config)
    (folder / "fleet.toml").write_text(fleet)
    return etude(folder, "train", "run.toml", "--fleet", "fleet.toml", *arguments)


def wait(process: subprocess.Popen[str], until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not until():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def pids_of(parent: int, word: str) -> list[int]:
    """The processes below `parent` whose command has the word."""
    rows = subprocess.run(["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    table = [line.split(None, 2) for line in rows.splitlines()[1:]]
    below, level = list[int](), {parent}
    while level:
        inner = [(int(pid), args) for pid, ppid, args in table if int(ppid) in level]
        below += [pid for pid, args in inner if word in args]
        level = {pid for pid, _ in inner}
    return below


@pytest.mark.slow
@pytest.mark.smoke
def test_players_and_engines_that_are_killed_cost_a_run_nothing(tmp_path: Path, undisturbed: Path) -> None:  # noqa: F811
    process = begin(tmp_path)
    run = tmp_path / "outputs/run"
    wait(process, lambda: (run / "metrics.jsonl").exists())  # episodes of the second step are being played
    ledger = Ledger.open(f"sqlite:///{run}/ledger.db")
    wait(process, lambda: len(ledger.members.players()) == 2)
    os.kill(pids_of(process.pid, "etude.run.player")[0], signal.SIGKILL)
    os.kill(pids_of(process.pid, "etude.inference.server.server")[0], signal.SIGKILL)
    code, output = finished(process)
    assert code == 0, output
    assert versions(tmp_path) == versions(undisturbed)
    assert "Traceback" not in output
    report = json.loads((run / "report.json").read_text())
    assert report["checks"]["ledger_conserved"]
    assert {row.state for row in ledger.members.engines()} == {"gone"}
    assert len(ledger.members.engines()) >= 3, "the engine that was killed was started again, at another address"


@pytest.mark.slow
def test_an_engine_that_an_operator_drains_leaves_and_another_joins(tmp_path: Path) -> None:
    config = CONFIG.replace("steps = 3", "steps = 50").replace("deterministic = true\n", "").replace(
        "staleness = 0", "staleness = 1"
    )  # fmt: skip
    os.environ["ETUDE_API_KEY"] = "of-the-test"
    try:
        process = begin(tmp_path, config=config, fleet=FLEET.partition("[players]")[0])
        run = tmp_path / "outputs/run"
        wait(process, lambda: (run / "metrics.jsonl").exists())
        ledger = Ledger.open(f"sqlite:///{run}/ledger.db")
        (tmp_path / "more.toml").write_text('[[engines]]\nname = "more"\n')
        more = etude(tmp_path, "fleet", "up", "more.toml", "outputs/run")
        first = ledger.members.engines()[0].url
        code, output = finished(etude(tmp_path, "fleet", "drain", "outputs/run", first))
        assert code == 0, output

        def states() -> dict[str, str]:
            return {row.name.partition("-")[0]: row.state for row in ledger.members.engines() if row.url != first}

        wait(process, lambda: next(row.state for row in ledger.members.engines() if row.url == first) == "gone")
        wait(process, lambda: states().get("more") == "serving")
        code, output = finished(etude(tmp_path, "fleet", "status", "outputs/run"))
        assert code == 0, output
        assert first in output
        more.send_signal(signal.SIGTERM)
        code, output = finished(process)
        assert code == 0, output
        assert f"the engine at {first} gets no new turns: asked by `etude fleet drain`" in output
        assert json.loads((run / "report.json").read_text())["checks"]["ledger_conserved"]
        more.communicate(timeout=60)
    finally:
        del os.environ["ETUDE_API_KEY"]


ON_RAY = """
[[engines]]
name = "eu"
count = 3
placer = "ray"
address = "{0}"

[players]
count = 2
episodes = 3
placer = "ray"
address = "{0}"

[trainer]
placer = "ray"
address = "{0}"
"""


@pytest.mark.slow
def test_a_run_on_ray_trains_what_a_run_of_this_machine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines, players and the trainer's two ranks are placed by Ray; none is left afterwards."""
    here, there = tmp_path / "here", tmp_path / "there"
    config = CONFIG.replace("steps = 3", "steps = 2").replace("lr = 1e-3", "lr = 1e-3\nmesh.shard = 2")
    for folder in (here, there):
        folder.mkdir()
    code, output = finished(start(here, config=config))
    assert code == 0, output
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    head = Head({}, cpus=8)
    head.start()
    try:
        code, output = finished(begin(there, config=config, fleet=ON_RAY.format(head.address)))
    finally:
        head.kill()
    assert code == 0, output
    assert versions(there) == versions(here)
    report = json.loads((there / "outputs/run/report.json").read_text())
    assert all(report["checks"].values()), report["checks"]
    rows = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout
    jobs = job_folder(namespace(there / "outputs/run"), "eu-0").parent
    assert str(there) not in rows
    assert str(jobs) not in rows


def check_again_and_again(placed: RunFleet) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        placed.check()
        time.sleep(0.2)


@pytest.mark.slow
def test_a_run_whose_engines_find_no_room_or_no_model_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    engines = '[[engines]]\nname = "eu"\nplacer = "ray"\naddress = "{}"\ncpus = {}\n'
    head = Head({}, cpus=4)
    head.start()
    try:
        config = f"{CONFIG}\n[weights]\nseconds = 8\n[inference]\nstart_seconds = 8\n"
        code, output = finished(begin(tmp_path, config=config, fleet=engines.format(head.address, 99)))
        assert code == 1, output
        assert "no engine serves after 16 s: the cluster of Ray has no room for eu-0, which needs 99 CPUs" in output
        assert "Traceback" not in output

        run = tmp_path / "other"
        missing = {"tasks": {"repository": "r"}, "model": {"path": str(tmp_path / "nowhere")}}
        runfolder.create(run, RLConfig.model_validate(missing), None)
        logs, tables = runfolder.new_attempt(run), tomllib.loads(engines.format(head.address, 1))
        (tmp_path / "more.toml").write_text(engines.format(head.address, 99).replace("eu", "more"))
        monkeypatch.setenv("ETUDE_API_KEY", "of-the-test")
        code, output = finished(etude(tmp_path, "fleet", "up", "more.toml", str(run)))
        assert code == 2, output
        assert output.endswith("less what others use: lower cpus, gpus or count, or add nodes\n")

        placed = RunFleet(FleetConfig.model_validate(tables))
        placed.place(runfolder.load_config(run), run, logs, "token", [])
        with pytest.raises(UserError, match=r"the eu-0 exited with code 2: the inference server .*nowhere .*; see"):
            check_again_and_again(placed)
        placed.stop()
        assert "server | etude: " in (run / "logs/latest/eu-0.log").read_text()
    finally:
        head.kill()
    assert pids_of(os.getpid(), "etude") == []
    rows = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout
    for folder in (tmp_path / "outputs/run", run):
        assert str(job_folder(namespace(folder), "eu-0").parent) not in rows
