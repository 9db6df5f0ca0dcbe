"""Jobs of this machine: started again later each time, stopped for good."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from etude.config import EnginesTable, RanksTable
from etude.errors import UserError
from etude.fleet import FleetJob, Placed, jobs, namespace, open_placer, ray_bridge, supervise

WORKER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(os.environ["WORD"], sys.argv[1:], open(sys.argv[1]).read(), flush=True)
if sys.argv[2] != "stay":
    sys.exit(int(sys.argv[2]))
time.sleep(120)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module with WORKER that children import."""
    (tmp_path / "fleet_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "fleet_worker"


def start(module: str, logs: Path, what: str, restarts: int = -1) -> Placed:
    placer = open_placer(EnginesTable(name="eu", restarts=restarts), logs, logs)
    return placer.start(
        FleetJob("eu-0", (module, "{folder}/member.json", what), {"WORD": "secret"}, {"member.json": "{}"})
    )


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lines(placed: Placed) -> list[str]:
    return placed.log.read_text().splitlines() if placed.log.exists() else []


def test_a_job_that_is_killed_starts_again_and_a_stopped_one_does_not(module, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "FIRST_SECONDS", 0.2)
    placed = start(module, tmp_path, "stay")
    wait_until(lambda: len(lines(placed)) == 1)
    assert lines(placed) == [f"secret ['{tmp_path}/eu-0.files/member.json', 'stay'] {{}}"]
    assert (tmp_path / "eu-0.files").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "eu-0.files" / "member.json").stat().st_mode & 0o777 == 0o600
    for count in (2, 3):
        kill_time, (pid,) = time.monotonic(), placed.pids.values()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda count=count: len(lines(placed)) == count)
        assert time.monotonic() - kill_time > 0.2 * (count - 1)
        assert placed.exit_code is None
        assert placed.failure() is None
    placed.stop(10)
    assert placed.exit_code == 0
    assert placed.pids == {}
    assert len(lines(placed)) == 3


@pytest.mark.parametrize(("code", "restarts", "starts"), [(0, -1, 1), (2, -1, 1), (3, 0, 1), (3, 2, 3)])
def test_exit_codes_decide(module, tmp_path, monkeypatch, code, restarts, starts):
    monkeypatch.setattr(supervise, "FIRST_SECONDS", 0.01)
    placed = start(module, tmp_path, str(code), restarts)
    assert placed.ends(20)
    assert placed.exit_code == code
    assert len(lines(placed)) == starts
    assert placed.failure() == (f"the eu-0 exited with code {code}: {lines(placed)[-1]}" if code else None)


def test_a_stop_does_not_wait_for_the_next_start(module, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "FIRST_SECONDS", 60.0)
    placed = start(module, tmp_path, "3")
    wait_until(lambda: len(lines(placed)) == 1 and not placed.pids)
    placed.stop(5)
    assert placed.exit_code == 3


def test_a_python_that_is_missing_is_named(tmp_path):
    placed = open_placer(EnginesTable(name="eu"), tmp_path, tmp_path).start(
        FleetJob("eu-0", ("x",), python="/no/python")
    )
    assert placed.ends(10)
    assert placed.failure() == "the eu-0 could not be started: No such file or directory"


def test_jobs_have_gpus_of_their_own(tmp_path, monkeypatch):
    (tmp_path / "fleet_gpus.py").write_text("import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d")
    placer = open_placer(EnginesTable(name="eu", gpus=1), tmp_path, tmp_path, gpu=1)
    placed = [placer.start(FleetJob(f"eu-{n}", ("fleet_gpus",), gpus=gpus)) for n, gpus in enumerate((1, 2, 0))]
    assert all(job.ends(20) for job in placed)
    assert [lines(job) for job in placed] == [["b"], ["c,d"], ["a,b,c,d"]]
    with pytest.raises(UserError, match="eu-3 needs the GPUs 4 to 4 of this machine"):
        placer.start(FleetJob("eu-3", ("fleet_gpus",), gpus=1))


def test_an_installation_without_ray_is_told_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray._raylet", None)
    with pytest.raises(UserError, match=r'placer = "ray" needs ray .*: pip install .etude\[ray\]'):
        ray_bridge._head("auto")


def test_a_process_without_a_token_of_ray_is_refused(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="needs the token of the cluster: set RAY_AUTH_TOKEN"):
        open_placer(EnginesTable(name="eu", placer="ray"), tmp_path, tmp_path)


def test_ranks_are_a_group(module, tmp_path):
    placer = open_placer(RanksTable(), tmp_path, tmp_path)
    group = placer.start_group(FleetJob("trainer", (module, "/dev/null", "0"), {"WORD": "rank"}), 2)
    assert group.ends(20)
    assert (group.exit_code, [*group.pids]) == (0, ["trainer-0", "trainer-1"])


def test_the_folder_of_a_job_holds_its_files_alone(tmp_path):
    jobs.write_files(tmp_path / "job", {"a.json": "1"})
    jobs.write_files(tmp_path / "job", {"b.json": "2"})
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["b.json"]
    with pytest.raises(ValueError, match="not the name of a job's file"):
        jobs.write_files(tmp_path / "job", {"../b": "2"})


def test_runs_of_one_name_have_namespaces_of_their_own(tmp_path):
    one, other = namespace(tmp_path / "a" / "demo"), namespace(tmp_path / "b" / "demo")
    assert one != other
    assert one.startswith("etude-demo-")
