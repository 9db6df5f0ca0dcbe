"""The live loop by itself: real windows, trainer, gate, canary and stores; the clock and the plays are given."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from etude import runfolder
from etude.errors import UserError
from etude.evals.stats import Estimate
from etude.evals.suite import EvalResult, TaskResult
from etude.live import legs
from etude.live.learn import train
from etude.live.legs import LegKind, leg_of, step
from etude.live.log import schema
from etude.live.log.records import ReleaseStage
from etude.live.release import operations
from etude.live.release.reports import GatePart
from etude.weights.manifest import manifests
from tests.helpers.live_worlds import HOUR, World, world
from tests.helpers.trainer_runs import run_trainer


def play(passes: int) -> EvalResult:
    """So many of ten tasks pass."""
    tasks = tuple(TaskResult(id=f"t{n}", function=f"f{n}", passed=(n < passes,), lost=0) for n in range(10))
    return EvalResult(
        split="heldout", seed=0, samples=1, seconds=60.0, tasks=tasks, pass_1=Estimate(mean=0.5, low=0.4, high=0.6),
        pass_k={}, outcomes={}, retries=0, stops={}, behaviour={"turns": 3.0, "sampled_tokens": 100.0},
    )  # fmt: skip


class Plays:
    """The plays of the gate: of each version so many of ten tasks pass, by default all."""

    def __init__(self) -> None:
        self.passes: dict[int, int] = {}

    def measure(self, release, suite: Path) -> EvalResult:
        return play(self.passes.get(release.number, 10))

    def replay(self, *_: object) -> GatePart:
        return GatePart(name="replay", passed=True, reason="")


@pytest.fixture
def plays(monkeypatch) -> Plays:
    made = Plays()
    monkeypatch.setattr(legs, "player_of", lambda site: contextlib.nullcontext(made))
    monkeypatch.setattr(train, "_run_trainer", lambda folder, source, lock, seconds: run_trainer(folder, source))
    return made


@pytest.fixture
def small(tmp_path, monkeypatch, plays):
    with world(tmp_path, monkeypatch.setattr) as made:
        yield made


def done(made: World, count: int) -> list[str]:
    """The next legs, one after the other."""
    return [str(step(made.site, print).kind) for _ in range(count)]


def stages(made: World) -> list[str]:
    return [str(state.stage) for state in made.site.read().states]


def windows(made: World) -> list[tuple[int, int | None, int]]:
    """Number, version and version of the base, of each window."""
    with made.loop.log.begin() as connection:
        table = schema.windows
        rows = connection.execute(sa.select(table).order_by(table.c.number)).all()
    return [(row.number, row.version, row.base_version) for row in rows]


@pytest.mark.slow
def test_two_days_of_a_loop(small: World, plays: Plays) -> None:
    """Six windows: one is released, one is too small and joins the next, one is refused by the gate, one is rolled back
    by the canary. What was not released is never the base of a version."""
    lines: list[str] = []
    asked: set[int] = set()
    trials: set[int] = set()
    plays.passes = {3: 1}  # the second version that is gated after the first release

    def ended(pause: float) -> bool:
        small.seconds += 1800.0 if pause else 0.0
        period = int(small.seconds // (6 * HOUR))
        if period not in asked and small.seconds > (6 * period + 3) * HOUR:
            asked.add(period)
            small.ask(2 if period == 1 else 6)
        trial = small.site.read().trial
        if trial is not None and trial.stage is ReleaseStage.CANARY:
            trials.add(trial.release.number)
            small.use(undone=2 if trial.release.number == 4 else 0)
        return small.seconds > 48 * HOUR

    legs.run(small.site, ended, lines.append)
    assert stages(small)[:5] == ["released", "released", "refused", "rolled_back", "released"]
    first, second, refused, bad, back = (state.release for state in small.site.read().states[:5])
    assert (first.window, second.window, refused.window, bad.window, back.window) == (None, 1, 3, 4, None)
    assert back.manifest == second.manifest
    made = windows(small)
    assert len(made) >= 6
    assert made[1][1] is None, "the second window was too small"
    live = {m.version: m.live for m in manifests(small.loop.candidates)}
    bases = [live[base] for _, version, base in made[:5] if version is not None]
    assert bases[0] == first.manifest
    assert bases[1:] == [second.manifest] * 3, "the refused and the rolled-back version are left behind"
    said = "\n".join(lines)
    for line in (
        "release 1: released, the first release",
        "window 1: 6 of 6 turns are learned from",
        "window 1: version 1 learned from 6 turns (go)",
        "the gate let it pass",
        "window 2: 0 of 2 turns are learned from; too few, they join the next window",
        "window 3: 8 of 8 turns are learned from",
        "the gate refused it, suite tiny: not shown to be no worse",
        "release 4 at 50%: roll back, undone edits",
        "the next window is cut at 2026-01-01",
    ):
        assert line in said, line
    cuts = [line for line in lines if "turns are learned from" in line]
    assert len(cuts) == len(made)


def test_a_person_approves_or_refuses_after_the_gate(tmp_path, monkeypatch, plays: Plays) -> None:
    with world(tmp_path, monkeypatch.setattr, loop={"hours": 1.0, "approval": True}) as made:
        assert done(made, 3) == ["gate", "approve", "approve"]
        with pytest.raises(UserError, match="release 1 waits for a person"):
            operations.start(made.site, made.site.read().states[0].release.manifest, 0)
        assert operations.refuse(made.site, "ada", "not today").stage is ReleaseStage.REFUSED
        assert "the gate refused what" in leg_of(made.site).why
        with pytest.raises(UserError, match="no release waits"):
            operations.approve(made.site, "ada")
    with world(tmp_path / "other", monkeypatch.setattr, loop={"hours": 1.0, "approval": True}) as made:
        step(made.site, print)
        operations.approve(made.site, "ada")
        event = made.site.read().states[0].events[-1]
        assert (event.decided_by, event.reason, event.at > 0) == ("ada", "approved", True)
        with pytest.raises(UserError, match="no release waits"):
            operations.approve(made.site, "bob")
        assert done(made, 2) == ["release", "wait"]
        assert stages(made) == ["released"]


def test_a_window_that_cannot_be_trained_on_does_not_hold_the_loop(small: World) -> None:
    """Its turns leave as dropped, and the next window is cut at its time."""
    assert done(small, 3) == ["gate", "release", "wait"]
    small.seconds = 3 * HOUR
    small.ask(5)
    with small.loop.log.begin() as connection:
        connection.execute(sa.update(schema.turns).values(manifest="0" * 32))
    small.seconds = 7 * HOUR
    assert done(small, 1) == ["cut"]
    with pytest.raises(UserError, match="has no turn that can be trained on: 5 stale"):
        step(small.site, print)
    leg = leg_of(small.site)
    assert leg.kind is LegKind.WAIT
    assert leg.due == pytest.approx(small.now() + 6 * HOUR * 1e9, abs=10)  # the log's times are all different


def test_a_version_is_gated_again_beside_another_release(small: World, plays: Plays) -> None:
    """A person rolls back between the gate and the release: what the gate compared with is gone."""
    done(small, 2)
    small.seconds = 7 * HOUR
    small.ask(6)
    assert done(small, 3) == ["cut", "train", "gate"]
    assert leg_of(small.site).kind is LegKind.RELEASE
    event = {
        "sequence": 0,
        "stage": "released",
        "share": 1.0,
        "reason": "",
        "decided_by": "ada",
        "at": small.now(),
        "better": False,
    }
    with small.loop.log.begin() as connection:
        row = connection.execute(sa.select(schema.releases)).mappings().first()
        connection.execute(sa.insert(schema.releases), [dict(row) | {"number": 3, "parent": 1}])
        connection.execute(sa.insert(schema.release_events), [{"release": 3, "at": small.now(), **event}])
    assert done(small, 3) == ["gate", "release", "watch"]


def test_adapters_are_released_as_whole_weights(tmp_path, monkeypatch, plays: Plays) -> None:
    """A version trained with LoRA passes the gate and reaches all servers; the next window begins with it."""
    with world(tmp_path, monkeypatch.setattr, more="[trainer.lora]\nrank = 2\n") as made:
        done(made, 2)
        for window in (1, 2):
            made.seconds += 7 * HOUR
            made.ask(6)
            assert done(made, 5) == ["cut", "train", "gate", "release", "watch"]
            made.use()
            done(made, 1)
            made.use()
            done(made, 1)
            current = made.site.read().current
            assert current is not None
            assert current.release.window == window
            candidate = manifests(made.loop.candidates)[-1]
            assert candidate.live != candidate.digest, "it holds adapters"
            for follower in (made.control, made.canary):
                assert follower.health()["digest"] == candidate.live == current.release.manifest
        assert windows(made) == [(1, 1, 0), (2, 2, 1)]


def test_one_runner_and_what_cannot_run_is_refused(small: World, tmp_path) -> None:
    folder = Path(small.site.config.folder)
    with runfolder.lock(folder), pytest.raises(UserError, match="is being run by another process"):
        legs.run(small.site, lambda _: True, print)
    for changes, why in (
        ({"train": None}, "give `train`"),
        ({"gate": small.site.config.gate.model_copy(update={"suites": ()})}, "gate.suites"),
        ({"gate": small.site.config.gate.model_copy(update={"margin": 0.05})}, "cannot defend gate.margin"),
    ):
        site = operations.ReleaseSite(small.site.config.model_copy(update=changes), small.loop.log)
        with pytest.raises(UserError, match=why):
            legs.run(site, lambda _: True, print)
    assert stages(small) == []


def test_a_leg_that_fails_is_tried_again_after_longer_pauses(small: World, monkeypatch) -> None:
    pauses: list[float] = []
    lines: list[str] = []

    def ended(pause: float) -> bool:
        pauses.append(pause)
        return len(pauses) == 9

    def away(*_: object) -> None:
        raise UserError("the store is away")

    monkeypatch.setattr(legs, "play_gate", away)
    legs.run(small.site, ended, lines.append)
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert [line.partition(" not now: ")[2] for line in lines] == ["the store is away"]


KILLED = """
import contextlib, json, sys
from etude.config import validate
from etude.config.live import LiveConfig
from etude.live import legs
from etude.live.log import journal
from etude.live.release.operations import open_site
from tests.live.test_legs import Plays
now = [int(sys.argv[2])]
journal.now = lambda: now[0]
legs.player_of = lambda site: contextlib.nullcontext(Plays())
site = open_site(validate(LiveConfig, json.loads(sys.argv[1]), "test"))
def ended(pause):
    now[0] += 60 * 10**9
    trial = site.read().trial
    return trial is not None and trial.stage == "canary"
