"""Whole runs: every process is real; the model is the bundled one and the tasks are a library of four functions."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from etude.models.loading import model_id
from etude.protocol.access import TOKEN_VARIABLE
from etude.records import Episode, decode
from etude.store import open_store
from etude.weights.manifest import manifests, newest_manifest

ROOT = Path(__file__).parents[2]
SECONDS = 240

CONFIG = f"""
stage = "rl"
name = "run"
deterministic = true

[model]
path = "{ROOT / "models/nano"}"

[tasks]
repository = "unused"
dataset = "{ROOT / "tests/tasks/data/tiny"}"

[rollout]
prompts = 2
group = 3
staleness = 0
max_in_flight = 6
turns = 2
tokens = 48
context = 512

[trainer]
steps = 3
lr = 1e-3

[eval]
before = false
after = false
"""


def etude(folder: Path, *arguments: str, failpoint: str | None = None) -> subprocess.Popen[str]:
    env = {**os.environ, "TERM": "dumb"} | ({"ETUDE_FAILPOINT": failpoint} if failpoint else {})
    return subprocess.Popen(
        [sys.executable, "-m", "etude.cli.main", *arguments],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def start(folder: Path, *arguments: str, config: str = CONFIG, failpoint: str | None = None) -> subprocess.Popen[str]:
    (folder / "run.toml").write_text(config)
    return etude(folder, "train", "run.toml", *arguments, failpoint=failpoint)


def versions(folder: Path) -> list[tuple[int, str, int]]:
    """(version, digest of the tensors, groups trained on) of every published version."""
    published = manifests(open_store(str(folder / "outputs/run/weights")))
    return [(m.version, m.digest, len(m.groups)) for m in published]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that nothing disturbs, to compare with."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = finished(start(folder))
    assert code == 0, output
    assert output.splitlines()[-1] == "Serve it: etude serve outputs/run"
    assert "of the groups teach nothing" in output, "rewards of two turns hardly differ"
    return folder


@pytest.mark.slow
@pytest.mark.smoke
def test_a_run_trains_and_leaves_a_whole_folder(undisturbed):
    run = undisturbed / "outputs/run"
    published = versions(undisturbed)
    assert [(v, g) for v, _, g in published] == [(0, 0), (1, 2), (2, 2), (3, 2)]
    assert newest_manifest(open_store(str(run / "weights"))).model == model_id(ROOT / "models/nano")
    assert len({digest for _, digest, _ in published}) > 1, "no step changed the weights: the comparisons are void"
    held = json.loads((run / "memory.jsonl").read_text().splitlines()[0])
    assert {"controller", "inference-0", "trainer", "zygote"} == {
        name.removeprefix("memory/") for name in held if name.startswith("memory/")
    }
    assert all(1e6 < held[name] < 4e9 for name in held if name.startswith("memory/")), held
    report = json.loads((run / "report.json").read_text())
    assert report["steps"] == 3
    assert report["episodes"]["scored"] == 18
    assert all(report["checks"].values()), report["checks"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["off_policy/max"] == 0 for line in lines), "staleness 0 is on-policy"
    assert "<html" in (run / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.smoke
def test_episodes_keep_their_tokens(undisturbed):
    store = open_store(str(undisturbed / "outputs/run/rollouts"))
    episodes = [decode(store.get(key), Episode) for key in store.list()]
    assert len(episodes) == 18
    for episode in episodes:
        for segment in episode.segments:
            ids_T, mask_T, logprobs_T, versions_T = segment.arrays()
            assert len(ids_T) == len(mask_T) == len(logprobs_T) == len(versions_T)
            assert (logprobs_T[mask_T == 1] <= 0).all()
            assert (versions_T[mask_T == 0] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failpoint", "every"),
    [
        ("trainer.stepped:2", 1),
        ("checkpoint.complete:2", 1),
        ("publisher.payload:2", 1),
        ("publisher.manifest:2", 2),
        ("trainer.published:3", 4),
        ("trainer.consumed:3", 4),
        ("controller.finished:8", 1),
    ],
)
def test_a_killed_and_resumed_run_ends_with_the_weights_of_an_undisturbed_one(undisturbed, tmp_path, failpoint, every):
    """`every`: versions between two checkpoints, of which a resume computes those since again."""
    config = CONFIG.replace("[trainer]\n", f"[trainer]\ncheckpoint_every = {every}\n")
    code, output = finished(start(tmp_path, config=config, failpoint=failpoint))
    assert code != 0, output
    if not failpoint.startswith("controller"):
        assert "the trainer was killed by SIGKILL" in output
        assert "Traceback" not in output
    code, output = finished(etude(tmp_path, "train", "run.toml", "--resume"))
    assert code == 0, output
    assert versions(tmp_path) == versions(undisturbed)
    report = json.loads((tmp_path / "outputs/run/report.json").read_text())
    assert report["checks"]["ledger_conserved"]
    lines = [json.loads(line) for line in (tmp_path / "outputs/run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3], "none is lost or there twice"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param("etude.inference.server.server", marks=pytest.mark.smoke), "zygote"])
def test_a_run_survives_the_death_of_an_engine_or_the_zygote(undisturbed, tmp_path, victim):
    process = start(tmp_path)
    metrics = tmp_path / "outputs/run/metrics.jsonl"
    deadline = time.monotonic() + SECONDS
    while not metrics.exists():  # the first step is done: episodes of the second are being played
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.kill(descendant(process.pid, victim), signal.SIGKILL)
    code, output = finished(process)
    if code != 0:
        assert "Traceback" not in output
        code, output = finished(etude(tmp_path, "train", "run.toml", "--resume"))
    assert code == 0, output
    assert versions(tmp_path) == versions(undisturbed)


@pytest.mark.slow
def test_a_controller_that_is_killed_while_its_children_import_leaves_none(undisturbed, tmp_path):
    """And the run goes on: nothing of the killed attempts trains beside it."""
    for attempt in (1, 2):
        process = start(tmp_path) if attempt == 1 else etude(tmp_path, "train", "run.toml", "--resume")
        deadline = time.monotonic() + SECONDS
        # The inference server starts first; the trainer when the server is ready.
        name = "etude.inference.server.server" if attempt == 1 else "etude.trainer.rl.process"
        while (pid := find(process.pid, name)) is None:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        below = [os.pidfd_open(child) for child in (pid, find(process.pid, "zygote")) if child is not None]
        time.sleep(0.2)
        process.kill()
        process.communicate()
        for child in below:
            assert select.select([child], [], [], 20)[0], f"{name} outlived its controller"
            os.close(child)
    code, output = finished(etude(tmp_path, "train", "run.toml", "--resume"))
    assert code == 0, output
    assert versions(tmp_path) == versions(undisturbed)


@pytest.mark.slow
def test_a_run_that_has_ended_is_trained_on_only_if_it_was_changed(undisturbed, tmp_path):
    """As it is, its report stays. With more steps, what was measured before is measured again."""
    shutil.copytree(undisturbed, tmp_path, symlinks=True, dirs_exist_ok=True)
    run = tmp_path / "outputs/run"
    report = (run / "report.json").read_bytes()
    code, output = finished(etude(tmp_path, "train", "--resume", "outputs/run"))
    assert code == 0, output
    assert "outputs/run has ended with version 3: raise trainer.steps or trainer.minutes" in output
    assert (run / "report.json").read_bytes() == report
    values = json.loads((run / "config.json").read_text())
    for steps in (3, 4):
        values["eval"] |= {"after": True, "samples": 1, "max_tasks": 2}
        values["trainer"]["steps"] = steps
        (run / "config.json").write_text(json.dumps(values))
        code, output = finished(etude(tmp_path, "train", "--resume", "outputs/run"))
        assert code == 0, output
        assert json.loads((run / "eval-after.json").read_bytes())["version"] == steps
        again = json.loads((run / "report.json").read_text())
        assert (again["steps"], again["best"], len(versions(tmp_path))) == (steps, steps, steps + 1)


@pytest.mark.slow
def test_two_servers_share_the_episodes_of_a_run_that_replays_their_experts(tmp_path, monkeypatch):
    asynchronous = CONFIG.replace("deterministic = true", "").replace("staleness = 0", "staleness = 1")
    overrides = ["--inference.servers", "2", "--trainer.steps", "4", "--trainer.router_replay", "true"]
    monkeypatch.setenv(TOKEN_VARIABLE, "of-the-test")  # engines answer in full to those who may ask
    process = start(tmp_path, *overrides, config=asynchronous)
    logs = tmp_path / "outputs/run/logs/latest"
    deadline = time.monotonic() + SECONDS
    idle, headers = {0, 1}, {"Authorization": "Bearer of-the-test"}
    while idle:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        for number in sorted(idle):
            ready = logs / f"inference-{number}.json"
            if ready.exists():
                health = httpx2.get(
                    f"{json.loads(ready.read_text())['url']}/health", timeout=SECONDS, headers=headers
                ).json()
                assert health["configuration"]["speculate"]
                idle -= {number} if health["generated_tokens"] else set()
        time.sleep(0.05)
    code, output = finished(process)
    assert code == 0, output
    report = json.loads((tmp_path / "outputs/run/report.json").read_text())
    assert report["steps"] == 4
    assert all(report["checks"].values()), report["checks"]
    lines = [json.loads(line) for line in (tmp_path / "outputs/run/metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "router/missing" in line]
    assert trained, "no step trained on anything: the comparison is void"
    assert all(line["router/missing"] == 0 and line["router/refused"] < 0.01 for line in trained)


@pytest.mark.slow
def test_versions_at_a_learning_rate_of_zero_are_one(tmp_path):
    """G10: nothing on the way from the trainer to an engine changes a bit, and the two do not drift apart."""
    asynchronous = CONFIG.replace("deterministic = true", "").replace("staleness = 0", "staleness = 1")
    # A version that is replaced before its probes are decoded is not measured: enough versions that some always are.
    overrides = ["--trainer.lr", "0", "--trainer.steps", "10", "--inference.servers", "2", "--rollout.prompts", "8"]
    code, output = finished(start(tmp_path, *overrides, config=asynchronous))
    assert code == 0, output
    assert "guard" not in output
    published = versions(tmp_path)
    assert len(published) == 11
    assert len({digest for _, digest, _ in published}) == 1
    report = json.loads((tmp_path / "outputs/run/report.json").read_text())
    assert all(report["checks"].values()), report["checks"]
    lines = [json.loads(line) for line in (tmp_path / "outputs/run/metrics.jsonl").read_text().splitlines()]
    answers = [a for line in lines for a in line.get("probe/answers", [])]
    assert len({a["engine"] for a in answers}) == 2
    assert len({a["version"] for a in answers}) >= 3, "too few versions were measured: the comparison is void"
    # One pass of the same sequences with the same weights: at most rounding of float32 between two ways to compute it,
    # and where both take PyTorch's kernel for long runs of tokens not even that. Other weights are seen in test_probes.
    # Rounding depends on what an engine decodes beside the probes: k2 was 1.17e-11 to 1.29e-11 in six runs.
    assert max(a["k2"] for a in answers) < 1e-9
    assert max(a["k2"] for a in answers) <= 1.25 * min(a["k2"] for a in answers)


@pytest.mark.slow
def test_a_run_with_documents_trains_on_what_its_engine_computed(tmp_path):
    """Deterministic: not one bit of a log-probability differs. Rewards differ at least by the cost of length."""
    overrides = ["--rollout.documents", "true", "--rollout.context", "1024", "--reward.length.weight", "0.1"]
    code, output = finished(start(tmp_path, *overrides))
    assert code == 0, output
    run = tmp_path / "outputs/run"
    store = open_store(str(run / "rollouts"))
    episodes = [decode(store.get(key), Episode) for key in store.list()]
    assert len(episodes) == 18
    assert all(len(s.documents) >= 2 for e in episodes for s in e.segments)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "mismatch/max_abs" in line]
    assert trained, "no step trained on anything: the comparison is void"
    assert all(line["mismatch/max_abs"] == 0.0 for line in trained)
    cached = sum(line["rollout/cached_document_tokens"] for line in lines)
    assert cached > 0.5 * sum(line["rollout/document_tokens"] for line in lines)
    assert all(json.loads((run / "report.json").read_text())["checks"].values())


@pytest.mark.slow
def test_a_run_finds_how_many_episodes_keep_its_engine_full(tmp_path):
    config = CONFIG.replace("deterministic = true", "").replace("staleness = 0", "staleness = 2")
    config = config.replace("max_in_flight = 6", 'max_in_flight = "auto"')
    code, output = finished(start(tmp_path, "--inference.max_batch", "4", "--trainer.steps", "6", config=config))
    assert code == 0, output
    report = json.loads((tmp_path / "outputs/run/report.json").read_text())
    assert all(report["checks"].values()), report["checks"]
    assert report["trained"] == report["generated"]
    assert report["trained"]["episodes"] == 6 * 2 * 3
    lines = [json.loads(line) for line in (tmp_path / "outputs/run/metrics.jsonl").read_text().splitlines()]
    assert max(line["off_policy/max"] for line in lines) <= 2
    assert lines[-1]["left/episodes"] == 0


@pytest.mark.slow
def test_a_trainer_that_hangs_is_named_and_the_run_can_be_resumed(undisturbed, tmp_path):
    process = start(tmp_path, "--rollout.stall_seconds", "6")
    metrics = tmp_path / "outputs/run/metrics.jsonl"
    deadline = time.monotonic() + SECONDS
    while not metrics.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.kill(descendant(process.pid, "etude.trainer.rl.process"), signal.SIGSTOP)
    code, output = finished(process)
    assert code == 1, output
    assert "Traceback" not in output
    said = [line for line in output.splitlines() if "no progress for" in line]
    assert [line.startswith("etude: ") for line in said[-2:]] == [False, True], "first a sentence, then the end"
    assert all("everything waits for the trainer, which has its 2 groups" in line for line in said[-2:])
    saved = tmp_path / "outputs/run/config.json"
    values = json.loads(saved.read_text())
    assert values["rollout"]["stall_seconds"] == 6
    values["rollout"]["stall_seconds"] = 300  # starting again may take longer
    saved.write_text(json.dumps(values))
    code, output = finished(etude(tmp_path, "train", "outputs/run", "--resume"))
    assert code == 0, output
    assert versions(tmp_path) == versions(undisturbed)


def descendant(pid: int, name: str) -> int:
    """The first process below `pid` whose command line holds `name`."""
    found = find(pid, name)
    assert found is not None, f"no {name} below {pid}"
    return found


def find(pid: int, name: str) -> int | None:
    """As `descendant`; None if there is none."""
    queue = [pid]
    while queue:
        with suppress(OSError):  # it has ended meanwhile
            for task in Path(f"/proc/{queue.pop(0)}/task").iterdir():
                for child in map(int, (task / "children").read_text().split()):
                    if name in Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "):
                        return child
                    queue.append(child)
    return None


# what a user may get wrong


def refused(folder: Path, *arguments: str, config: str = CONFIG) -> str:
    code, output = finished(start(folder, *arguments, config=config))
    assert code == 2, output
    assert output.startswith("etude: ")
    assert output.count("\n") == 1, output
    return output


def test_an_unknown_key(tmp_path):
    assert "unknown key rollout.gruop" in refused(tmp_path, "--rollout.gruop", "4")
    assert not (tmp_path / "outputs").exists()


def test_a_missing_model(tmp_path):
    assert "nowhere" in refused(tmp_path, "--model.path", "nowhere")
    assert not (tmp_path / "outputs").exists()


def test_tasks_that_cannot_be(tmp_path):
    assert "not be above max_lines" in refused(tmp_path, "--tasks.min_lines", "9", "--tasks.max_lines", "8")
    assert not (tmp_path / "outputs").exists()


def test_documents_that_the_engine_could_not_hold(tmp_path):
    said = refused(tmp_path, "--rollout.documents", "true", "--inference.documents_mb", "1")
    assert "of up to rollout.context = 512 tokens need" in said
    assert not (tmp_path / "outputs").exists()


def test_a_run_whose_tasks_cannot_be_made_leaves_nothing(tmp_path):
    """So that the mended configuration can have its name."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/lib.py").write_text("def one():\n    return 1\n")
    config = CONFIG.replace(f'dataset = "{ROOT / "tests/tasks/data/tiny"}"', "").replace("unused", "lib")
    code, output = finished(start(tmp_path, config=config))
    assert code == 2
    assert "lib has no test modules" in output.splitlines()[-1]
    assert list((tmp_path / "outputs").iterdir()) == []


