"""The live loop as a demo: simulated users teach a model, through the processes that serve real ones.

    servers    one cluster of two `etude serve`, of the control and of the canary, each with a weight store
    gateway    `etude live serve` before them (cluster.py); users ask with OpenAI's client library (clients.py)
    loop       the legs of `etude live run`, one after the other: kept and undone edits train a version, the gate plays
               a frozen suite of the same library, the canary goes to 10, 50 and 100 % while users go on

After the first window a version with damaged weights bypasses the gate, and the canary has to stop it. Held-out
requests are about functions that no user's request is about.

The next part of the story follows from the log's rows, and figures are on the disk before the row that they belong to
(figures.py), so a demo that was killed goes on with the same windows and users.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sqlalchemy as sa

from etude import runfolder
from etude.code import fetch_library
from etude.errors import RunFailed, UserError
from etude.evals import defended_margin
from etude.live.legs import LegKind, leg_of, step
from etude.live.log import journal, schema
from etude.live.log.records import Release, ReleaseStage
from etude.live.release import releases
from etude.live.release.operations import ReleaseSite, refuse, start, wait
from etude.live.release.releases import ReleaseLog, ReleaseState
from etude.live.release.reports import DISCORDANT, SPLIT, GateReport, keep_report, read_report
from etude.live.simulate import figures
from etude.live.simulate.clients import FunctionRequest, Judgement, Users, answers, mean_utility, requests
from etude.live.simulate.cluster import DemoCluster, serve
from etude.live.simulate.figures import HeldoutScore, LiveDemo, ReleaseOutcome, SuiteChange, UsedWindow
from etude.live.simulate.users import draw_population
from etude.records import PolicyVersion
from etude.store import open_store
from etude.tasks import build_dataset, load_dataset
from etude.weights import newest_manifest

DAMAGE = 0.6  # standard deviation of the noise on the planted version's weights, over that of each tensor
_HELDOUT = 0.4  # of the functions
_ZIPF = 0.3  # of activity: nearly every account has a request within a stage
_LIBRARY = ("pydash", "8.1.0", "30914c3e9d377ea2cd0d3c0a4f252889b08392f730a5eb4d117e5b598cdf1d52")
_TICK_SECONDS = 0.5
_US = "demo"  # who decides on the planted version


def run(folder: Path, done: LiveDemo, say: Callable[[str], None]) -> LiveDemo:
    """Runs a demo with the figures so far, in a folder that is empty or holds its earlier part, and returns the
    figures. Raises UserError or RunFailed."""
    name, version, sha256 = _LIBRARY
    with runfolder.lock(folder):
        say(f"fetching {name} {version}")
        library = fetch_library(name, version, sha256, folder / "library")
        user_requests, heldout = requests(library, done.seed, _HELDOUT)
        functions = [request.function for request in heldout]
        if done.functions not in ([], functions):
            raise UserError(f"{folder} asks about other functions than this etude: start a demo without --resume")
        done.functions = functions
        figures.keep(folder, done)
        if not (folder / "suite").exists():
            say(f"{len(user_requests)} requests of users, {len(heldout)} held out; now the gate's suite")
            build_dataset(library, folder / "suite", done.sizes.suite, lambda *_: None)
        with serve(folder, done.sizes) as cluster:
            _Story(cluster, done, user_requests, heldout, say).run()
    return done


class _Story:
    def __init__(
        self,
        cluster: DemoCluster,
        done: LiveDemo,
        user_requests: list[FunctionRequest],
        heldout: list[FunctionRequest],
        say: Callable[[str], None],
    ) -> None:
        self._cluster, self._site, self._say, self.done, self._heldout = cluster, cluster.site, say, done, heldout
        self._began, self._before, self._lost = time.monotonic(), done.seconds, done.lost
        check_log(self._site.read(), done)
        rng = np.random.default_rng((done.seed, 2))
        self._users = Users(
            cluster.gateway,
            cluster.key,
            cluster.secret,
            done.sizes.model,
            draw_population(rng, done.sizes.accounts, zipf=_ZIPF),
            user_requests,
            self._site.config.labels.window_seconds,
            done.seed,
            cluster.folder / "turns.jsonl",
        )

    def run(self) -> None:
        """All that is left to do."""
        self._go_on()
        while self._next():
            self._keep()
        self._keep()

    def _go_on(self) -> None:
        """Brings servers that have just started to the rows. The stage of a release on trial begins again: nobody used
        it while the demo was stopped."""
        trial = self._site.read().trial
        if trial is not None:
            why = "the demo was stopped, and goes on"
            releases.append(self._site.engine, trial, trial.stage, trial.share, why, _US)
            start(self._site, trial.release.manifest, trial.release.version)
            self._wait_for_servers()

    def _next(self) -> bool:
        """Does the next part; False after the last."""
        log = self._site.read()
        self._note(log)
        leg, window = leg_of(self._site), self._last_window()
        planted = next((state for state in log.states if _is_planted(state)), None)
        if leg.kind is LegKind.WATCH and log.trial is not None:
            self._watch(log.trial)
        elif leg.kind in (LegKind.GATE, LegKind.RELEASE, LegKind.TRAIN):
            step(self._site, self._log)
        elif log.current is None:
            raise RunFailed(leg.why)
        elif window and (planted is None or planted.stage is ReleaseStage.GATE):
            self._plant(log.current, planted)
        elif window == self.done.wanted:
            return False
        elif leg.due is not None and leg.kind is LegKind.WAIT:
            time.sleep(max(0.0, (leg.due - journal.now()) / 1e9))
        else:
            self._cut(window + 1)
        return True

    # Figures ----------------------------------------------------------------------------------------------------------

    @property
    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def _log(self, text: str) -> None:
        seconds = int(self._seconds)
        self._say(f"{seconds // 60}:{seconds % 60:02} {text}")

    def _keep(self) -> None:
        users, done = self._users, self.done
        done.turns, done.lost, done.seconds = len(users.turns), self._lost + users.lost, self._seconds
        done.failed = sum(not turn.turn for turn in users.turns)
        figures.keep(self._cluster.folder, done)

    def _note(self, log: ReleaseLog) -> None:
        """Takes the figures of the log that are not there yet. A release to all accounts is scored before the next one
        is trained."""
        done = self.done
        done.refused = [state.events[-1].reason for state in log.states if state.stage is ReleaseStage.REFUSED]
        ended = (ReleaseStage.RELEASED, ReleaseStage.ROLLED_BACK)
        tried = [s for s in log.states if any(event.stage is ReleaseStage.STAGED for event in s.events)]
        for state in tried:
            if state.stage in ended and state.release.number not in done.outcomes:
                self._wait_for_servers()
                done.outcomes[state.release.number] = self._outcome(state)
                self._keep()
        current = log.current
        if current is None or current.release.number in done.scores:
            return
        if current.release.number == 1 or current.release.number in {s.release.number for s in tried}:
            self._wait_for_servers()
            done.scores[current.release.number] = self._score()
            done.suite = suite_change(self._site) or done.suite
            self._keep()

    def _outcome(self, state: ReleaseState) -> ReleaseOutcome:
        number = state.release.number
        mine = _turns_of(self._site, number)
        own = [turn for turn in self._users.turns if turn.turn in mine]
        decisions = [event.reason.partition("; ") for event in state.events if event.decided_by == "canary"]
        return ReleaseOutcome(
            number,
            _is_planted(state),
            state.stage is ReleaseStage.RELEASED,
            tuple(why for why, _, _ in decisions),
            mean_utility(own),
            self._seconds,
            next((lift for _, _, lift in reversed(decisions) if lift), ""),
        )

    def _score(self) -> HeldoutScore:
        """Scores the answers of the control's server to the held-out requests."""
        heldout, sizes = self._heldout, self.done.sizes
        made = asyncio.run(answers(self._cluster.control, sizes.model, heldout * sizes.samples, self.done.seed))
        of = [made[n :: len(heldout)] for n in range(len(heldout))]
        score = HeldoutScore([_share(own, "house") for own in of], [_share(own, "right") for own in of])
        house, right = np.mean(score.house), np.mean(score.right)
        self._log(f"held out: {house:.1%} of the answers keep the house rule, {right:.1%} are right")
        return score

    def _wait_for_servers(self) -> None:
        late = [store for store in wait(self._site) if store.lagging]
        if late:
            raise RunFailed(f"a server does not follow its weight store; see {self._cluster.logs}")

    # Parts of the story -----------------------------------------------------------------------------------------------

    def _last_window(self) -> int:
        with journal.reading(self._site.engine) as connection:
            return connection.execute(sa.select(sa.func.max(schema.windows.c.number))).scalar() or 0

    def _cut(self, number: int) -> None:
        """Cuts a window after enough turns since the last cut; those during a canary count."""
        users, before = self._users, self.done.windows.get(number - 1)
        seen = before.turns if before else 0
        if (missing := self.done.sizes.turns - (len(users.turns) - seen)) > 0:
            users.use(missing)
        new = users.turns[seen:]
        self.done.windows[number] = used = UsedWindow(len(users.turns), mean_utility(new))
        self._keep()
        self._log(f"window {number}: {len(new):,} turns, mean hidden utility {figures.shown(used.utility)}")
        time.sleep(self._site.config.labels.delay_seconds)
        step(self._site, self._log)

    def _plant(self, current: ReleaseState, planted: ReleaseState | None) -> None:
        """Brings a version with damaged weights to the canary, without the gate."""
        store = str(self._cluster.folder / "planted")
        manifest = newest_manifest(open_store(store)) or publish_damaged(current.release, store, self.done.seed)
        if planted is None:
            log, anchor = self._site.read(), current.release.anchor
            lie = GateReport(
                store=store,
                version=0,
                manifest=manifest.live,
                incumbent=current.release.number,
                anchor=anchor,
                parts=(),
                at=0,
            )
            release = Release(
                number=log.next_number,
                store=store,
                version=0,
                manifest=manifest.live,
                parent=current.release.number,
                anchor=anchor,
                report=keep_report(lie, None),
                window=None,
                at=0,
            )
            releases.begin(self._site.engine, release, ReleaseStage.GATE, "planted: the gate was not asked", _US)
        self._log("a version with damaged weights goes to the canary")
        start(self._site, manifest.live, 0)

    def _watch(self, trial: ReleaseState) -> None:
        """Watches the canary of a release, with users, until the release is for all accounts or rolled back. What shows
        neither in time is rolled back, as a person would."""
        number, events = trial.release.number, len(trial.events)
        self._log(f"release {number} is on trial")
        deadline = time.monotonic() + self.done.sizes.canary_seconds
        self._users.begin()
        while True:
            step(self._site, lambda _: None)
            state = self._site.read().of(number)
            for event in state.events[events:]:
                if event.decided_by == "canary":
                    where = f" at {event.share:.0%}" if event.share else ""
                    self._log(f"release {number}: {str(event.stage).replace('_', ' ')}{where}, {event.reason}")
            events = len(state.events)
            if state.stage in (ReleaseStage.RELEASED, ReleaseStage.ROLLED_BACK):
                break
            if time.monotonic() > deadline:
                if _is_planted(trial):
                    raise RunFailed(f"release {number} was not decided on; see {self._cluster.logs}")
                refuse(self._site, _US, "nothing was shown in time")
                continue
            time.sleep(_TICK_SECONDS)
        self._users.end()


