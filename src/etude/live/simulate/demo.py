"""The live loop as a demo: simulated users teach the nano model, through the processes that serve real ones.

    servers    one cluster of two `etude serve`, of the control and of the canary, each with a weight store
    gateway    `etude live serve` before them; users ask with OpenAI's client library (clients.py)
    loop       the legs of `etude live run`, one after the other: kept and undone edits train a version, the gate plays
               a frozen suite of the same library, the canary goes to 10, 50 and 100 % while users go on

After the first release a version with damaged weights bypasses the gate, and the canary has to stop it. Held-out
requests are about functions that no user's request is about.
"""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from etude import processes
from etude.code import fetch_library
from etude.config import (
    BuildConfig,
    LiveConfig,
    ServerConfig,
    WeightSource,
    bundled,
    find_model,
    validate,
)
from etude.errors import RunFailed, UserError
from etude.evals import Estimate, mean_difference
from etude.live.legs import LegKind, leg_of, step
from etude.live.log import schema
from etude.live.log.accounts import Accounts
from etude.live.log.records import LivePolicy, Release, ReleaseStage
from etude.live.log.tenants import create_key, digest_of, set_policy
from etude.live.release import releases
from etude.live.release.operations import ReleaseSite, open_site, start, wait
from etude.live.release.reports import GateReport, keep_report
from etude.live.simulate.clients import FunctionRequest, Judgement, Users, answers, mean_utility, requests
from etude.live.simulate.users import draw_population
from etude.run.engines import engine_url, spawn_engine
from etude.store import open_store
from etude.tasks import build_dataset

ACCOUNTS = 360
TURNS = 700  # of users before a window; after a canary it learns from the turns during the canary
SAMPLES = 2  # of each held-out request
DAMAGE = 0.6  # standard deviation of the noise on the planted version's weights, over that of each tensor
SUITE_TASKS = 40  # of the gate's suite, most of them held out
_HELDOUT = 0.4  # of the functions
_AT_ONCE = 12
_ZIPF = 0.3  # of activity: nearly every account has a request within a stage
_LIBRARY = ("pydash", "8.1.0", "30914c3e9d377ea2cd0d3c0a4f252889b08392f730a5eb4d117e5b598cdf1d52")
SUITE = BuildConfig(
    kinds=("mutation",), operators=("bool_flip", "negate_cond", "op_flip"), min_lines=1, max_lines=20,
    visible_failure=True, symptoms=False, max_tasks=SUITE_TASKS, per_function=1, heldout_fraction=0.9,
)  # fmt: skip
"""Of the gate: damage to one token, as in recipes/demo.toml."""
_TICK_SECONDS = 0.5
_CANARY_SECONDS = 420.0
_START_SECONDS = 120.0


@dataclass(frozen=True)
class HeldoutScore:
    """For each held-out request, the shares of answers that keep the house rule, and that are right."""

    house: list[float]
    right: list[float]


@dataclass(frozen=True)
class ReleaseOutcome:
    """The end of a release, and its time (seconds since the demo began). `utility`: mean of the release's answers to
    users; `reasons`: the canary's, of each stage; `lift`: its last sentence on the share of kept edits."""

    release: int
    planted: bool
    released: bool
    reasons: tuple[str, ...]
    utility: float
    seconds: float
    lift: str = ""


@dataclass
class LiveDemo:
    """The figures of the demo. `scores` are of the first release and of each later release to all accounts."""

    functions: list[str]  # of the held-out requests
    utility: list[float] = field(default_factory=list[float])  # of the answers before each window
    scores: list[HeldoutScore] = field(default_factory=list[HeldoutScore])
    outcomes: list[ReleaseOutcome] = field(default_factory=list[ReleaseOutcome])
    refused: list[str] = field(default_factory=list[str])  # by the gate, with its reasons
    turns: int = 0
    failed: int = 0  # requests
    lost: int = 0  # signals
    seconds: float = 0.0

    def rise(self, figure: str) -> Estimate:
        """The rise of a field of HeldoutScore from the first release to the last, with a bootstrap over functions."""
        first, last = getattr(self.scores[0], figure), getattr(self.scores[-1], figure)
        return mean_difference(first, last, self.functions)

    @property
    def planted_stopped(self) -> bool:
        """Whether a planted version was tried, and none was released."""
        planted = [outcome for outcome in self.outcomes if outcome.planted]
        return bool(planted) and not any(outcome.released for outcome in planted)

    @property
    def released(self) -> bool:
        """Whether a version that learned from users was released to all accounts."""
        return any(outcome.released and not outcome.planted for outcome in self.outcomes)


