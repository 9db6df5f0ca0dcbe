"""The trainer process on several ranks: versions, resumption by other meshes, kills, hangs.

Ranks are forks that run the trainer's program with the environment of torchrun.
"""

import json
import os
import shutil
import signal
import sys
import time

import msgspec
import pytest
import torch

from etude import runfolder
from etude.inference.engine.engine import Engine
from etude.ledger.ledger import Ledger
from etude.models.loading import load_model
from etude.store import open_store
from etude.trainer import checkpoint, world
from etude.trainer.rl import process
from etude.weights.content import load
from etude.weights.manifest import manifests
from tests.helpers import forked_ranks
from tests.helpers.trainer_runs import admit, answer, begin_probes, new_run, play

PROMPTS, STEPS, EVERY = 2, 5, 2
AXES = ("replicate", "shard", "expert", "context")


def program(folder, *versions):
    """The trainer's program."""
    sys.argv = ["process", folder, *versions]
    process.main()


def a_run(root, kind="qwen3", *, steps=STEPS, flat=(), **tables):
    """A run whose groups are ready from version 0 on; the members of those in `flat` have equal rewards."""
    rollout = {"prompts": PROMPTS, "group": 4, "tokens": 40, "context": 128, "staleness": 99}
    trainer = {"lr": 1e-4, "warmup_steps": 0, "steps": steps, "checkpoint_every": EVERY}
    weights = {"anchor_first": True, "anchor_versions": 2}
    trainer |= tables.pop("trainer", {})
    folder, config = new_run(root, kind, rollout=rollout, trainer=trainer, weights=weights, **tables)
    engine = Engine(load_model(config.model.path), version=0)
    for group in range(PROMPTS * steps):
        episodes = play(engine, group)
        if group in flat:
            episodes = [msgspec.structs.replace(e, reward=1.0) for e in episodes]
        admit(folder, config, group, 0, episodes)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("dense"))


def with_options(folder, mesh, **options):
    """Sets the mesh of a run and other options of its trainer; the number of ranks."""
    config = json.loads((folder / "config.json").read_text())
    config["trainer"] |= {"mesh": dict(zip(AXES, mesh, strict=True)), **options}
    (folder / "config.json").write_text(json.dumps(config))
    runfolder.config_changed(folder)
    replicate, shard, _, context = mesh
    return replicate * shard * context


def started(folder, mesh, *versions, failpoints=None, **options):
    """The ranks of a trainer; `failpoints` by rank."""
    count = with_options(folder, mesh, **options)
    ledger = Ledger.open(f"sqlite:///{folder}/ledger.db", "rl")
    ledger.recover(manifests(open_store(str(folder / "weights"))))  # as the controller does
    ledger.close()
    places = {rank: {"ETUDE_FAILPOINT": place} for rank, place in (failpoints or {}).items()}
    return forked_ranks.start(program, count, folder, str(folder), *versions, environments=places)


def trained(folder, mesh, *versions, **options):
    """The output of each rank of a trainer that ends well."""
    ranks = started(folder, mesh, *versions, **options)
    for rank in ranks:
        assert rank.end() == 0, rank.output[-3000:]
    return [rank.output for rank in ranks]


def copied(folder, root):
    shutil.copytree(folder, root / "run")
    return root / "run"


def whole_chain(folder, steps=STEPS):
    """The manifests of a run that has ended: no group is lost or consumed twice, each version has its digest."""
    store = open_store(str(folder / "weights"))
    chain = manifests(store)
    conservation = Ledger.open(f"sqlite:///{folder}/ledger.db").conservation(chain)
    assert conservation.ok, conservation.sentence
    assert [m.groups for m in chain] == [(), *((2 * v, 2 * v + 1) for v in range(steps))]
    load(store, steps)  # verifies the digest
    assert not list(store.list("shares"))
    return chain


@pytest.fixture(scope="module")
def alone(dense, tmp_path_factory):
    """The run of one process, and what it holds in the end."""
    folder = copied(dense, tmp_path_factory.mktemp("alone"))
    trained(folder, (1, 1, 1, 1))
    return folder


