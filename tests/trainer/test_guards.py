"""Guards: each one trips, a healthy run is left alone, and what they do to a run is real."""

import numpy as np
import pytest
import torch

from etude.config import GuardsConfig, RLConfig
from etude.errors import RunFailed
from etude.inference.engine.engine import Engine
from etude.ledger.ledger import Ledger
from etude.models.loading import load_model, named_tensors
from etude.runfolder import read_jsonl
from etude.store import open_store
from etude.trainer import checkpoint
from etude.trainer.rl.guards import Canary, Guards
from etude.trainer.rl.process import Trainer
from etude.weights.manifest import manifests, newest
from etude.weights.receiver import Receiver, load
from tests.helpers.trainer_runs import admit, answer, canaries, edited, engine_of, new_run, play

HEALTHY = {
    "optim/grad_norm": 1.0,
    "mismatch/tokens": 5000.0,
    "mismatch/k2": 1e-4,
    "mismatch/p_ln2": 1e-4,
    "mismatch/p_dp": 1e-3,
    "mismatch/corr": 0.999,
    "mismatch/ess": 0.999,
    "loss/W_cut": 0.001,
    "off_policy/max": 1.0,
    "stale/kv_lag": 0.0,
    "drop/episodes/empty": 0.0,
    "rollout/episodes": 256.0,
    "rollout/groups": 16.0,
    "rollout/zero_variance": 4.0,
}


def steps(guards, count, first=0, **changes):
    """Judges and records `count` steps; returns the last verdict."""
    for version in range(first, first + count):
        metrics = HEALTHY | changes
        verdict = guards.judge(metrics)
        guards.record(metrics | guards.settle(version, verdict))
    return verdict


def test_a_healthy_run_is_left_alone():
    """200 steps whose norms and mismatch wander by a factor of 3."""
    guards, rng = Guards(GuardsConfig(), 1), np.random.default_rng(0)
    for version in range(200):
        wander = {"optim/grad_norm": rng.uniform(0.5, 1.5), "mismatch/k2": rng.uniform(5e-5, 1.5e-4)}
        metrics = HEALTHY | wander
        verdict = guards.judge(metrics)
        assert verdict.events == ()
        guards.record(metrics | guards.settle(version, verdict))
        assert guards.good == version


def test_a_broken_promise_of_equal_bits_is_a_warning():
    for exact, events in ((False, []), (True, ["parity"])):
        guards = Guards(GuardsConfig(), 0, exact=exact)
        metrics = HEALTHY | {"off_policy/max": 0.0, "mismatch/max_abs": 1e-7}
        assert [event.guard for event in guards.judge(metrics).events] == events
        assert guards.judge(metrics).trains
        assert guards.judge(metrics | {"mismatch/max_abs": 0.0}).events == ()


@pytest.mark.parametrize(
    ("guard", "change", "warns", "action"),
    [
        ("lag", {"off_policy/max": 2.0}, None, "halt"),
        ("kv_lag", None, {"stale/kv_lag": 2.0}, "go"),
        ("empty", None, {"drop/episodes/empty": 1.0}, "go"),
        ("mismatch_k2", {"mismatch/k2": 6e-3}, {"mismatch/k2": 6e-4}, "skip"),
        ("tail_ln2", {"mismatch/p_ln2": 0.02}, {"mismatch/p_ln2": 0.002}, "skip"),
        ("tail_dp", {"mismatch/p_dp": 0.06}, {"mismatch/p_dp": 0.006}, "skip"),
        ("correlation", {"mismatch/corr": 0.9}, {"mismatch/corr": 0.99}, "skip"),
        ("ess", {"mismatch/ess": 0.2}, {"mismatch/ess": 0.8}, "skip"),
        ("weight_cut", {"loss/W_cut": 0.3}, {"loss/W_cut": 0.05}, "skip"),
        ("grad_norm", {"optim/grad_norm": 60.0}, {"optim/grad_norm": 6.0}, "rollback"),
        ("zero_variance", {"rollout/zero_variance": 15.0}, {"rollout/zero_variance": 9.0}, "go"),
        ("non_finite", {"optim/grad_norm": float("nan")}, None, "skip"),
        ("routes_missing", {"router/missing": 0.01}, None, "skip"),
        ("routes_refused", {"router/refused": 0.2}, {"router/refused": 0.02}, "skip"),
        ("mismatch_growth", None, {"mismatch/k2": 1.1e-3, "mismatch/p_dp": 0.0}, "go"),
    ],
)
def test_a_guard_trips_at_its_thresholds(guard, change, warns, action):
    guards = Guards(GuardsConfig(), 1)
    steps(guards, 10)
    if warns is not None:
        verdict = guards.judge(HEALTHY | warns)
        assert guard in [event.guard for event in verdict.events]
        assert {event.level for event in verdict.events} == {"warn"}
        assert verdict.trains
    if change is not None:
        verdict = guards.judge(HEALTHY | change)
        assert (guard, "stop") in [(event.guard, event.level) for event in verdict.events]
        assert verdict.action == action
        assert all(event.sentence for event in verdict.events)


