"""`etude fleet`, and `etude train --fleet`."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from etude import runfolder
from etude.cli import fleet as command
from etude.cli.main import main
from etude.config import FleetConfig, RLConfig, TasksConfig
from etude.ledger import MemberPlayer

URL = "http://10.0.0.1:8000"


@dataclass
class Row:
    url: str
    name: str
    state: str = "serving"
    why: str = ""
    version: int = 3
    leaving: str = ""


class LedgerStandIn:
    """The part of a ledger that the command reads and writes."""

    rows: tuple[Row, ...] = ()
    calls: list[tuple[str, ...]]

    def __init__(self) -> None:
        self.calls, self.members = [], self

    def engines(self) -> list[Row]:
        return [*self.rows]

    def players(self) -> dict[str, int]:
        return {"controller": 1, "elsewhere/players-0.1a2b": 1} if self.rows else {}

    def offers(self) -> list[MemberPlayer]:
        return [MemberPlayer("players-0", 8, "", 1), MemberPlayer("players-1", 0, "its host is broken", 1)]

    def drain(self, url: str, why: str) -> bool:
        self.calls.append(("drain", url, why))
        return True

    def join(self, url: str, name: str) -> None:
        self.calls.append(("join", url, name))

    def close(self) -> None:
        pass


@pytest.fixture
def ledger(monkeypatch):
    ledger = LedgerStandIn()
    monkeypatch.setattr(command.Ledger, "open", lambda *_: ledger)
    return ledger


@pytest.fixture
def folder(tmp_path):
    runfolder.create(tmp_path / "demo", RLConfig(tasks=TasksConfig(repository="repo")), None)
    runfolder.new_attempt(tmp_path / "demo")
    return tmp_path / "demo"


@pytest.fixture
def fleet(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text('[[engines]]\nname = "eu"\ncount = 2\n[players]\n')
    return path


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    return ended.value.code or 0


def refusal(capsys, *words: object) -> str:
    assert call(*words) == 2
    return capsys.readouterr().err


def test_status_lists_engines_and_players(ledger, folder, capsys):
    ledger.rows = (Row(URL, "eu-0"), Row("http://b", "eu-1", "gone", "it was silent", -1))
    assert call("fleet", "status", folder) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["eu-0", URL, "serving", "3"]
    assert lines[2] == ["eu-1", "http://b", "gone", "it", "was", "silent"]
    assert lines[3:5] == [[name, "plays", "1", "episode"] for name in ("controller", "players-0")]
    assert " ".join(lines[5]) == "players-1 rests: its host is broken"
    assert "does not run" in " ".join(lines[6])
    assert call("fleet", "status", folder, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in values["engines"]] == ["eu-0", "eu-1"]
    assert values["resting"] == {"players-1": "its host is broken"}
    ledger.rows = ()
    with runfolder.lock(folder):
        assert call("fleet", "status", folder) == 0
    assert capsys.readouterr().out.splitlines()[1:2] == ["no engine has joined yet"]


def test_drain_asks_engines_that_are_there(ledger, folder, capsys):
    ledger.rows = (Row(URL, "eu-0"), Row("http://gone", "eu-1", "gone"))
    assert "has no engine http://gone" in refusal(capsys, "fleet", "drain", folder, f"{URL}/", "http://gone")
    assert ledger.calls == []
    assert call("fleet", "drain", folder, f"{URL}/") == 0
    assert ledger.calls == [("drain", URL, "asked by `etude fleet drain`")]


def test_logs_are_those_of_the_last_attempt_that_has_them(folder, capsys):
    for text in ("it served\n", "it serves\n"):
        (runfolder.new_attempt(folder) / "eu-0.log").write_text(text)
    assert call("fleet", "logs", folder, "eu-0") == 0
    assert capsys.readouterr().out == "it serves\n"
    for _ in range(8):
        runfolder.new_attempt(folder)  # of a run that is resumed while an engine that joined it goes on
    assert call("fleet", "logs", folder, "eu-0") == 0
    assert capsys.readouterr().out == "it serves\n"
    for name in ("eu-1", "../../config"):
        said = refusal(capsys, "fleet", "logs", folder, name)
        assert f"has no log of '{name}', only eu-0: name one, or the --address" in said


def test_up_refuses_what_cannot_join(ledger, folder, fleet, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("ETUDE_API_KEY", raising=False)
    assert "set ETUDE_API_KEY to the token" in refusal(capsys, "fleet", "up", fleet, folder)
    (tmp_path / "ranks.toml").write_text("[trainer]\n")
    assert "keeps its trainer: drop [trainer]" in refusal(capsys, "fleet", "up", tmp_path / "ranks.toml", folder)
    runfolder.create(tmp_path / "new", RLConfig(tasks=TasksConfig(repository="repo")), None)
    assert "new has not begun: start its run first" in refusal(capsys, "fleet", "up", fleet, tmp_path / "new")
    (folder / "report.json").write_text("{}")
    assert "demo has ended: resume it" in refusal(capsys, "fleet", "up", fleet, folder)
    assert "holds no run" in refusal(capsys, "fleet", "up", fleet, tmp_path)
    (tmp_path / "wrong.toml").write_text('[[engines]]\nname = "eu"\ncont = 2\n')
    assert "unknown key engines.0.cont" in refusal(capsys, "fleet", "up", tmp_path / "wrong.toml", folder)


def test_up_refuses_another_token_and_servers_that_do_not_answer(ledger, folder, fleet, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ETUDE_API_KEY", "another")
    monkeypatch.setattr(command, "_answer", lambda url, _: 401 if url == URL else None)
    ledger.rows = (Row("http://silent", "eu-0"), Row(URL, "eu-1"))
    assert "ETUDE_API_KEY is not the token" in refusal(capsys, "fleet", "up", fleet, folder)
    path = tmp_path / "attached.toml"
    path.write_text('[[engines]]\nname = "us"\nplacer = "attach"\nurls = ["http://silent"]\n')
    assert "http://silent does not answer" in refusal(capsys, "fleet", "up", path, folder)
    assert ledger.calls == []


def test_up_refuses_servers_on_loopback_for_players_of_other_hosts(ledger, folder, tmp_path, capsys, monkeypatch):
    """Whichever of the two is there already."""
    monkeypatch.setenv("ETUDE_API_KEY", "token")
    monkeypatch.setattr(command, "_answer", lambda *_: 200)
    players, attached = tmp_path / "players.toml", tmp_path / "attached.toml"
    players.write_text('[players]\nplacer = "ray"\n')
    attached.write_text('[[engines]]\nname = "us"\nplacer = "attach"\nurls = ["http://localhost:8000"]\n')
    ledger.rows = (Row("http://127.0.0.1:7000", "engine-0"), Row("http://127.0.0.1:8000", "engine-1", "gone"))
    assert "do not reach http://127.0.0.1:7000, a loopback" in refusal(capsys, "fleet", "up", players, folder)
    ledger.rows = (Row(URL, "engine-0"),)
    runfolder.keep_fleet(folder, FleetConfig.model_validate({"players": {"placer": "ray"}}))
    assert "do not reach http://localhost:8000, a loopback" in refusal(capsys, "fleet", "up", attached, folder)
    assert ledger.calls == []


def test_up_joins_attached_servers(ledger, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ETUDE_API_KEY", "token")
    monkeypatch.setattr(command, "_answer", lambda *_: 200)
    away = types.SimpleNamespace(AwayProcess=None)  # nothing is started
    monkeypatch.setitem(sys.modules, "etude.run.away", away)
    path = tmp_path / "attached.toml"
    path.write_text(f'[[engines]]\nname = "us"\nplacer = "attach"\nurls = ["{URL}"]\n')
    assert call("fleet", "up", path, folder) == 0
    assert ledger.calls == [("join", URL, "us-0")]


MEMBER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("left", flush=True), sys.exit(0)))
open(sys.argv[1] + ".pid", "w").write(str(os.getpid()))
print(os.environ["ETUDE_API_KEY"], open(sys.argv[1]).read(), flush=True)
time.sleep(120)
"""
UP = """
import sys, types
from dataclasses import dataclass
from pathlib import Path
from etude.config import RLConfig
sys.modules["etude.run.away"] = away = types.ModuleType("away")
@dataclass
class AwayProcess:
    folder: Path
    config: RLConfig
    name: str
    number: int
    episodes: int = 0
    away: bool = False
    def text(self):
        return f"{self.name} {self.number} {self.episodes} {self.away}"
away.AwayProcess = AwayProcess
from etude.run import jobs
def replaced(make):
    def made(*words, **rest):
        job = make(*words, **rest)
        return type(job)(job.name, ("fleet_member", *job.argv[1:]), job.env, job.files, job.cpus, job.gpus)
    return made
jobs.engine_job, jobs.player_job = replaced(jobs.engine_job), replaced(jobs.player_job)
from etude.cli.main import main
main()
"""


