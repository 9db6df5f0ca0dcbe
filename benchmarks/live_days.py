"""The live loop over simulated days, by the processes that serve real users, each killed once and started again.

    python -m benchmarks.live_days --folder outputs/days [--days 2] [--speed 32] [--vllm PYTHON] [--json]

Cluster "one" is two `etude serve` of the nano model, of the control and of the canary. Cluster "two", with --vllm, is
two vLLM, each behind `etude weights feed`. `etude live serve` stands behind a front that holds connections while it is
started again, and `etude live run` does the rest. All processes have one clock, on which --speed seconds pass in one.
Users ask all the time. After the first release that was learned, a version with damaged weights bypasses the gate.

Exit code 1 unless there are six windows, three learned releases, one planted version that was stopped, turns of every
cluster were learned from, every process was killed once, no request failed, no acknowledged signal is missing in the
log, and every window computed again has the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from benchmarks import fast_clock
from benchmarks.live_services import Front, Services, trainer_of
from etude.code import fetch_library
from etude.config import LiveConfig, validate
from etude.errors import RunFailed, UserError
from etude.live.legs import Leg, LegKind, leg_of
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts
from etude.live.log.records import ExitKind, LivePolicy, Release, ReleaseStage
from etude.live.log.tenants import create_key, digest_of, set_policy
from etude.live.release import operations, releases
from etude.live.release.reports import GateReport, keep_report
from etude.live.simulate.clients import UserModel, UserPace, Users, requests
from etude.live.simulate.sizes import NANO
from etude.live.simulate.users import draw_population
from etude.store import open_store
from etude.tasks import build_dataset

TENANT, ACCOUNTS = "firm", 240
MODEL, PAUSE = UserModel("nano", tokens=160, at_once=4), 1.5
DAMAGE = 0.6  # standard deviation of the noise on the planted weights, over that of each tensor
WINDOWS, RELEASES = 6, 3
_LIBRARY = ("pydash", "8.1.0", "30914c3e9d377ea2cd0d3c0a4f252889b08392f730a5eb4d117e5b598cdf1d52")
_FIRST_SECONDS = 900.0
_LATE = 0.85  # share of the days after which what was not killed yet is killed in any leg
_SETTLED_SECONDS = 4.0  # of a leg or of its trainer, before a kill
_BETWEEN_SECONDS = 60.0  # kills
PLAN: tuple[tuple[LegKind, int, str], ...] = (
    (LegKind.TRAIN, 1, "trainer"),
    (LegKind.GATE, 2, "loop"),
    (LegKind.WATCH, 1, "gateway"),
    (LegKind.TRAIN, 2, "one-control"),
    (LegKind.GATE, 3, "two-control"),
    (LegKind.WATCH, 3, "two-control-feed"),
    (LegKind.TRAIN, 3, "one-canary"),
    (LegKind.GATE, 4, "two-canary-feed"),
    (LegKind.TRAIN, 4, "two-canary"),
    (LegKind.WATCH, 4, "loop"),
    (LegKind.TRAIN, 5, "loop"),
)
"""Leg, its number among legs of its kind, and the process that is killed in it. The first gate is the base's."""


# The days -------------------------------------------------------------------------------------------------------------


@dataclass
class Legs:
    """How often each leg has begun, and since when the present one lasts. A leg is one of its window or release."""

    now: Leg | None = None
    since: float = 0.0
    counts: Counter[LegKind] = field(default_factory=Counter[LegKind])

    def see(self, leg: Leg) -> None:
        """Counts a leg that has changed."""
        if self.now is None or (leg.kind, leg.why) != (self.now.kind, self.now.why):
            self.counts[leg.kind] += 1
            self.since = time.monotonic()
        self.now = leg