def canary(k2, engine="http://a:1", version=7):
    return Canary(engine, version, k2, max_abs=0.1)


def test_canaries_are_judged_against_the_first_ones():
    guards = Guards(GuardsConfig(baseline=20), 1)

    def events(k2):
        return [(e.level, e.action) for e in guards.judge(HEALTHY, [canary(1e-6), canary(k2, "http://b:2")]).events]

    # Before five are known, 5e-4 counts as usual; a healthy bfloat16 engine has 1e-4.
    assert [events(k2) for k2 in (1.4e-3, 1.6e-3, 6e-3)] == [[], [("warn", "go")], [("stop", "skip")]]
    steps(guards, 4, **{"canary/k2": 1e-4})
    assert events(1.4e-3) == []
    steps(guards, 1, 4, **{"canary/k2": 1e-4})
    assert [events(k2) for k2 in (2.9e-4, 3.1e-4, 1.1e-3)] == [[], [("warn", "go")], [("stop", "skip")]]
    steps(guards, 14, 5, **{"canary/k2": 1e-4})
    steps(guards, 30, 19, **{"canary/k2": 1e-2})
    assert events(3.1e-4) == [("warn", "go")], "the yardstick is that of the first twenty"
    (event,) = guards.judge(HEALTHY, [canary(3.1e-4, "http://b:2")]).events
    assert event.sentence.startswith("the engine at http://b:2 scores the canaries of version 7 otherwise")
    still = Guards(GuardsConfig(), 1)
    steps(still, 10, **{"canary/k2": 1e-12})
    assert still.judge(HEALTHY, [canary(1.4e-4)]).events == (), "below the floor all growth is that of rounding"
    both = still.judge(HEALTHY, [canary(1.0, "http://a:1", 6), canary(1.0, "http://b:2", 7)])
    assert [("http://a:1" in e.sentence, "version 6" in e.sentence) for e in both.events] == [
        (True, True),
        (False, False),
    ]


def test_skips_lead_to_a_rollback_and_rollbacks_to_a_halt():
    guards = Guards(GuardsConfig(rollback_after=3, halt_after=2), 1)
    steps(guards, 5)
    assert guards.good == 4
    bad = {"mismatch/k2": 1.0}
    actions = [steps(guards, 1, 5 + i, **bad).action for i in range(7)]
    assert actions == ["skip", "skip", "rollback", "skip", "skip", "rollback", "skip"]
    assert steps(guards, 1, 12, **bad).action == "skip"
    assert steps(guards, 1, 13, **bad).action == "halt"
    assert guards.good == 4
    again = Guards(GuardsConfig(rollback_after=3, halt_after=2), 1)
    steps(again, 3, 0, **bad)
    assert steps(again, 1, 3).trains, "a good step begins the count anew"
    assert steps(again, 1, 4, **bad).action == "skip"


def test_few_tokens_are_not_judged_and_acting_can_be_turned_off():
    bad = {"mismatch/k2": 1.0, "mismatch/tokens": 10.0}
    assert Guards(GuardsConfig(), 1).judge(HEALTHY | bad).events == ()
    verdict = Guards(GuardsConfig(act=False), 1).judge(HEALTHY | bad | {"mismatch/tokens": 1e4})
    assert verdict.trains
    assert [event.action for event in verdict.events] == ["skip"]


def test_a_resumed_run_judges_as_an_uninterrupted_one():
    whole, history = Guards(GuardsConfig(), 1), []
    for version in range(12):
        metrics = HEALTHY | ({"mismatch/k2": 1.0} if version in (7, 10) else {"optim/grad_norm": 1.0 + version})
        metrics |= whole.settle(version, whole.judge(metrics))
        whole.record(metrics)
        history.append(metrics)
    resumed = Guards(GuardsConfig(), 1, history)
    assert vars(resumed) == vars(whole)
    assert resumed.good == 11


def test_one_threshold_alone_leaves_the_others():
    values = {"tasks": {"repository": "x"}, "guards": {"mismatch_k2": {"stop": 0.1}, "grad_norm": {"action": "halt"}}}
    guards = RLConfig.model_validate(values).guards
    assert (guards.mismatch_k2.warn, guards.mismatch_k2.stop) == (5e-4, 0.1)
    assert (guards.grad_norm.warn, guards.grad_norm.stop, guards.grad_norm.action) == (5.0, 50.0, "halt")


@pytest.fixture
def run(tmp_path):
    return new_run(
        tmp_path,
        guards={"min_tokens": 16, "mismatch_k2": {"stop": 0.01, "action": "rollback"}, "zero_variance": {"stop": 2.0}},
        trainer={"lr": 3e-3, "warmup_steps": 0, "keep_checkpoints": 2},
    )