def test_a_repository_that_is_not_there(tmp_path):
    config = CONFIG.replace(f'dataset = "{ROOT / "tests/tasks/data/tiny"}"', "").replace("unused", "nowhere")
    assert "nowhere is not a folder" in refused(tmp_path, config=config)
    assert not (tmp_path / "outputs").exists()


def test_a_model_folder_with_a_corrupt_shard(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for file in (ROOT / "models/nano").iterdir():
        if file.is_file():
            (model / file.name).write_bytes(file.read_bytes())
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "model.safetensors" in refused(tmp_path, "--model.path", str(model))
    assert not (tmp_path / "outputs").exists()


def test_a_run_that_exists(tmp_path):
    (tmp_path / "outputs/run").mkdir(parents=True)
    assert "already holds a run" in refused(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "etude-test", str(disk)], check=True)
    try:
        code, output = finished(start(disk))
        assert code == 2, output
        assert "Traceback" not in output
        assert "No space left" in output.splitlines()[-1]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_resuming_what_never_ran(tmp_path):
    assert "outputs/run holds no run yet; start it without --resume" in refused(tmp_path, "--resume")


@pytest.mark.slow
def test_detectors_stay_silent_beside_a_model_that_cannot_cheat(tmp_path):
    """Real episodes of the bundled model: decoys in every box, and as many impossible tasks as may be played."""
    config = (
        CONFIG.replace("deterministic = true\n", "").replace("max_in_flight = 6", "max_in_flight = 12")
        + """
[cheats]
decoys = 1.0
impossible = 0.5
window = 3
"""
    )
    code, output = finished(start(tmp_path, config=config))
    assert code == 0, output
    run = tmp_path / "outputs/run"
    report = json.loads((run / "report.json").read_text())
    figures = report["cheating"]
    assert figures["violations"] == figures["rewarded"] == 0, figures["flagged"]
    assert figures["impossible"]["played"] >= 1, "one is due after every second episode"
    assert figures["impossible"]["passed"] == figures["impossible"]["tampered"] == 0
    assert 0 < figures["impossible_bound"] < 1
    assert report["episodes"]["scored"] == 18, "impossible tasks are no part of the groups"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["flag/charged"] == 0 for line in lines)
    assert "impossible/played" in lines[-1]
    assert sum(m[2] for m in versions(tmp_path)) == 6, "no version was trained on an impossible task"
    assert "Cheat detection" in (run / "report.html").read_text()