class Days:
    """Users, kills and the planted version, while the loop runs."""

    def __init__(self, services: Services, config: Path, days: float, seed: int) -> None:
        self.services, self._days, self._seed = services, days, seed
        self.site = operations.open_site(validate(LiveConfig, tomllib.loads(config.read_text("utf-8")), str(config)))
        self.legs, self.plan = Legs(), [each for each in PLAN if services.vllm or not each[2].startswith("two")]
        self.killed: list[dict[str, Any]] = []
        self.planted: int | None = None
        self._shown: set[tuple[int, int]] = set()
        self._began = journal.now()
        self._looked = self._last_kill = 0.0

    @property
    def passed(self) -> float:
        """The share of the days that has passed."""
        return (journal.now() - self._began) / (self._days * 86_400e9)

    def say(self, text: str) -> None:
        """Prints a line with the day and the time of the simulated clock."""
        minutes = int((journal.now() - self._began) / 60e9)
        print(f"day {minutes // 1440 + 1} {minutes // 60 % 24:02}:{minutes % 60:02} {text}", flush=True)

    def run(self, users: Users) -> None:
        """The days, from the first release on."""
        deadline = time.monotonic() + _FIRST_SECONDS
        while self.site.read().current is None:
            self._tick()
            if time.monotonic() > deadline:
                raise UserError(f"nothing was released within {_FIRST_SECONDS:.0f} seconds; see {self.services.folder}")
        users.begin()
        self._began = journal.now()
        try:
            while self.passed < 1.0:
                self._tick()
            self.say("the users end")
        finally:
            users.end()

    def _tick(self) -> None:
        time.sleep(0.25)
        for line in self.services.look():
            self.say(line)
        if time.monotonic() - self._looked < 1.0:
            return
        self._looked = time.monotonic()
        with suppress(UserError, RunFailed, DBAPIError):
            self.legs.see(leg_of(self.site))
            self._show()
            self._plant()
            self._decide()
            self._kill()

    def _show(self) -> None:
        for state in self.site.read().states:
            for event in state.events:
                if (key := (state.release.number, event.sequence)) not in self._shown:
                    self._shown.add(key)
                    stage = f"{event.stage} at {event.share:.0%}"
                    self.say(f"release {state.release.number}: {stage} by {event.decided_by}, {event.reason}")

    def _kill(self) -> None:
        """Kills what the plan names for this leg; late in the days also what no leg has come for."""
        leg = self.legs.now
        now = time.monotonic()
        if leg is None or now - self.legs.since < _SETTLED_SECONDS or now - self._last_kill < _BETWEEN_SECONDS:
            return
        here = [each for each in self.plan if each[0] is leg.kind and each[1] <= self.legs.counts[leg.kind]]
        due = here or (self.plan if self.passed > _LATE else [])
        for each in due[:1]:
            target = each[2]
            if target == "trainer":
                pid = trainer_of(self.services.folder / "live" / "train")
                if pid is None:
                    return
                time.sleep(_SETTLED_SECONDS)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            else:
                if (child := self.services.all[target].child) is None or child.exit_code is not None:
                    return
                self.services.all[target].kill()
            self._last_kill = time.monotonic()
            self.plan.remove(each)
            self.killed.append({"process": target, "leg": str(leg.kind), "why": leg.why})
            self.say(f"kill -9 of {target} in leg {leg.kind}: {leg.why}")

    def _decide(self) -> None:
        """The person whom a trial without a verdict waits for takes it back."""
        trial = self.site.read().trial
        if trial is not None and trial.stage is ReleaseStage.CANARY:
            hours = (journal.now() - trial.events[-1].at) / 3600e9
            if hours > self.site.config.canary.hours + 1:
                operations.refuse(self.site, "ada", "no verdict in time")

    def _plant(self) -> None:
        """Once: brings a version with damaged weights to the canary, without the gate."""
        from etude.weights.content import load
        from etude.weights.publisher import Publisher

        log, leg = self.site.read(), self.legs.now
        current = log.current
        if self.planted is not None:
            bad = log.of(self.planted)
            if bad.stage is ReleaseStage.GATE and log.trial is None:  # a leg of the loop came between
                operations.start(self.site, bad.release.manifest, 0)
            return
        if current is None or current.release.window is None or log.trial is not None:
            return
        if leg is None or leg.kind not in (LegKind.WAIT, LegKind.CUT, LegKind.TRAIN):
            return
        rng, tensors = np.random.default_rng((self._seed, 3)), {}
        for name, tensor in load(open_store(current.release.store), current.release.version)[1].items():
            noise = tensor.new_tensor(rng.normal(0.0, 1.0, tuple(tensor.shape)))
            tensors[name] = tensor + DAMAGE * tensor.std() * noise if tensor.numel() > 1 else tensor
        store, number = str(self.services.folder / "planted"), current.release.number
        manifest = Publisher(open_store(store)).publish(0, tensors, (), {})
        anchor = current.release.anchor
        lie = GateReport(
            store=store, version=0, manifest=manifest.digest, incumbent=number, anchor=anchor, parts=(), at=0
        )
        release = Release(
            number=log.next_number, store=store, version=0, manifest=manifest.digest, parent=number, anchor=anchor,
            report=keep_report(lie, None), window=None, at=0,
        )  # fmt: skip
        releases.begin(self.site.engine, release, ReleaseStage.GATE, "planted: the gate was not asked", "days")
        self.planted = release.number
        operations.start(self.site, manifest.digest, 0)


