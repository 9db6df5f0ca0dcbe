"""Guards: each one trips, a healthy run is left alone, and what they do to a run is real."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from etude.config import GuardsConfig, RLConfig
from etude.errors import RunFailed
from etude.inference.engine.engine import Engine
from etude.ledger.ledger import Ledger
from etude.models.loading import load_model, named_tensors
from etude.rollout.drift import BehaviourDrift
from etude.runfolder import read_jsonl
from etude.store import open_store
from etude.trainer import checkpoint
from etude.trainer.rl import process
from etude.trainer.rl.figures import StepSums
from etude.trainer.rl.guards import Guards, ProbeComparison, StepFigures
from etude.trainer.rl.mismatch import Mismatch, MismatchMeans
from etude.trainer.rl.process import Trainer
from etude.weights.content import load
from etude.weights.manifest import manifests, newest_manifest
from etude.weights.receiver import Receiver
from tests.helpers import trainer_runs
from tests.helpers.trainer_runs import admit, answer, begin_probes, edited, engine_of, new_run, play, step

MISMATCH = MismatchMeans(
    tokens=5000.0, k1=0.0, k2=1e-4, k3=1e-4, k3_clip=1e-4, p_ln2=1e-4, p_dp=1e-3, max_abs=0.1, ess=0.999, chi2=0.0,
    k2_lowp=None, corr=0.999,
)  # fmt: skip
HEALTHY = StepFigures(
    grad_norm=1.0, mismatch=MISMATCH, weight_cut=0.001, lag=1.0, kv_lag=0.0, empty=0.0, zero_variance=0.25
)


def figures(**changes):
    """Healthy ones with these changes, of the figures or of the mismatch."""
    inner = {name: changes.pop(name) for name in changes.keys() & vars(MISMATCH).keys()}
    return replace(HEALTHY, mismatch=replace(MISMATCH, **inner), **changes)


def steps(guards, count, first=0, probe_k2=None, **changes):
    """Judges and remembers `count` steps; returns the last verdict. `probe_k2` is remembered only."""
    seen = [] if probe_k2 is None else [probe(probe_k2)]
    for version in range(first, first + count):
        verdict = guards.judge(figures(**changes))
        guards.remember(guards.record(version, verdict, figures(**changes), seen))
    return verdict


def test_a_healthy_run_is_left_alone():
    """200 steps whose norms and mismatch wander by a factor of 3."""
    guards, rng = Guards(GuardsConfig(), 1), np.random.default_rng(0)
    for version in range(200):
        measured = figures(grad_norm=rng.uniform(0.5, 1.5), k2=rng.uniform(5e-5, 1.5e-4))
        verdict = guards.judge(measured)
        assert verdict.events == ()
        guards.remember(guards.record(version, verdict, measured))
        assert guards.good == version


def test_a_broken_promise_of_equal_bits_is_a_warning():
    for exact, events in ((False, []), (True, ["numerics"])):
        guards = Guards(GuardsConfig(), 0, exact=exact)
        measured = figures(lag=0.0, max_abs=1e-7)
        assert [event.guard for event in guards.judge(measured).events] == events
        assert guards.judge(measured).trains
        assert guards.judge(figures(lag=0.0, max_abs=0.0)).events == ()


@pytest.mark.parametrize(
    ("guard", "change", "warns", "action"),
    [
        ("lag", {"lag": 2.0}, None, "halt"),
        ("kv_lag", None, {"kv_lag": 2.0}, "go"),
        ("empty", None, {"empty": 1 / 256}, "go"),
        ("mismatch_k2", {"k2": 6e-3}, {"k2": 6e-4}, "skip"),
        ("tail_ln2", {"p_ln2": 0.02}, {"p_ln2": 0.002}, "skip"),
        ("tail_dp", {"p_dp": 0.06}, {"p_dp": 0.006}, "skip"),
        ("correlation", {"corr": 0.9}, {"corr": 0.99}, "skip"),
        ("ess", {"ess": 0.2}, {"ess": 0.8}, "skip"),
        ("weight_cut", {"weight_cut": 0.3}, {"weight_cut": 0.05}, "skip"),
        ("grad_norm", {"grad_norm": 60.0}, {"grad_norm": 6.0}, "rollback"),
        ("zero_variance", {"zero_variance": 15 / 16}, {"zero_variance": 9 / 16}, "go"),
        ("non_finite", {"grad_norm": float("nan")}, None, "skip"),
        ("routes_missing", {"routes_missing": 0.01}, None, "skip"),
        ("routes_refused", {"routes_refused": 0.2}, {"routes_refused": 0.02}, "skip"),
        ("mismatch_growth", None, {"k2": 1.1e-3, "p_dp": 0.0}, "go"),
    ],
)
def test_a_guard_trips_at_its_thresholds(guard, change, warns, action):
    guards = Guards(GuardsConfig(), 1)
    steps(guards, 10)
    if warns is not None:
        verdict = guards.judge(figures(**warns))
        assert guard in [event.guard for event in verdict.events]
        assert {event.level for event in verdict.events} == {"warn"}
        assert verdict.trains
    if change is not None:
        verdict = guards.judge(figures(**change))
        assert (guard, "stop") in [(event.guard, event.level) for event in verdict.events]
        assert verdict.action == action
        assert all(event.sentence for event in verdict.events)


def test_small_steps_are_judged():
    """Half a nat on 38 tokens stops the step, and so does one token of 20 nats; rounding on a single token does not."""
    guards = Guards(GuardsConfig(), 1)
    few = {"tokens": 38.0, "corr": None, "p_dp": 0.5, "p_ln2": 0.4}
    stopped = guards.judge(figures(k2=0.59, ess=0.3, **few))
    assert stopped.action == "skip"
    assert {event.guard for event in stopped.events if event.level == "stop"} == {"mismatch_k2", "tail_ln2", "tail_dp"}
    assert guards.judge(figures(tokens=1.0, k2=200.0, corr=None)).action == "skip"
    assert guards.judge(figures(tokens=1.0, k2=1e-3, p_dp=0.0, corr=0.1, ess=0.999)).events == ()
    assert guards.record(0, stopped, figures(k2=0.59, **few)).mismatch_k2 is None, "no baseline is made of few tokens"


def test_filling_up_a_step_is_adding_tokens_that_agree():
    noise = torch.Generator().manual_seed(0)
    theirs_N = -3 * torch.rand(40, generator=noise)
    own_N = theirs_N + torch.randn(40, generator=noise)
    few, more = Mismatch(), Mismatch()
    few.add(own_N, theirs_N)
    more.add(torch.cat([own_N, torch.zeros(60)]), torch.cat([theirs_N, torch.zeros(60)]))
    filled, expected = few.means().filled(100).metrics("m"), more.means().metrics("m")
    assert filled == pytest.approx({name: expected[name] for name in filled}, abs=1e-12)
    assert set(expected) - set(filled) == {"m/corr", "m/k2_lowp"}


def probe(k2, engine="http://a:1", version=7):
    return ProbeComparison(engine, version, k2, max_abs=0.1)


def test_probes_are_judged_against_the_first_ones():
    guards = Guards(GuardsConfig(baseline=20), 1)

    def events(k2):
        return [(e.level, e.action) for e in guards.judge(HEALTHY, [probe(1e-6), probe(k2, "http://b:2")]).events]

    # Before five are known, 5e-4 counts as usual; a healthy bfloat16 engine has 1e-4.
    assert [events(k2) for k2 in (1.4e-3, 1.6e-3, 6e-3)] == [[], [("warn", "go")], [("stop", "skip")]]
    steps(guards, 4, probe_k2=1e-4)
    assert events(1.4e-3) == []
    steps(guards, 1, 4, probe_k2=1e-4)
    assert [events(k2) for k2 in (2.9e-4, 3.1e-4, 1.1e-3)] == [[], [("warn", "go")], [("stop", "skip")]]
    steps(guards, 14, 5, probe_k2=1e-4)
    steps(guards, 30, 19, probe_k2=1e-2)
    assert events(3.1e-4) == [("warn", "go")], "the yardstick is that of the first twenty"
    (event,) = guards.judge(HEALTHY, [probe(3.1e-4, "http://b:2")]).events
    assert event.sentence.startswith("the engine at http://b:2 scores the probes of version 7 otherwise")
    still = Guards(GuardsConfig(), 1)
    steps(still, 10, probe_k2=1e-12)
    assert still.judge(HEALTHY, [probe(1.4e-4)]).events == (), "below the floor all growth is that of rounding"
    both = still.judge(HEALTHY, [probe(1.0, "http://a:1", 6), probe(1.0, "http://b:2", 7)])
    assert [("http://a:1" in e.sentence, "version 6" in e.sentence) for e in both.events] == [
        (True, True),
        (False, False),
    ]


def test_skips_lead_to_a_rollback_and_rollbacks_to_a_halt():
    guards = Guards(GuardsConfig(halt_after=2), 1)
    steps(guards, 5)
    assert guards.good == 4
    bad = {"k2": 1.0}
    actions = [steps(guards, 1, 5 + i, **bad).action for i in range(7)]
    assert actions == ["skip", "skip", "rollback", "skip", "skip", "rollback", "skip"]
    assert steps(guards, 1, 12, **bad).action == "skip"
    assert steps(guards, 1, 13, **bad).action == "halt"
    assert guards.good == 4
    again = Guards(GuardsConfig(halt_after=2), 1)
    steps(again, 3, 0, **bad)
    assert steps(again, 1, 3).trains, "a good step begins the count anew"
    assert steps(again, 1, 4, **bad).action == "skip"


def test_acting_can_be_turned_off():
    verdict = Guards(GuardsConfig(act=False), 1).judge(figures(k2=1.0, tokens=1e4))
    assert verdict.trains
    assert [event.action for event in verdict.events] == ["skip"]


def test_a_resumed_run_judges_as_an_uninterrupted_one():
    whole, history = Guards(GuardsConfig(), 1), []
    for version in range(12):
        measured = figures(**({"k2": 1.0} if version in (7, 10) else {"grad_norm": 1.0 + version}))
        history.append(whole.record(version, whole.judge(measured), measured))
        whole.remember(history[-1])
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
    last = newest_manifest(open_store(str(run / "weights")))
    engine = engine_of(config, load(open_store(str(run / "weights")), last.version)[1], last.version)
    episodes = play(engine, last.version)
    if shift:
        episodes = [
            edited(e, logprobs=(e.segments[0].arrays()[2] - np.float32(shift) * e.segments[0].arrays()[1]))
            for e in episodes
        ]
    admit(run, config, last.version, last.version, episodes)
    step(trainer)


def test_a_rollback_restores_weights_and_optimizer_and_trains_no_group_twice(run, capsys):
    folder, config = run
    trainer = Trainer(folder)
    store = open_store(str(folder / "weights"))
    one_step(trainer, folder, config)
    one_step(trainer, folder, config)
    good, _ = checkpoint.load(folder / "checkpoints", 1)  # kept, though only the newest two are asked for
    one_step(trainer, folder, config, shift=1.0)
    digests = [m.digest for m in manifests(store)]
    assert digests[3] == digests[1] != digests[2]
    state = trainer.learner.optimizer.state()
    assert all(torch.equal(state[name], good[name]) for name in good)
    assert newest_manifest(store).step.good == 1
    assert "version 3 is that of 1 again" in capsys.readouterr().err
    one_step(trainer, folder, config)
    one_step(trainer, folder, config)
    assert trainer.guards.good == 4
    found = Ledger.open(f"sqlite:///{folder}/ledger.db").conservation(manifests(store))
    assert found.ok, found.sentence
    assert [m.groups for m in manifests(store)] == [(), (0,), (1,), (2,), (3,), (4,)]
    resumed = Trainer(folder)
    assert vars(resumed.guards) == vars(trainer.guards)


def test_a_shift_of_behaviour_is_printed_and_stands_in_the_line_of_its_step(tmp_path, capsys):
    folder, config = new_run(tmp_path, cheats={"window": 3})
    trainer = Trainer(folder)
    before = [{"step": n, "rollout/edits": edits} for n, edits in enumerate((5.0, 5.0, 5.0, 0.0, 0.0))]
    trainer.drift = BehaviourDrift(3, before)
    one_step(trainer, folder, config)
    (line,) = read_jsonl(folder / "metrics.jsonl")
    (event,) = line["drift/events"]
    assert (event["metric"], event["step"], event["before"], event["after"]) == ("rollout/edits", 1, 5.0, 0.0)
    assert "drift, step 1: edits per episode: 5 in the 3 versions before" in capsys.readouterr().err


def test_a_skipped_step_publishes_the_same_weights_and_a_halted_one_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.trainer.rl.guards.ROLLBACK_AFTER", 2)
    folder, config = new_run(tmp_path, guards={"min_tokens": 16, "halt_after": 1})
    trainer = Trainer(folder)
    store = open_store(str(folder / "weights"))
    one_step(trainer, folder, config)
    before = {name: t.clone() for name, t in trainer.learner.optimizer.state().items()}
    one_step(trainer, folder, config, shift=1.0)
    digests = [m.digest for m in manifests(store)]
    assert digests[2] == digests[1]
    assert all(torch.equal(t, before[name]) for name, t in trainer.learner.optimizer.state().items())
    one_step(trainer, folder, config, shift=1.0)  # a rollback
    one_step(trainer, folder, config, shift=1.0)
    with pytest.raises(RunFailed, match=r"halted before version 5: .*k2 0\.5"):
        one_step(trainer, folder, config, shift=1.0)
    assert newest_manifest(store).version == 4
    ledger = Ledger.open(f"sqlite:///{folder}/ledger.db")
    assert [g.id for g in ledger.ready_groups(1, in_order=True)] == [4], "the group of the halted step waits"


def test_renaming_a_metric_changes_no_training(run, monkeypatch):
    """The same steps with all metrics under other names: the guards roll back, and the payloads are the same bytes."""

    def payloads(folder, config):
        trainer = Trainer(folder)
        for shift in (0.0, 0.0, 1.0, 0.0):
            one_step(trainer, folder, config, shift=shift)
        published = manifests(open_store(str(folder / "weights")))
        return published[-1].metrics, [(m.digest, m.step, [p.digest for p in m.delta]) for m in published]

    folder, config = run
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    shown, expected = payloads(folder, config)

    def renamed(function):
        return lambda *args: {f"other/{name}": value for name, value in function(*args).items()}

    monkeypatch.setattr(StepSums, "metrics", renamed(StepSums.metrics))
    monkeypatch.setattr(process, "batch_metrics", renamed(process.batch_metrics))
    monkeypatch.setattr(process, "guard_metrics", renamed(process.guard_metrics))
    whole_step = process.train_step

    def step(*args, **options):
        result = whole_step(*args, **options)
        return replace(result, metrics={f"other/{name}": value for name, value in result.metrics.items()})

    monkeypatch.setattr(trainer_runs, "train_step", step)
    hidden, found = payloads(other, config)
    assert found == expected
    assert not shown.keys() & hidden.keys()
    assert expected[3][1].action == "rollback"


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_guards_are_silent_on_two_hundred_steps_of_a_healthy_run(tmp_path, dtype):
    """A run in one process: an engine that follows the published versions samples, answers the probes and computes in
    `dtype`, as the trainer does."""
    folder, config = new_run(
        tmp_path,
        guards={"min_tokens": 64},
        rollout={"prompts": 1, "group": 8, "tokens": 12, "context": 128},
        trainer={"lr": 3e-4, "warmup_steps": 0, "dtype": dtype, "steps": 200},
        inference={"dtype": dtype},
    )
    begin_probes(folder, count=2, tokens=32)
    trainer = Trainer(folder)
    store = open_store(str(folder / "weights"))
    model = load_model(config.model.path, dtype=getattr(torch, dtype))
    engine = Engine(model, version=-1)
    receiver = Receiver(store, named_tensors(model))
    for version in range(200):
        update = receiver.poll()
        receiver.apply(update)
        engine.version = receiver.version
        assert engine.version == version
        answer(folder, engine)
        admit(folder, config, version, version, play(engine, version, 8, tokens=12))
        step(trainer)
    lines = read_jsonl(folder / "metrics.jsonl")
    assert len(lines) == 200
    assert newest_manifest(store).digest != manifests(store)[0].digest, "nothing was learned: the silence is void"
    assert all(line["mismatch/tokens"] >= 64 and line["probe/k2"] >= 0 for line in lines), "all of it was judged"
    loud = {line["step"]: line["guard/events"] for line in lines if "guard/events" in line}
    assert loud == {}