def far(one, two, version):
    """Elements that differ, and the largest difference in ulp."""
    a, b = (load(open_store(str(folder / "weights")), version)[1] for folder in (one, two))
    apart = torch.cat([(a[n].view(torch.int16).int() - b[n].view(torch.int16).int()).abs().flatten() for n in a])
    return int((apart > 0).sum()), len(apart), int(apart.max())


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh",
    [
        (1, 2, 1, 1),
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in [(1, 4, 1, 1), (1, 1, 1, 2), (1, 2, 1, 2), (2, 1, 1, 1), (2, 2, 1, 1)]
        ),
    ],
    ids=str,
)
def test_versions_are_those_of_one_process(dense, alone, tmp_path, mesh):
    """Two ranks add two numbers, in any order; of more, the order may move a rounding: one ulp on 1e-4 of the
    elements."""
    folder = copied(dense, tmp_path)
    trained(folder, mesh)
    chain, expected = whole_chain(folder), whole_chain(alone)
    for ours, theirs in zip(chain, expected, strict=True):
        if mesh == (1, 2, 1, 1):
            assert ours.digest == theirs.digest
        differ, count, ulp = far(alone, folder, ours.version)
        assert differ <= 1e-4 * count
        assert ulp <= 1
        assert ours.payload_bytes <= theirs.payload_bytes + 32 * len(ours.delta), "bytes of a version"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "rank 0 alone writes them"
    assert checkpoint.versions(folder / "checkpoints") == checkpoint.versions(alone / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh", "lr"), [("qwen3", (1, 4, 1, 1), 1e-2), ("moe", (1, 2, 2, 1), 1e-4)])
def test_the_same_ranks_publish_the_same_bits(tmp_path, kind, mesh, lr):
    """Also at a learning rate at which a rounding would grow from step to step, and where experts are divided."""
    ready = a_run(tmp_path, kind, trainer={"lr": lr})
    digests = []
    for name in "ab":
        (tmp_path / name).mkdir()
        folder = copied(ready, tmp_path / name)
        trained(folder, mesh)
        digests.append([m.digest for m in whole_chain(folder)])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == STEPS + 1


# --- resumption -------------------------------------------------------------------------------------------------------


def damage(folder, version, how):
    """Damages the newest file of a checkpoint of several ranks."""
    file = sorted((folder / f"checkpoints/step_{version}").glob("rank_*.safetensors"))[-1]
    assert file.name != "rank_0.safetensors"
    if how == "missing":
        return file.unlink()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    return file.write_bytes(data)


def killed(ranks, victim, place):
    """Waits for the end of ranks of which one is killed; the others say so in a sentence."""
    assert ranks[victim].end() == -signal.SIGKILL, f"never came to {place}: {ranks[victim].output[-2000:]}"
    for number, rank in enumerate(ranks):
        if number != victim:
            assert rank.end() == 1, rank.output[-2000:]
            assert f"rank {victim} has ended" in rank.output.splitlines()[-1], rank.output[-2000:]


@pytest.mark.slow
def test_other_ranks_resume_and_compute_steps_again(dense, alone, tmp_path):
    """Four ranks, two, one, two; the two find a damaged file of the four, and the last two a missing one of the two."""
    folder = copied(dense, tmp_path)
    killed(started(folder, (1, 4, 1, 1), failpoints={0: "trainer.consumed:4"}), 0, "version 3")
    assert 2 in checkpoint.versions(folder / "checkpoints")
    damage(folder, 2, "flipped")
    first, second = trained(folder, (1, 2, 1, 1), steps=4)
    notes = [line for line in first.splitlines() if line.startswith("note: ")]
    assert "does not have the digest of its manifest" in notes[0]
    assert "the run goes on from checkpoint 0, and computes versions 1 to 3 again" in notes[0]
    assert len(notes) <= 2, "bits of four ranks may come out otherwise on two"
    assert "note: " not in second, "rank 0 alone speaks"
    damage(folder, 4, "missing")
    (only,) = trained(folder, (1, 1, 1, 1), steps=4)
    assert "rank_1.safetensors is missing" in only
    first, second = trained(folder, (1, 2, 1, 1), "2", steps=STEPS)
    store = open_store(str(folder / "weights"))
    chain = manifests(store)
    assert [m.version for m in chain] == list(range(STEPS + 1))
    assert chain[5].digest == chain[2].digest, "back to version 2"
    assert chain[5].step.action == "rollback"
    for version in range(5):
        differ, count, ulp = far(alone, folder, version)
        assert differ <= 1e-4 * count
        assert ulp <= 1
    conservation = Ledger.open(f"sqlite:///{folder}/ledger.db").conservation(chain)
    assert conservation.ok, conservation.sentence


@pytest.mark.slow
def test_guards_act_on_all_ranks(tmp_path):
    """Two steps are skipped, one of them without any row, then the weights go back; one process does the same. An
    engine's answer to the probes is compared with the scores of all ranks."""
    guards = {"zero_variance": {"stop": 0.4, "action": "skip"}}
    ready = a_run(tmp_path, guards=guards, flat={2, 3, 4, 6}, trainer={"checkpoint_every": 1})
    begin_probes(ready)
    answer(ready, Engine(load_model(tmp_path / "model"), version=0))
    chains = []
    for name, mesh in (("one", (1, 1, 1, 1)), ("four", (1, 2, 1, 2))):
        (tmp_path / name).mkdir()
        folder = copied(ready, tmp_path / name)
        trained(folder, mesh)
        chains.append(whole_chain(folder))
    lines = [json.loads((tmp_path / n / "run/metrics.jsonl").read_text().splitlines()[0]) for n in ("one", "four")]
    assert lines[0]["probe/k2"] <= 1e-9
    assert lines[1]["probe/k2"] <= 1e-9
    for chain in chains:
        assert [m.step.action for m in chain[1:]] == ["go", "skip", "skip", "rollback", "go"]
        assert len({m.digest for m in chain[1:5]}) == 1 or chain[4].digest == chain[chain[4].step.good].digest
    differ, count, ulp = far(tmp_path / "one/run", tmp_path / "four/run", STEPS)
    assert differ <= 1e-4 * count
    assert ulp <= 1


# --- kills ------------------------------------------------------------------------------------------------------------

BOTH = [
    "trainer.stepped:2",
    "publisher.payload:2",
    "publisher.manifest:2",
    "trainer.published:2",
    "trainer.consumed:2",
    "trainer.repeated:1",
    "checkpoint.file:1",
    "publisher.anchor:1",
]
FIRST = ["publisher.part:2", "checkpoint.manifest:1", "checkpoint.complete:1"]
"""Places that rank 0 alone comes to: it completes checkpoints, and writes all objects of tensors of one chunk."""


def kill_and_end(ready, tmp_path, kills, alone):
    """Kills a rank of two at a place, again and again, then lets them end: as if nothing had been."""
    folder = copied(ready, tmp_path)
    for victim, place in kills:
        if place.startswith("trainer.repeated"):  # there must be something to compute again
            checkpoint.drop(folder / "checkpoints", checkpoint.versions(folder / "checkpoints")[1:])
        killed(started(folder, (1, 2, 1, 1), failpoints={victim: place}, collective_seconds=30.0), victim, place)
    outputs = trained(folder, (1, 2, 1, 1))
    assert "bit for bit" not in outputs[0]
    steps = len(manifests(open_store(str(alone / "weights")))) - 1
    assert [m.digest for m in whole_chain(folder, steps)] == [m.digest for m in whole_chain(alone, steps)]
    states = [checkpoint.load(run / "checkpoints", steps)[0] for run in (folder, alone)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.slow
@pytest.mark.smoke
def test_killed_ranks_go_on_as_if_nothing_had_been(dense, tmp_path):
    kills = [(0, "publisher.manifest:2"), (1, "trainer.consumed:2")]
    (tmp_path / "one").mkdir()
    undisturbed = copied(dense, tmp_path / "one")
    trained(undisturbed, (1, 2, 1, 1))
    kill_and_end(dense, tmp_path, kills, undisturbed)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A run of more steps, and its undisturbed end."""
    root = tmp_path_factory.mktemp("long")
    ready = a_run(root, steps=16)
    (root / "end").mkdir()
    end = copied(ready, root / "end")
    trained(end, (1, 2, 1, 1))
    return ready, end


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_everywhere(long, tmp_path, victim):
    ready, end = long
    places = BOTH + FIRST if victim == 0 else BOTH
    kill_and_end(ready, tmp_path, [(victim, place) for place in places], end)


# --- hangs ------------------------------------------------------------------------------------------------------------


def stops(folder, victim):
    """The program, in which a rank stops in its second step."""
    step, steps = process.train_step, []

    def train_step(*args, **options):
        steps.append(0)
        if len(steps) == 2 and os.environ["RANK"] == str(victim):
            os.kill(os.getpid(), signal.SIGSTOP)
        return step(*args, **options)

    process.train_step = train_step
    program(folder)


def comes_late(folder, victim):
    """The program, in which a rank never comes."""
    world._JOIN_SECONDS = 3.0
    if os.environ["RANK"] != str(victim):
        program(folder)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_hangs_is_named(dense, tmp_path, victim):
    folder = copied(dense, tmp_path)
    count = with_options(folder, (1, 2, 1, 1), collective_seconds=5.0)
    ranks = forked_ranks.start(stops, count, folder, str(folder), victim)
    try:
        wait_for(lambda: stopped(ranks[victim].process.pid))
        began = time.monotonic()
        assert ranks[1 - victim].end(60) == 1
        assert time.monotonic() - began < 30, "ten seconds, on an idle machine"
        assert f"etude: rank {victim} has ended or hangs" in ranks[1 - victim].output.splitlines()[-1]
    finally:
        ranks[victim].process.kill()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.slow
def test_a_rank_that_never_comes_is_missed(dense, tmp_path, victim):
    folder = copied(dense, tmp_path)
    count = with_options(folder, (1, 2, 1, 1), collective_seconds=3.0)
    ranks = forked_ranks.start(comes_late, count, folder, str(folder), victim)
    assert ranks[1 - victim].end(60) == 1
    assert f"etude: rank {1 - victim} did not meet the other 1 ranks" in ranks[1 - victim].output.splitlines()[-1]


def stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
