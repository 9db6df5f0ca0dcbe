"""Jobs in a cluster of Ray: one head of this machine for all tests."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from etude.config import EnginesTable, RanksTable
from etude.errors import UserError
from etude.fleet import FleetJob, namespace, open_placer, ray_jobs, ray_log, stop_all
from tests.fleet.test_place import lines, wait_until
from tests.helpers.ray_cluster import TOKEN, Head

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

WORKER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(0)))
print("ray" in str(os.environ).lower() and [n for n in os.environ if n.startswith("RAY")], flush=True)
print(os.environ["WORD"], open(sys.argv[1] + "/member.json").read(), flush=True)
count = 0
while True:
    time.sleep(0.2)
    count += 1
    if count % 5 == 0:
        print("alive", flush=True)
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "fleet_worker.py").write_text(WORKER)
    (folder / "fleet_rank.py").write_text(RANK)
    (folder / "fleet_meeting.py").write_text(MEETING)
    saved = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    head = Head({"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2] / "src")])})
    head.start()
    yield head
    head.kill()
    os.environ.clear()
    os.environ.update(saved)


def placer_of(head, tmp_path):
    return open_placer(EnginesTable(name="eu", placer="ray", address=head.address), tmp_path / "run", tmp_path)


JOB = FleetJob("eu-0", ("fleet_worker", "{folder}"), {"WORD": "secret"}, {"member.json": "{}"})


@pytest.mark.smoke
def test_a_job_survives_its_actor_and_its_driver_and_starts_again(head, tmp_path):
    placer = placer_of(head, tmp_path)
    placed = placer.start(JOB)
    wait_until(lambda: "secret {}" in lines(placed), 60)
    child, actor = placed.status["pid"], placed.status["actor"]
    assert lines(placed)[0] == "[]"  # none of Ray's variables, of which one is the token

    os.kill(child, signal.SIGKILL)  # its keeper starts it again
    wait_until(lambda: lines(placed).count("secret {}") == 2)
    wait_until(lambda: placed.status["pid"] not in (None, child))
    child = placed.status["pid"]

    os.kill(actor, signal.SIGKILL)  # Ray starts it again, and the child has seen nothing
    wait_until(lambda: placed.status.get("actor", actor) != actor and placed.status.get("pid"), 60)
    assert placed.status["pid"] == child
    assert placed.status["starts"] == 2

    placer.close()  # as when the controller is killed
    later = placer_of(head, tmp_path)
    again = later.start(JOB)
    wait_until(lambda: again.status.get("pid"), 60)
    assert again.status["pid"] == child
    again.stop(10)
    assert (again.exit_code, again.end()) == (0, "the eu-0 exited with code 0: drained")
    assert not Path(f"/proc/{child}").exists()

    third = later.start(FleetJob("eu-0", JOB.argv, {"WORD": "other"}, JOB.files))
    wait_until(lambda: "other {}" in lines(third), 60)
    third.stop(10)
    later.close()


@pytest.mark.smoke
def test_a_job_outlives_the_head_and_is_adopted_by_the_next(head, tmp_path):
    placer = placer_of(head, tmp_path)
    placed = placer.start(JOB)
    wait_until(lambda: placed.status.get("pid"), 60)
    child, keeper = placed.status["pid"], placed.status["keeper"]
    head.kill()
    time.sleep(3)
    assert Path(f"/proc/{child}").exists()
    assert placed.exit_code is None
    head.start()
    opened = placed.status["actor"]
    wait_until(lambda: placed.status["actor"] != opened, 90)
    assert (placed.status["pid"], placed.status["keeper"]) == (child, keeper)
    placed.stop(10)
    assert placed.exit_code == 0
    placer.close()


RANK = """
import json, os, sys, time
place = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
print(json.dumps(place), flush=True)
while not os.path.exists(sys.argv[1] + place["RANK"]):
    time.sleep(0.05)
sys.exit(open(sys.argv[1] + place["RANK"]).read() or 0)
"""


@pytest.mark.smoke
def test_ranks_are_placed_together_and_end_together(head, tmp_path):
    placer = open_placer(RanksTable(placer="ray", address=head.address), tmp_path / "run", tmp_path)
    group = placer.start_group(FleetJob("trainer", ("fleet_rank", f"{tmp_path}/end-")), 2)
    wait_until(lambda: len(group.ranks) == 2 and all(map(lines, group.ranks)), 60)
    places = [json.loads(lines(rank)[0]) for rank in group.ranks]
    assert [place["RANK"] for place in places] == ["0", "1"]
    assert {(p["WORLD_SIZE"], p["LOCAL_RANK"], p["MASTER_ADDR"]) for p in places} == {("2", "0", "127.0.0.1")}
    assert len({place["MASTER_PORT"] for place in places}) == 1
    pid = group.ranks[0].status["pid"]
    (tmp_path / "end-1").write_text("etude: the disk is full")
    assert group.ends(30)
    assert group.failure() == "the trainer-1 exited with code 1: the disk is full"
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    placer.close()


def test_a_wrong_token_is_refused_in_a_sentence(head, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    with pytest.raises(UserError, match="refuses the token: set RAY_AUTH_TOKEN to that of the cluster"):
        placer_of(head, tmp_path)


def test_a_cluster_without_tokens_is_refused(tmp_path, head):
    other = Head({"RAY_AUTH_MODE": "disabled"}, cpus=0)
    other.start()
    try:
        with pytest.raises(UserError, match="asks for no token, so whoever reaches it can run programs"):
            placer_of(other, tmp_path)
    finally:
        other.kill()


def test_a_log_is_fetched_from_the_cluster(head, tmp_path):
    placer = placer_of(head, tmp_path)
    placed = placer.start(JOB)
    wait_until(lambda: "secret {}" in lines(placed), 60)
    run = namespace(tmp_path / "run")
    assert "secret {}" in "".join(ray_log(head.address, run, "eu-0")).splitlines()
    with pytest.raises(UserError, match="has no process 'eu-9' of this run"):
        list(ray_log(head.address, run, "eu-9"))
    placed.stop(10)
    placer.close()


MEETING = """
import os, signal, sys, time
place, count = sys.argv[1], int(sys.argv[2])
def meet(*_):
    open(f"{place}/{os.getpid()}", "w").close()
    deadline = time.monotonic() + 30
    while len(os.listdir(place)) < count:
        if time.monotonic() > deadline:
            print("alone", flush=True)
            sys.exit(3)
        time.sleep(0.05)
    print("met", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, meet)