def test_up_starts_jobs_that_live_as_long_as_the_command(folder, fleet, tmp_path):
    """A stand-in describes the processes, and is one: those of a run load a model."""
    (tmp_path / "fleet_member.py").write_text(MEMBER)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    env = {**os.environ, "ETUDE_API_KEY": "token", "PYTHONPATH": path}
    words = [sys.executable, "-c", UP, "fleet", "up", str(fleet), str(folder)]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        logs = folder / "logs" / "latest"
        deadline = time.monotonic() + 30
        while len(texts := [text for log in logs.glob("*.log") if (text := log.read_text())]) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        names = [path.stem.rpartition("-") for path in sorted(logs.glob("*.log"))]
        assert [name for _, _, name in names] == ["0", "1", "0"]
        assert names[0][0].startswith("eu-")
        assert names[2][0].startswith("players-")
        assert sorted(" ".join([text.split()[0], *text.split()[2:]]) for text in texts) == [
            "token 0 0 True", "token 0 64 True", "token 1 0 True"
        ]  # fmt: skip
        logs = logs.resolve()
        runfolder.new_attempt(folder)  # the run is resumed: what is killed then starts anew all the same
        log = next(logs.glob("eu-*-0.log"))
        os.kill(int(next(logs.glob("eu-*-0.files/*.pid")).read_text()), signal.SIGKILL)
        while log.read_text().count("token") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert all(log.read_text().endswith("left\n") for log in logs.glob("*.log"))