# Figures --------------------------------------------------------------------------------------------------------------


def figures(days: Days, users: Users, replayed: dict[int, int]) -> dict[str, Any]:
    """All figures. `replayed`: exit code of each window computed again."""
    states, accounts = days.site.read().states, Accounts(days.services.folder / "live")
    with days.site.engine.connect() as connection:
        held = set(connection.scalars(sa.select(schema.signals.c.event)))
        windows = connection.execute(sa.select(schema.windows).order_by(schema.windows.c.number)).all()
        turns, exits, trained = schema.turns.c, schema.exits.c, schema.windows.c
        learned = (
            sa.select(turns.cluster, sa.func.count(), sa.func.sum(turns.sampled_tokens))
            .join_from(schema.turns, schema.exits, exits.turn == turns.id)
            .join(schema.windows, trained.number == exits.window)
            .where(exits.kind == ExitKind.TRAINED, trained.version.is_not(None))
            .group_by(turns.cluster)
        )
        served = sa.select(turns.cluster, sa.func.count()).group_by(turns.cluster)
        answered = {cluster: int(count) for cluster, count in connection.execute(served)}
        of_cluster = {c: {"turns": int(n), "tokens": int(t)} for c, n, t in connection.execute(learned)}
    bad = next((state for state in states if state.release.number == days.planted), None)
    asked, sent = list(users.turns), list(users.acknowledged)
    return {
        "days": days.passed * days._days,
        "windows": len(windows),
        "versions": sum(row.version is not None for row in windows),
        "releases": [[s.release.number, s.release.window, str(s.stage), s.events[-1].reason] for s in states],
        "learned_releases": sum(_reached_all(s) for s in states if s.release.window is not None),
        "planted": None if bad is None else [str(bad.stage), _hours(bad), bad.events[-1].reason],
        "requests": len(asked),
        "failed": dict(Counter(turn.error for turn in asked if not turn.turn)),
        "retried": sum(turn.retries > 0 for turn in asked),
        "signals": len(sent),
        "signals_lost": sum(accounts.digest("event", TENANT, event) not in held for event in sent),
        "signals_refused": users.lost,
        "turns": answered,
        "learned": of_cluster,
        "killed": days.killed,
        "not_killed": [target for _, _, target in days.plan],
        "ended": {name: service.ends for name, service in days.services.all.items() if service.ends},
        "replayed": replayed,
    }


def _reached_all(state: releases.ReleaseState) -> bool:
    return any(event.stage is ReleaseStage.RELEASED for event in state.events)