print("ready", flush=True)
while True:
    time.sleep(0.2)
"""


def test_jobs_are_stopped_at_the_same_time(head, tmp_path):
    """Each child ends only when all of them have been asked to."""
    (tmp_path / "met").mkdir()
    placer = placer_of(head, tmp_path)
    names = [f"eu-{number}" for number in range(3)]
    placed = [placer.start(FleetJob(n, ("fleet_meeting", f"{tmp_path}/met", "3"), cpus=0.5)) for n in names]
    for one in placed:
        wait_until(lambda one=one: "ready" in lines(one), 60)
    stop_all(placed, 30)
    assert [(one.exit_code, one.end()) for one in placed] == [(0, f"the {n} exited with code 0: met") for n in names]
    assert [lines(one) for one in placed] == [["ready", "met"]] * 3
    again = placer.start(FleetJob("eu-0", ("fleet_meeting", f"{tmp_path}/met", "3")))
    wait_until(
        lambda: lines(again)[2:] == ["ready", "met", "ready"], 60
    )  # the name is free; its node has the whole log
    again.stop(10)
    placer.close()


def test_a_job_without_room_says_so_and_leaves_nothing(head, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ray_jobs, "SMALL_REPORT_SECONDS", 1.0)
    placer = placer_of(head, tmp_path)
    large = placer.start(FleetJob("eu-0", JOB.argv, JOB.env, JOB.files, cpus=99, gpus=2))
    wait_until(lambda: large.waits)
    assert large.waits == (
        "the cluster of Ray has no room for eu-0, which needs 99 CPUs and 2 GPUs: all of it has 4 CPUs and 0 GPUs, "
        "less what others use"
    )
    assert f"etude: {large.waits}; it waits" in capsys.readouterr().err
    assert large.exit_code is None
    large.stop(1)
    assert large.exit_code == 0
    small = placer.start(JOB)  # the name is free
    wait_until(lambda: "secret {}" in lines(small), 60)
    assert small.waits == ""
    small.stop(10)
    placer.close()


def test_ranks_without_room_are_refused_while_others_run(head, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_jobs, "ROOM_SECONDS", 6.0)
    placer = placer_of(head, tmp_path)
    group = placer.start_group(FleetJob("trainer", ("fleet_rank", f"{tmp_path}/end-"), cpus=3), 2)
    other = placer.start(JOB)
    wait_until(lambda: "alive" in lines(other), 60)
    assert group.ends(60)
    assert group.exit_code == 2
    assert group.end() == (
        "the cluster of Ray had no room within 6 seconds for 2 ranks, which need 3 CPUs and 0 GPUs each, and have to "
        "be placed together: all of it has 4 CPUs and 0 GPUs"
    )
    other.stop(10)
    small = placer.start_group(FleetJob("trainer", ("fleet_rank", f"{tmp_path}/end-"), cpus=2), 2)
    wait_until(lambda: len(small.ranks) == 2 and all(map(lines, small.ranks)), 60)  # the place was given back
    small.stop(5)
    placer.close()


def test_ray_is_told_the_name_of_the_actor_alone():
    """Of the class nothing but Ray's own methods is pickled: the workers import it."""
    import ray
    from ray import cloudpickle

    from etude.fleet.ray_actor import JobActor

    text = cloudpickle.dumps(ray.remote(JobActor).__ray_metadata__.modified_class)
    assert b"etude.fleet.ray_actor" in text
    assert b"open_keeper" not in text
    assert b"LINGER_SECONDS" not in text


def test_a_head_that_is_not_there_is_refused_in_a_sentence(head, tmp_path):
    table = EnginesTable(name="eu", placer="ray", address="127.0.0.1:9")
    with pytest.raises(UserError, match=r"no head of Ray answers at 127\.0\.0\.1:9 "):
        open_placer(table, tmp_path / "run", tmp_path)


def test_a_machine_that_is_about_to_go_gets_no_new_child(head, tmp_path):
    """When it is gone, Ray starts the actor elsewhere; here it only comes back."""
    placer = placer_of(head, tmp_path)
    placed = placer.start(JOB)
    wait_until(lambda: "secret {}" in lines(placed), 60)
    os.kill(placed.status["keeper"], signal.SIGTERM)
    wait_until(lambda: placed.status.get("why") == "its machine is about to go", 60)
    wait_until(lambda: "drained" in lines(placed))
    assert placed.exit_code is None
    actor = placed.status["actor"]
    os.kill(actor, signal.SIGKILL)
    wait_until(lambda: placed.status.get("actor", actor) != actor and placed.status.get("pid"), 60)
    placed.stop(10)
    placer.close()