def run(folder: Path, seed: int, windows: int, say: Callable[[str], None]) -> LiveDemo:
    """Runs the demo in an empty folder. Raises UserError or RunFailed."""
    name, version, sha256 = _LIBRARY
    say(f"fetching {name} {version}")
    library = fetch_library(name, version, sha256, folder / "library")
    user_requests, heldout = requests(library, seed, _HELDOUT)
    say(f"{len(user_requests)} requests of users, {len(heldout)} held out; now the gate's suite")
    build_dataset(library, folder / "suite", SUITE, lambda *_: None)
    with _servers(folder) as servers:
        return _Demo(servers, user_requests, heldout, seed, say).run(windows)


# Processes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Servers:
    """A cluster of two servers, and the gateway before them."""

    folder: Path
    site: ReleaseSite
    control: str  # URL
    gateway: str
    key: str  # of the users' firm
    secret: str  # with which it signs their names


@contextmanager
def _servers(folder: Path) -> Iterator[_Servers]:
    children: list[processes.Child] = []
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    try:
        stores = [folder / "control", folder / "canary"]
        _publish_base(stores[0])
        for number, store in enumerate(stores):
            store.mkdir(exist_ok=True)
            served = ServerConfig(
                model=str(find_model("nano")),
                port=0,
                threads=1,
                cache_mb=64,
                served_model_name=("nano",),
                source=WeightSource(weights=str(store)),
            )
            children.append(spawn_engine(served, logs, number))
        urls = [engine_url(child, logs, number) for number, child in enumerate(children)]
        path = _write_config(folder, urls, stores)
        site = open_site(validate(LiveConfig, tomllib.loads(path.read_text("utf-8")), str(path)))
        try:
            key = create_key(site.engine, "firm", "users", proxy=True)
            secret = Accounts(Path(site.config.folder)).proxy_secret(digest_of(key))
            set_policy(site.engine, "firm", LivePolicy(requests_per_minute=10**6))
            ready = logs / "gateway.json"
            words = ["etude.cli.main", "live", "serve", str(path), "--ready-file", str(ready)]
            child = processes.start("gateway", words, logs / "gateway.log")
            children.append(child)
            address = msgspec.json.decode(processes.wait_for_file(ready, child, _START_SECONDS))
            yield _Servers(folder, site, urls[0], address["url"], key, secret)
        finally:
            site.engine.dispose()
    finally:
        for child in reversed(children):
            child.stop(10)


def _turns_of(site: ReleaseSite, number: int) -> set[str]:
    """The turns that a release has answered: no client is told which did."""
    turns, served = schema.turns.c, schema.served.c
    queries = (
        sa.select(turns.id).where(turns.release == number),
        sa.select(served.turn).where(served.release == number),
    )
    with site.engine.connect() as connection:
        return {turn for query in queries for turn in connection.scalars(query)}


def _write_config(folder: Path, urls: list[str], stores: list[Path]) -> Path:
    """Writes recipes/live.toml with this demo's servers, for the other commands of `etude live`."""
    recipes = [bundled(f"recipes/{name}.toml") for name in ("live", "live-train")]
    if recipes[0] is None or recipes[1] is None:
        raise UserError("this installation has no recipes/live.toml: install etude's wheel, or work in its repository")
    quoted = {
        name: msgspec.json.encode(value).decode()
        for name, value in {
            "folder": str(folder / "live"),
            "train": str(recipes[1]),
            "url": urls[0],
            "store": str(stores[0]),
            "canary_url": urls[1],
            "canary_store": str(stores[1]),
            "suite": str(folder / "suite"),
        }.items()
    }
    text = (
        recipes[0]
        .read_text("utf-8")
        .replace('\nstage = "live"\n', f'\nstage = "live"\nfolder = {quoted["folder"]}\ntrain = {quoted["train"]}\n', 1)
        .replace("\n[gate]\n", f"\n[gate]\nsuites = [{quoted['suite']}]\n", 1)
    )
    text += (
        f'\n[gateway]\nport = 0\n\n[[clusters]]\nname = "one"\nurls = [{quoted["url"]}]\nstore = {quoted["store"]}\n'
        f"canary_urls = [{quoted['canary_url']}]\ncanary_store = {quoted['canary_store']}\n"
    )
    path = folder / "live.toml"
    path.write_text(text, "utf-8")
    return path


def _publish_base(store: Path) -> None:
    """Publishes the nano model as version 0 of a weight store."""
    from etude.models.dtypes import main_dtype
    from etude.models.loading import load_model, named_tensors
    from etude.weights.publisher import Publisher

    model = find_model("nano")
    Publisher(open_store(str(store))).publish(0, named_tensors(load_model(model, dtype=main_dtype(model))), (), {})