def test_files_are_written_for_a_scheduler(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('name = "demo"\n[tasks]\nrepository = "r"\n')
    (tmp_path / "fleet.toml").write_text('[[engines]]\nname = "eu"\nplacer = "ray"\n')
    words = "fleet", "files", tmp_path / "fleet.toml", tmp_path / "run.toml", "-o", tmp_path / "out", "--for"
    assert call(*words, "slurm") == 0
    assert capsys.readouterr().out == f"{tmp_path}/out/ray.sbatch\n"
    assert "--fleet" in (tmp_path / "out" / "ray.sbatch").read_text()
    assert call(*words, "kuberay", "--image", "i", "--claim", "c") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"ray.sbatch", "rayjob.json", "configuration.json"}
    assert "--image is for --for kuberay" in refusal(capsys, *words, "slurm", "--image", "i")
    assert "--for kuberay needs --claim" in refusal(capsys, *words, "kuberay", "--image", "i")
    assert "numbers from 1 on" in refusal(capsys, *words, "slurm", "--machine-gpus", "0")


def test_train_refuses_a_fleet_that_does_not_fit(tmp_path, fleet, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('name = "demo"\n[tasks]\nrepository = "r"\n[inference]\nservers = 2\n')
    assert "drop inference.servers" in refusal(capsys, "train", "run.toml", "--dry-run", "--fleet", fleet)
    Path("sft.toml").write_text('stage = "sft"\nmodel.path = "nano"\ndata.files = ["a.jsonl"]\n')
    assert "--fleet is for stage rl" in refusal(capsys, "train", "sft.toml", "--dry-run", "--fleet", fleet)
    Path("fleet2.toml").write_text('stage = "fleet"\n[players]\n')
    assert "of stage fleet: see `etude fleet --help`" in refusal(capsys, "train", "fleet2.toml", "--dry-run")


def test_train_keeps_the_fleet_of_a_run(folder, fleet, monkeypatch):
    calls: list[FleetConfig | None] = []
    stub = types.ModuleType("launch")
    stub.train_rl = lambda *_, fleet, **__: calls.append(fleet)
    monkeypatch.setitem(sys.modules, "etude.run.launch", stub)
    monkeypatch.setattr("etude.cli.needs.extras_of", lambda _: ())
    assert call("train", folder, "--resume") == 0
    assert calls.pop() is None
    assert call("train", folder, "--resume", "--fleet", fleet) == 0
    kept = calls.pop()
    assert kept is not None
    assert kept.engines[0].count == 2
    assert call("train", folder, "--resume") == 0
    assert calls == [kept]
    assert runfolder.load_fleet(folder) == kept
    assert (folder / "fleet.json").stat().st_mode & 0o777 == 0o600