def _hours(state: releases.ReleaseState) -> float:
    """From the canary's first stage to the end."""
    first = next((event.at for event in state.events if event.stage is ReleaseStage.CANARY), state.events[-1].at)
    return (state.events[-1].at - first) / 3600e9


def checks(done: dict[str, Any], clusters: list[str]) -> dict[str, bool]:
    """What must hold."""
    return {
        f"{WINDOWS} windows": done["windows"] >= WINDOWS,
        f"{RELEASES} learned releases": done["learned_releases"] >= RELEASES,
        "the planted version was stopped": done["planted"] is not None and done["planted"][0] == "rolled_back",
        "every cluster was learned from": all(done["learned"].get(c, {}).get("tokens", 0) > 0 for c in clusters),
        "every process was killed": not done["not_killed"],
        "no request failed": done["requests"] > 0 and not done["failed"],
        "no signal was lost": done["signals"] > 0 and done["signals_lost"] == done["signals_refused"] == 0,
        "the same bits again": bool(done["replayed"]) and not any(done["replayed"].values()),
    }


def run(folder: Path, days: float, speed: float, vllm: str | None, seed: int) -> dict[str, Any]:
    """Figures and checks of the days, in a folder with nothing but the library and suite of other days. Raises
    UserError or RunFailed."""
    library = fetch_library(*_LIBRARY, folder / "library")
    asked, _ = requests(library, seed, 0.4)
    if not (folder / "suite").exists():
        build_dataset(library, folder / "suite", NANO.suite, lambda *_: None)
    fast_clock.set_clock(folder / "clock", speed)
    services = Services(folder, vllm)
    config = services.prepare()
    Front(services.ports["front"], services.ports["gateway"])
    try:
        story = Days(services, config, days, seed)
        key = create_key(story.site.engine, TENANT, "users", proxy=True)
        secret = Accounts(folder / "live").proxy_secret(digest_of(key))
        set_policy(story.site.engine, TENANT, LivePolicy(requests_per_minute=10**6))
        services.begin(config)
        story.say(f"{', '.join(services.all)} answer; {speed:g} seconds pass in one")
        window, pace = story.site.config.labels.window_seconds, UserPace(speed, PAUSE, retries=2)
        population = draw_population(np.random.default_rng((seed, 2)), ACCOUNTS, zipf=0.3)
        front, kept = services.url("front"), folder / "turns.jsonl"
        users = Users(front, key, secret, MODEL, population, asked, window, seed, kept, pace)
        story.run(users)
    finally:
        services.stop()
    with story.site.engine.connect() as connection:
        numbers = list(connection.scalars(sa.select(schema.windows.c.number).order_by(schema.windows.c.number)))
    done = figures(story, users, {number: _replay(config, number) for number in numbers})
    story.site.engine.dispose()
    return done | {"checks": checks(done, services.clusters)}


def _replay(config: Path, window: int) -> int:
    command = [sys.executable, "-m", "etude.cli.main", "live", "window", str(config), "--replay", str(window)]
    return subprocess.run(command, timeout=300, check=False).returncode


def main() -> int:
    """1 if something that must hold does not."""
    parser = argparse.ArgumentParser(description="the live loop over simulated days, with kills")
    parser.add_argument("--folder", type=Path, required=True, help="new folder of the loop")
    parser.add_argument("--days", type=float, default=2.0)
    parser.add_argument("--speed", type=float, default=32.0, help="seconds of the simulated clock in one")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python with vLLM, for a second cluster")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the figures as the last line")
    options = parser.parse_args()
    folder = options.folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (folder / "live").exists():
            raise UserError(f"{folder} holds a live loop: name a new folder")
        done = run(folder, options.days, options.speed, options.vllm, options.seed)
    except UserError as e:
        print(f"live_days: {e}", file=sys.stderr)
        return 2
    for name, figure in done.items():
        print(f"{name}: {json.dumps(figure)}")
    if options.json:
        print(json.dumps(done))
    return int(not all(done["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