# The story ------------------------------------------------------------------------------------------------------------


class _Demo:
    def __init__(
        self,
        servers: _Servers,
        user_requests: list[FunctionRequest],
        heldout: list[FunctionRequest],
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self._servers, self._site, self._seed, self._say = servers, servers.site, seed, say
        self._began = time.monotonic()
        self._heldout, self._seen = heldout, 0
        self.done = LiveDemo([request.function for request in heldout])
        rng = np.random.default_rng((seed, 2))
        window = self._site.config.labels.window_seconds
        self._users = Users(
            servers.gateway,
            servers.key,
            servers.secret,
            draw_population(rng, ACCOUNTS, zipf=_ZIPF),
            user_requests,
            window,
            rng,
            _AT_ONCE,
        )

    def run(self, windows: int) -> LiveDemo:
        """Runs all windows; each learns from the turns before its cut."""
        self._do(LegKind.GATE)
        self._do(LegKind.RELEASE)
        self._wait_for_servers()
        self._score()
        for number in range(1, windows + 1):
            self._learn(number)
            if number == 1:
                self._plant()
        users, done = self._users, self.done
        done.turns, done.lost = len(users.turns), users.lost
        done.failed = sum(not turn.turn for turn in users.turns)
        done.seconds = time.monotonic() - self._began
        return done

    def _log(self, text: str) -> None:
        seconds = int(time.monotonic() - self._began)
        self._say(f"{seconds // 60}:{seconds % 60:02} {text}")

    def _wait_for_servers(self) -> None:
        late = [store for store in wait(self._site) if store.lagging]
        if late:
            raise RunFailed(f"a server does not follow its weight store; see {self._servers.folder}/logs")

    def _score(self) -> None:
        """Scores the answers of the control's server to the held-out requests."""
        servers, heldout = self._servers, self._heldout
        made = asyncio.run(answers(servers.control, heldout * SAMPLES, self._seed, 2 * _AT_ONCE))
        of = [made[n :: len(heldout)] for n in range(len(heldout))]
        score = HeldoutScore([_share(own, "house") for own in of], [_share(own, "right") for own in of])
        self.done.scores.append(score)
        house, right = np.mean(score.house), np.mean(score.right)
        self._log(f"held out: {house:.1%} of the answers keep the house rule, {right:.1%} are right")

    def _learn(self, number: int) -> None:
        """Trains a version on the turns since the last window, and brings it to the gate and the canary."""
        site, turns = self._site, self._users.turns
        if self._seen == len(turns):  # also after a version that reached no user
            self._users.use(TURNS)
        new, self._seen = turns[self._seen :], len(turns)
        self.done.utility.append(mean_utility(new))
        self._log(f"window {number}: {len(new):,} turns, mean hidden utility {self.done.utility[-1]:.3f}")
        time.sleep(site.config.labels.delay_seconds)
        for kind in (LegKind.CUT, LegKind.TRAIN, LegKind.GATE):
            self._do(kind)
        last = site.read().states[-1]
        if last.stage is ReleaseStage.REFUSED:
            self.done.refused.append(last.events[-1].reason)
        else:
            self._do(LegKind.RELEASE)
            self._try(last.release.number)

    def _do(self, kind: LegKind, quiet: bool = False) -> None:
        """Does the next leg of the loop, which has to be `kind`."""
        if (leg := leg_of(self._site)).kind is not kind:
            raise RunFailed(f"the loop is at its leg {leg.kind} ({leg.why}), not at {kind}")
        step(self._site, (lambda _: None) if quiet else self._log)

    def _plant(self) -> None:
        """Brings a version with damaged weights to the canary, without the gate."""
        from etude.weights.content import load
        from etude.weights.publisher import Publisher

        current = self._site.read().current
        assert current is not None
        rng = np.random.default_rng((self._seed, 3))
        tensors = {}
        for name, tensor in load(open_store(current.release.store), current.release.version)[1].items():
            noise = tensor.new_tensor(rng.normal(0.0, 1.0, tuple(tensor.shape)))
            tensors[name] = tensor + DAMAGE * tensor.std() * noise if tensor.numel() > 1 else tensor
        store = str(self._servers.folder / "planted")
        manifest = Publisher(open_store(store)).publish(0, tensors, (), {})
        log, anchor = self._site.read(), current.release.anchor
        lie = GateReport(
            store=store,
            version=0,
            manifest=manifest.digest,
            incumbent=current.release.number,
            anchor=anchor,
            parts=(),
            at=0,
        )
        release = Release(
            number=log.next_number,
            store=store,
            version=0,
            manifest=manifest.digest,
            parent=current.release.number,
            anchor=anchor,
            report=keep_report(lie, None),
            window=None,
            at=0,
        )
        releases.begin(self._site.engine, release, ReleaseStage.GATE, "planted: the gate was not asked", "demo")
        self._try(start(self._site, manifest.digest, 0).release.number, planted=True)

    def _try(self, number: int, planted: bool = False) -> None:
        """Watches the canary of a release, with users, until the release is for all accounts or rolled back."""
        self._log(f"release {number} goes to the canary" + (", planted: its weights are damaged" if planted else ""))
        before, deadline = len(self._users.turns), time.monotonic() + _CANARY_SECONDS
        self._users.begin()
        stages = 0
        while True:
            self._do(LegKind.WATCH, quiet=True)
            state = self._site.read().of(number)
            for event in state.events[stages:]:
                if event.decided_by == "canary":
                    where = f" at {event.share:.0%}" if event.share else ""
                    self._log(f"release {number}: {str(event.stage).replace('_', ' ')}{where}, {event.reason}")
            stages = len(state.events)
            if state.stage in (ReleaseStage.RELEASED, ReleaseStage.ROLLED_BACK):
                break
            if time.monotonic() > deadline:
                raise RunFailed(f"release {number} was not decided on within {_CANARY_SECONDS:.0f} seconds")
            time.sleep(_TICK_SECONDS)
        self._users.end()
        self._wait_for_servers()
        mine = _turns_of(self._site, number)
        own = [turn for turn in self._users.turns[before:] if turn.turn in mine]
        released = state.stage is ReleaseStage.RELEASED
        decisions = [event.reason.partition("; ") for event in state.events if event.decided_by == "canary"]
        reasons, lift = (
            tuple(why for why, _, _ in decisions),
            next((lift for _, _, lift in reversed(decisions) if lift), ""),
        )
        self.done.outcomes.append(
            ReleaseOutcome(number, planted, released, reasons, mean_utility(own), time.monotonic() - self._began, lift)
        )
        if released:
            self._score()


def _share(own: list[Judgement], figure: str) -> float:
    return float(np.mean([getattr(judgement, figure) for judgement in own]))


def report(done: LiveDemo) -> str:
    """The figures of the demo as Markdown."""
    house, right = done.rise("house"), done.rise("right")
    lines = [
        "# Live loop",
        "",
        f"{done.turns:,} turns of {ACCOUNTS} simulated users in {done.seconds / 60:.1f} minutes; {done.failed} "
        f"requests failed, {done.lost} signals were lost.",
        "",
        "| | before | after | change |",
        "|---|---|---|---|",
        _row("held-out answers that keep the house rule", done, "house", house),
        _row("held-out answers that are right", done, "right", right),
        "",
        f"{len(set(done.functions))} held-out functions, {len(done.functions)} requests, {SAMPLES} answers each; "
        "intervals are bootstraps over functions.",
        "",
        "| release | outcome | at | hidden utility of its answers | against the control, by account |",
        "|---|---|---|---|---|",
        *map(_outcome, done.outcomes),
        "",
        *(f"- The gate refused a version: {reason}" for reason in done.refused),
        f"Mean hidden utility of the users' answers before each window: {', '.join(f'{u:.3f}' for u in done.utility)}.",
    ]
    return "\n".join(lines) + "\n"


def _outcome(o: ReleaseOutcome) -> str:
    name, what = f"{o.release}{' (planted)' if o.planted else ''}", "released" if o.released else "rolled back"
    at = f"{int(o.seconds) // 60}:{int(o.seconds) % 60:02}"
    return f"| {name} | {what}: {o.reasons[-1] if o.reasons else ''} | {at} | {o.utility:.3f} | {o.lift or '-'} |"


def _row(what: str, done: LiveDemo, figure: str, rise: Estimate) -> str:
    first, last = (float(np.mean(getattr(score, figure))) for score in (done.scores[0], done.scores[-1]))
    return f"| {what} | {first:.1%} | {last:.1%} | {rise.mean:+.1%} [{rise.low:+.1%}, {rise.high:+.1%}] |"


def as_json(done: LiveDemo) -> dict[str, Any]:
    """The figures of the demo as JSON."""
    return {
        "house": [float(np.mean(score.house)) for score in done.scores],
        "right": [float(np.mean(score.right)) for score in done.scores],
        **{f"{figure}_rise": [(e := done.rise(figure)).mean, e.low, e.high] for figure in ("house", "right")},
        "utility": done.utility,
        "outcomes": msgspec.to_builtins(done.outcomes),
        "refused": done.refused,
        "turns": done.turns,
        "failed": done.failed,
        "lost": done.lost,
        "seconds": done.seconds,
        "planted_stopped": done.planted_stopped,
        "released": done.released,
    }