def one_step(trainer, run, config, *, shift=0.0):
    """Plays a group with the newest version and trains on it; `shift` falsifies what the engine recorded."""
    last = newest(open_store(str(run / "weights")))
    engine = engine_of(config, load(open_store(str(run / "weights")), last.version)[1], last.version)
    episodes = play(engine, last.version)
    if shift:
        episodes = [
            edited(e, logprobs=(e.segments[0].arrays()[2] - np.float32(shift) * e.segments[0].arrays()[1]))
            for e in episodes
        ]
    admit(run, config, last.version, last.version, episodes)
    trainer.step(trainer.ledger.ready_groups(1, in_order=True), 0.0, 0.0, 0.0)
    trainer.settle(wait=True)


def test_a_rollback_restores_weights_and_optimizer_and_trains_no_group_twice(run, capsys):
    folder, config = run
    trainer = Trainer(folder)
    store = open_store(str(folder / "weights"))
    one_step(trainer, folder, config)
    one_step(trainer, folder, config)
    good = checkpoint.load(folder / "checkpoints", 1)  # kept, though only the newest two are asked for
    one_step(trainer, folder, config, shift=1.0)
    digests = [m.digest for m in manifests(store)]
    assert digests[3] == digests[1] != digests[2]
    state = trainer.optimizer.state()
    assert all(torch.equal(state[name], good[name]) for name in good)
    assert newest(store).metrics["guard/good"] == 1.0
    assert "version 3 is that of 1 again" in capsys.readouterr().err
    one_step(trainer, folder, config)
    one_step(trainer, folder, config)
    assert trainer.guards.good == 4
    found = Ledger.open(f"sqlite:///{folder}/ledger.db").conservation(manifests(store))
    assert found.ok, found.sentence
    assert [m.groups for m in manifests(store)] == [(), (0,), (1,), (2,), (3,), (4,)]
    resumed = Trainer(folder)
    assert vars(resumed.guards) == vars(trainer.guards)


def test_a_skipped_step_publishes_the_same_weights_and_a_halted_one_nothing(tmp_path):
    folder, config = new_run(tmp_path, guards={"min_tokens": 16, "rollback_after": 2, "halt_after": 1})
    trainer = Trainer(folder)
    store = open_store(str(folder / "weights"))
    one_step(trainer, folder, config)
    before = {name: t.clone() for name, t in trainer.optimizer.state().items()}
    one_step(trainer, folder, config, shift=1.0)
    digests = [m.digest for m in manifests(store)]
    assert digests[2] == digests[1]
    assert all(torch.equal(t, before[name]) for name, t in trainer.optimizer.state().items())
    one_step(trainer, folder, config, shift=1.0)  # a rollback
    one_step(trainer, folder, config, shift=1.0)
    with pytest.raises(RunFailed, match=r"halted before version 5: .*k2 0\.5"):
        one_step(trainer, folder, config, shift=1.0)
    assert newest(store).version == 4
    ledger = Ledger.open(f"sqlite:///{folder}/ledger.db")
    assert [g.id for g in ledger.ready_groups(1, in_order=True)] == [4], "the group of the halted step waits"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_guards_are_silent_on_two_hundred_steps_of_a_healthy_run(tmp_path, dtype):
    """A run in one process: an engine that follows the published versions samples, answers the canaries and computes in
    `dtype`, as the trainer does."""
    folder, config = new_run(
        tmp_path,
        guards={"min_tokens": 64},
        rollout={"prompts": 1, "group": 8, "tokens": 12, "context": 128},
        trainer={"lr": 3e-4, "warmup_steps": 0, "dtype": dtype, "steps": 200},
        inference={"dtype": dtype},
    )
    canaries(folder, count=2, tokens=32)
    trainer = Trainer(folder)
    store = open_store(str(folder / "weights"))
    model = load_model(config.model.path, dtype=getattr(torch, dtype))
    engine = Engine(model, version=-1)
    receiver = Receiver(store, named_tensors(model))
    for version in range(200):
        update = receiver.poll()
        update.apply()
        engine.version = receiver.version
        assert engine.version == version
        answer(folder, engine)
        admit(folder, config, version, version, play(engine, version, 8, tokens=12))
        trainer.step(trainer.ledger.ready_groups(1, in_order=True), 0.0, 0.0, 0.0)
        trainer.settle(wait=True)
    lines = read_jsonl(folder / "metrics.jsonl")
    assert len(lines) == 200
    assert newest(store).digest != manifests(store)[0].digest, "nothing was learned: the silence is void"
    assert all(line["mismatch/tokens"] >= 64 and line["canary/k2"] >= 0 for line in lines), "all of it was judged"
    loud = {line["step"]: line["guard/events"] for line in lines if "guard/events" in line}
    assert loud == {}