def check_log(log: ReleaseLog, done: LiveDemo) -> None:
    """Raises UserError for a log without a release that has figures."""
    if unknown := sorted({*done.scores, *done.outcomes} - {state.release.number for state in log.states}):
        raise UserError(
            f"the demo's log, live/live.db, has no release {unknown[0]}, whose figures are there: restore the log, or "
            "start a demo without --resume"
        )


def _share(own: list[Judgement], figure: str) -> float:
    return float(np.mean([getattr(judgement, figure) for judgement in own]))


def _is_planted(state: ReleaseState) -> bool:
    return state.events[0].decided_by == _US


def _turns_of(site: ReleaseSite, number: int) -> set[str]:
    """The turns that a release has answered: no client is told which did."""
    turns, served = schema.turns.c, schema.served.c
    queries = (
        sa.select(turns.id).where(turns.release == number),
        sa.select(served.turn).where(served.release == number),
    )
    with site.engine.connect() as connection:
        return {turn for query in queries for turn in connection.scalars(query)}


def publish_damaged(release: Release, store: str, seed: int) -> PolicyVersion:
    """Publishes the content of a release with noise on its weights as version 0 of a store; returns the manifest."""
    from etude.weights.content import load
    from etude.weights.publisher import Publisher

    rng, tensors = np.random.default_rng((seed, 3)), {}
    for name, tensor in load(open_store(release.store), release.version)[1].items():
        noise = tensor.new_tensor(rng.normal(0.0, 1.0, tuple(tensor.shape)))
        tensors[name] = tensor + DAMAGE * tensor.std() * noise if tensor.numel() > 1 else tensor
    return Publisher(open_store(store)).publish(0, tensors, (), {})


def suite_change(site: ReleaseSite) -> SuiteChange | None:
    """The change on the gate's suite that the newest released version's report has; None before a learned release."""
    learned = [s for s in site.read().states if s.stage is ReleaseStage.RELEASED and s.release.window is not None]
    if not learned:
        return None
    gate, suite = site.config.gate, Path(site.config.gate.suites[0])
    parts = {part.name: part for part in read_report(learned[-1].release, site.key).parts}
    part = parts.get(f"suite {suite.name}, anchor", parts.get(f"suite {suite.name}"))
    if part is None:
        return None
    sizes = Counter(task.cluster for task in load_dataset(suite).tasks if task.split == SPLIT)
    margin = defended_margin(list(sizes.values()), DISCORDANT / gate.samples, gate.alpha)
    return SuiteChange(part.figures["tasks"], part.figures["functions"], part.figures["difference"], margin)