legs.run(site, ended, print)
"""
PLACES = ("live.window:1", "loop.cut:1", "live.admitted:1", "loop.train:1", "gate.report:1", "loop.gate:1",
          "release.event:1", "publisher.payload:1", "release.event:1")  # fmt: skip


@pytest.mark.release
def test_killed_in_any_leg_the_same_command_goes_on(tmp_path, monkeypatch) -> None:
    """kill -9 of the loop at each place of a window's way to users: in the end one window, one
    version, one release, and the weights of a loop that nobody killed."""
    digests = []
    for places in ((), PLACES):
        with world(tmp_path / str(len(places)), monkeypatch.setattr) as made:
            monkeypatch.setattr(legs, "player_of", lambda site: contextlib.nullcontext(Plays()))
            done(made, 2)
            made.seconds = 7 * HOUR
            made.ask(6)
            codes = []
            for place in (*places, ""):
                environment = os.environ | ({"ETUDE_FAILPOINT": place} if place else {})
                words = [sys.executable, "-c", KILLED, json.dumps(made.options), str(made.now())]
                ran = subprocess.run(words, env=environment, timeout=200, check=False, capture_output=True, text=True)
                codes.append(ran.returncode)
                made.seconds += 60.0
            assert codes[-1] == 0, ran.stderr[-2000:]
            assert stages(made) == ["released", "canary"]
            assert windows(made) == [(1, 1, 0)]
            assert [m.version for m in manifests(made.loop.candidates)] == [0, 1]
            assert made.canary.health()["digest"] == made.site.read().states[1].release.manifest
            digests.append((made.canary.health()["digest"], codes.count(-signal.SIGKILL)))
    assert digests[0][0] == digests[1][0]
    assert digests[1][1] == len(PLACES)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_within_seconds(tmp_path, monkeypatch, number) -> None:
    """While it waits for the next cut, with exit code 0; its lock is free, and the status shows the loop."""
    with world(tmp_path, monkeypatch.setattr, loop={"hours": 1000.0}) as made:
        monkeypatch.undo()
        monkeypatch.setattr(legs, "player_of", lambda site: contextlib.nullcontext(Plays()))
        done(made, 2)
        path = tmp_path / "live.toml"
        cluster = made.options["clusters"][0]
        path.write_text(
            f"folder = {made.options['folder']!r}\ntrain = {made.options['train']!r}\n[loop]\nhours = 1000.0\n"
            f"[gate]\nsuites = {made.options['gate']['suites']}\nmargin = 0.8\n[[clusters]]\n"
            + "".join(f"{key} = {value!r}\n" for key, value in cluster.items())
        )
        command = [sys.executable, "-m", "etude.cli.main", "live"]
        with subprocess.Popen([*command, "run", str(path)], stdout=subprocess.PIPE, text=True) as ran:
            assert ran.stdout is not None
            assert "the next window is cut at" in ran.stdout.readline()
            shown = subprocess.run([*command, "status", str(path)], capture_output=True, text=True, timeout=60)
            assert shown.stdout.startswith("Loop: the next window is cut at ")
            assert "is not running" not in shown.stdout.splitlines()[0]
            ran.send_signal(number)
            assert ran.wait(15) == 0
            assert ran.stdout.read() == "ended; the same command goes on\n"
        assert not runfolder.is_running(Path(made.options["folder"]))
