"""The run: which loop consumes what, waits for what, and unblocks whom. This page is the architecture.

    tasks ──> [admit] ──> [play] ──────────────> ledger ──> [trainer] ──> versions ──> [engines]
                 ^           │  sandbox + engine  (groups)      │          (weights/)      │
                 └───────────┴──────── served version ──────────┴──────────────────────────┘

| loop    | process          | consumes                    | waits for                   | unblocks                  |
|---------|------------------|-----------------------------|-----------------------------|---------------------------|
| admit   | controller       | task ids (curriculum)       | capacity: a newer version   | play                      |
| play    | controller       | leased episodes             | a free slot, then the model | the group's last member   |
| trainer | trainer          | P ready groups              | the P-th ready group        | engines, and so admission |
| engine  | inference server | requests; newest manifest   | requests                    | play                      |
| twins   | controller       | impossible tasks            | a share of the episodes     | nobody: an alarm          |
| watch   | controller       | exit codes, served digests  | -                           | stops the run, with a why |
| probes  | controller       | engines at a new version    | -                           | what the trainer judges   |

Nothing here is per-token, and nothing is lost when a process dies: the ledger knows every admitted episode, a version's
manifest names the groups it was trained on, and `--resume` starts again from those two. A step of the trainer and the
episodes of later groups overlap; how far is the admission bound (`rollout/admission.py`), not a filter afterwards. How
many episodes are live is a number, or follows the engines' load (`rollout/concurrency.py`). If nothing moves, the watch
loop says who waits for whom, and at last ends the run (`rollout/stall.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from etude import processes
from etude.config import RLConfig, RolloutConfig
from etude.errors import RunFailed, UserError
from etude.failpoints import failpoint
from etude.grading.cheats import decoys
from etude.grading.cheats.decoys import Decoys
from etude.harness.edit_appliers import EditApplier, merge_applier, server_applier
from etude.harness.loop import Sampling
from etude.ledger.ledger import EpisodeLease, Ledger, blob_key
from etude.protocol.client import EngineClient, EngineError
from etude.records import Episode, Outcome, Task, encode
from etude.renderers import Renderer
from etude.rollout.admission import groups_to_admit
from etude.rollout.agent import Agent
from etude.rollout.concurrency import Concurrency
from etude.rollout.curriculum import Curriculum
from etude.rollout.engines import complaints
from etude.rollout.episode import EpisodeId, RolloutContext, run_branches, run_episode
from etude.rollout.probes import ProbeScorer
from etude.rollout.stall import LIMIT, StallSnapshot, StallWatchdog, diagnose
from etude.sandbox.base import Sandbox
from etude.store import Store
from etude.tasks.dataset import Dataset
from etude.weights.manifest import manifests, read

SWAP_SECONDS = 120.0
TICK_SECONDS = 0.1
STOP_SECONDS = 30.0  # for episodes that are cancelled to give up their boxes
OWNER = "controller"
SUMMED = ("running", "waiting", "generated_tokens")  # figures of all engines together
T = TypeVar("T")


@dataclass
class Progress:
    """What a viewer may show while a run goes on; the controller fills it, nobody reads it back."""

    version: int = 0
    served: int = 0
    accepted: int = 0  # episodes of finished groups
    trained: int = -1  # newest version that the ledger knows to have consumed groups
    live: int = 0
    limit: int = 0  # of live episodes
    finished: int = 0
    tests_run: int = 0
    tests_remembered: int = 0
    engine: dict[str, float] = field(default_factory=dict[str, float])


@dataclass
class Run:
    """The open parts of one run."""

    folder: Path
    config: RLConfig
    dataset: Dataset
    ledger: Ledger
    weights: Store
    rollouts: Store
    sandbox: Sandbox
    renderer: Renderer
    probes: ProbeScorer
    client: EngineClient
    engines: Sequence[str]  # base URLs
    children: Sequence[processes.Child]
    concurrency: Concurrency
    twins: Dataset | None = None  # the impossible ones
    agent: Agent | None = None  # an outside one
    progress: Progress = field(default_factory=Progress)
    digests: dict[int, str] = field(default_factory=dict[int, str])  # of the versions that engines have served
    digests_checked: int = 0
    complaints: set[str] = field(default_factory=set[str])  # of engines that are not configured alike
    pauses: dict[int, float] = field(default_factory=dict[int, float])  # ms that engines stood still, by version

    @property
    def setting(self) -> RolloutContext:
        """What evaluations and twins are played with; training also records experts, if it replays them."""
        rollout = self.config.rollout
        return RolloutContext(
            self.dataset, self.sandbox, self.client, self.renderer, rollout.budget(), sampling(rollout), self.agent,
            lay_of(rollout),
        )  # fmt: skip


def sampling(rollout: RolloutConfig) -> Sampling:
    """How a run's turns are sampled."""
    return Sampling(
        temperature=rollout.temperature,
        documents=rollout.documents,
        summarise_at=rollout.summarise_at,
        summary_tokens=rollout.summary_tokens,
    )


def lay_of(rollout: RolloutConfig) -> EditApplier:
    """What lays the sketches of the tool `apply` into files."""
    return server_applier(rollout.apply) if rollout.apply else merge_applier


def episode_seed(seed: int, group: int, member: int) -> int:
    """A 63-bit seed from counters, so that an episode's randomness does not depend on when or where it ran."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{group}/{member}".encode(), digest_size=8).digest()) >> 1


async def rollouts(run: Run, trainer: processes.Child, tick: Callable[[Progress], None]) -> None:
    """Admits and plays episodes until the trainer has published its last version. Raises RunFailed if a part dies."""
    rollout, progress = run.config.rollout, run.progress
    curriculum = Curriculum([task.id for task in run.dataset.split("train")], rollout.group, run.config.seed)
    learned = 0
    live: dict[asyncio.Task[None], _LiveEpisodes] = {}
    twins = _ImpossibleTasks(run)
    renewed = time.monotonic()
    stall = StallWatchdog(rollout.stall_seconds, renewed)
    try:
        while trainer.exit_code != 0:
            _watch(run)
            await _observe_versions(run)
            count = sum(len(playing.leases) for playing in live.values())
            run.concurrency.observe(time.monotonic(), count, _requests(run))
            learned = _admit(run, curriculum, learned)
            if (free := run.concurrency.limit - count) > 0:
                leases = run.ledger.lease(OWNER, free, rollout.lease_seconds, together=rollout.forks)
                for siblings in _families(leases, rollout.forks):
                    playing = _LiveEpisodes(siblings, time.monotonic())
                    live[asyncio.create_task(_play(run, playing))] = playing
                count += len(leases)
            twins.play()
            if time.monotonic() - renewed > rollout.lease_seconds / 3:
                run.ledger.renew(OWNER, rollout.lease_seconds)
                renewed = time.monotonic()
            progress.live, progress.limit = count, run.concurrency.limit
            progress.tests_run, progress.tests_remembered = run.sandbox.stats.misses, run.sandbox.stats.hits
            _look_for_a_stall(run, stall, list(live.values()))
            tick(progress)
            await asyncio.sleep(TICK_SECONDS)
            for task in [task for task in live if task.done()]:
                task.result()
                del live[task]
    finally:
        await _cancel([*live, *twins.live])


class _ImpossibleTasks:
    """Plays impossible tasks, one at a time, as a share of the episodes that ended. Whoever passes one has cheated."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._number = run.ledger.next_impossible()
        self.live: list[asyncio.Task[None]] = []

    def play(self) -> None:
        """Starts the next one if it is due. Raises what went wrong with the one before."""
        run = self._run
        for task in [task for task in self.live if task.done()]:
            self.live.remove(task)
            task.result()
        due = int(run.config.cheats.twins * run.progress.accepted)
        if run.twins is not None and run.twins.tasks and not self.live and self._number < due:
            self.live.append(asyncio.create_task(_play_twin(run, run.twins, self._number)))
            self._number += 1


@dataclass(frozen=True)
class _LiveEpisodes:
    """Episodes that are played together, those that have ended taken away; `since` is on the monotonic clock."""

    leases: list[EpisodeLease]
    since: float


def _families(leases: Sequence[EpisodeLease], forks: int) -> list[list[EpisodeLease]]:
    """Leases of members that fork from one trunk, each `forks` neighbours of a group; the order is kept."""
    return [list(g) for _, g in groupby(leases, lambda lease: (lease.group_id, lease.member // forks))]


async def _cancel(live: Collection[asyncio.Task[None]]) -> None:
    """Ends episodes. What does not give up in time is left to die with the sandbox, whose boxes it waits for."""
    for task in live:
        task.cancel()
    if live:
        done, _ = await asyncio.wait(live, timeout=STOP_SECONDS)
        for task in done:
            _ = task.cancelled() or task.exception()  # looked at, so that asyncio does not complain


def _requests(run: Run) -> int:
    """Requests at the engines, computed or waiting for a row."""
    return int(run.progress.engine.get("running", 0) + run.progress.engine.get("waiting", 0))


def _look_for_a_stall(run: Run, stall: StallWatchdog, live: Sequence[_LiveEpisodes]) -> None:
    """Says who waits for whom if nothing has moved for long; raises RunFailed if nothing has for much longer."""
    progress, now = run.progress, time.monotonic()
    marks = (progress.finished, progress.served, progress.trained, progress.engine.get("generated_tokens"))
    still = stall.observe(marks, now)
    if stall.warns(still):
        print(f"no progress for {still:.0f} s: {diagnose(_standing(run, live, now))}", file=sys.stderr, flush=True)
    if still > stall.seconds * LIMIT:
        raise RunFailed(
            f"no progress for {still:.0f} s: {diagnose(_standing(run, live, now))}; see the logs in "
            f"{run.folder / 'logs/latest'}, then continue with --resume {run.folder}, or raise rollout.stall_seconds"
        )


def _standing(run: Run, live: Sequence[_LiveEpisodes], now: float) -> StallSnapshot:
    """Reads from the store and the ledger what is too dear to read all the time."""
    rollout, published = run.config.rollout, last_version(run.weights)
    taken = run.ledger.ready_groups(
        rollout.prompts, in_order=run.config.deterministic, due=published - rollout.staleness
    )
    oldest = min((playing for playing in live if playing.leases), key=lambda playing: playing.since, default=None)
    lease = oldest and oldest.leases[0]
    return StallSnapshot(
        served=run.progress.served,
        published=published,
        prompts=rollout.prompts,
        ready=len(run.ledger.ready_groups(rollout.prompts, in_order=False)),
        takeable=len(taken),
        live=sum(len(playing.leases) for playing in live),
        at_engine=_requests(run),
        oldest=f"member {lease.member} of group {lease.group_id} (task {lease.task_id})" if lease else "",
        oldest_seconds=now - oldest.since if oldest else 0.0,
    )


def _watch(run: Run) -> None:
    """Raises RunFailed, or UserError where the user can help, if a process of the run is gone."""
    if not run.sandbox.alive:
        raise RunFailed(f"the sandbox zygote died; nothing is lost: continue with `etude train --resume {run.folder}`")
    for child in run.children:
        if (why := child.failure()) is not None:
            if child.exit_code == 2:  # it said in one sentence what the user can do
                raise UserError(why)
            raise RunFailed(f"{why}; nothing is lost: continue with `etude train --resume {run.folder}`")
        if child.exit_code == 0 and child.name != "trainer":
            raise RunFailed(f"the {child.name} ended by itself; see {child.log}, continue with --resume {run.folder}")


async def _observe_versions(run: Run) -> None:
    """The version that every engine serves, after proving that it serves those very tensors."""
    served: list[int] = []
    told: list[dict[str, Any]] = []
    for url in run.engines:
        try:
            health = await run.client.health(url)
        except EngineError as e:
            _watch(run)
            raise RunFailed(f"the engine at {url} does not answer ({e}); continue with --resume {run.folder}") from e
        if health["status"] == "failed":
            raise RunFailed(f"the engine at {url} failed: {health['error']}; continue with --resume {run.folder}")
        version = int(health["version"])
        if version not in run.digests and (found := read(run.weights, version)) is not None:
            run.digests[version] = found.digest
        digest = run.digests.get(version)
        if digest is not None and health["digest"] != digest:
            raise RunFailed(
                f"{url} serves other tensors than version {version} has (digest {health['digest'][:12]}, published "
                f"{digest[:12]}); admission stopped"
            )
        run.digests_checked += digest is not None
        run.pauses[version] = max(run.pauses.get(version, 0.0), float(health["last_pause_ms"]))
        told.append(health)
        served.append(version)
        if digest is not None:
            run.probes.served(url, version)
    configured = {url: health["configuration"] for url, health in zip(run.engines, told, strict=True)}
    for complaint in complaints(configured):
        if complaint not in run.complaints:
            print(f"guard engines, warn: {complaint}", file=sys.stderr, flush=True)
            run.complaints.add(complaint)
    run.progress.served = min(served)
    sums = {name: float(sum(health[name] for health in told)) for name in SUMMED}
    run.progress.engine = sums | {"busy_seconds": sum(health["busy_seconds"] for health in told) / len(told)}


def _learn(run: Run, curriculum: Curriculum, after: int) -> int:
    """Feeds groups that finished since group id `after` to the curriculum, in index order. Returns the new mark.

    On-policy, only groups of versions that are already trained count: those are complete, whatever the timing.
    """
    results = run.ledger.results(after, consumed_only=run.config.rollout.staleness == 0)
    for result in results:
        curriculum.observe(result.task_id, result.passed, result.episodes)
        after = result.mark
    return after


def _admit(run: Run, curriculum: Curriculum, learned: int) -> int:
    """Admits what the bound allows; returns the mark up to which the curriculum has learned."""
    rollout = run.config.rollout
    figures = run.ledger.figures()
    run.progress.trained, run.progress.accepted = figures.consumed_version, figures.accepted
    if rollout.staleness == 0 and run.progress.served > max(figures.consumed_version, 0):
        return learned  # on-policy, a draw depends on all earlier results: the ledger must catch up with the engines
    learned = _learn(run, curriculum, learned)
    count = groups_to_admit(
        version=run.progress.served,
        staleness=rollout.staleness,
        prompts=rollout.prompts,
        group=rollout.group,
        accepted=figures.accepted,
        reserved=figures.reserved,
        in_flight=figures.in_flight,
        max_in_flight=max(run.concurrency.limit, rollout.group) * 2,
    )
    count = min(count, run.config.trainer.steps * rollout.prompts - figures.groups)
    busy = frozenset(figures.open_tasks)
    for index in range(figures.groups, figures.groups + count):
        task = curriculum.draw(index, busy)
        busy |= {task}
        run.ledger.admit(index, task, rollout.group, run.progress.served)
    return learned


async def _play(run: Run, playing: _LiveEpisodes) -> None:
    """Plays leased episodes, one or several with a shared prefix, and records each as soon as it ends."""
    config, leases = run.config, {lease.member: lease for lease in playing.leases}
    first, forks, seed = playing.leases[0], config.rollout.forks, config.seed
    task = run.dataset.by_id[first.task_id]
    sampling = replace(run.setting.sampling, routes=config.trainer.router_replay)
    context, decoys = replace(run.setting, sampling=sampling, reward=config.reward), decoys_of(config, task)
    ids = [EpisodeId(x.group_id, x.member, x.attempt, episode_seed(seed, x.index, x.member)) for x in playing.leases]

    async def note(episode: Episode) -> None:
        if episode.outcome is Outcome.INFRA:
            await _explain(run)
        lease = leases[episode.member]
        record(run, lease, episode)
        playing.leases.remove(lease)
        run.progress.finished += 1
        failpoint("controller.finished")

    if forks == 1:
        await note(await run_episode(context, task, ids[0], decoys))
    else:
        # A seed beyond those of the members, and the same if some of the siblings are played again.
        seed = episode_seed(seed, first.index, config.rollout.group + first.member // forks)
        turns = config.rollout.fork_turns[seed % len(config.rollout.fork_turns)]
        await run_branches(context, task, ids, decoys, seed=seed, turns=turns, on_episode=note)


def decoys_of(config: RLConfig, task: Task) -> Decoys | None:
    """Those of a task that has some in this run; its twin has the same."""
    if task.sketch is not None or config.tasks.environment is not None:
        return None  # there is no repository to hide them in
    chosen = decoys.chosen(task.id, config.seed, config.cheats.decoys)
    return decoys.plant(task, config.seed) if chosen else None


async def _play_twin(run: Run, twins: Dataset, number: int) -> None:
    """Plays an impossible task in a box like any other, and says so if it is passed. Lost ones are not repeated."""
    seed = episode_seed(run.config.seed, number, -1)
    task = twins.tasks[seed % len(twins.tasks)]
    slot = EpisodeId(group_id=number, member=0, attempt=0, seed=seed)
    episode = await run_episode(replace(run.setting, dataset=twins), task, slot, decoys_of(run.config, task))
    if episode.outcome is Outcome.INFRA:
        await _explain(run)
        return
    key = f"twins/{number:06d}.msgpack"
    run.rollouts.put(key, encode(episode))
    run.ledger.add_impossible(number, episode, key)
    if episode.passed or episode.outcome is Outcome.TAMPERED:
        how = "passed" if episode.passed else f"tampered with ({episode.detail})"
        print(f"cheating: impossible twin {number} of task {task.id} was {how}", file=sys.stderr, flush=True)


async def _explain(run: Run) -> None:
    """Raises RunFailed if a lost episode is the first sign of a dead process: its retries would be lost as well."""
    await asyncio.sleep(TICK_SECONDS)  # a killed process takes a moment to be seen as gone
    _watch(run)


def record(run: Run, lease: EpisodeLease, episode: Episode) -> None:
    """Blob first, ledger second: a row that says "done" always has its tokens."""
    key = blob_key(lease.group_id, lease.member, lease.attempt)
    if episode.outcome is not Outcome.INFRA:
        run.rollouts.put(key, encode(episode))
    run.ledger.finish(
        lease,
        outcome=episode.outcome,
        reward=episode.reward,
        passed=episode.passed,
        blob=key,
        tokens=episode.sampled_tokens,
        min_version=episode.min_version,
        metrics=episode.metrics,
        flags=episode.flags,
    )


async def watched(run: Run, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or RunFailed as soon as a process that it needs is gone."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            _watch(run)
            await asyncio.wait([task], timeout=1.0)
        return task.result()
    finally:
        task.cancel()


async def wait_for_version(run: Run, version: int) -> None:
    """Until every engine serves at least `version`, digest proven. Raises RunFailed after two minutes."""
    deadline = time.monotonic() + SWAP_SECONDS
    while time.monotonic() < deadline:
        _watch(run)
        await _observe_versions(run)
        if run.progress.served >= version:
            return
        await asyncio.sleep(0.1)
    raise RunFailed(f"the engines did not reach version {version} within {SWAP_SECONDS:.0f} seconds")


async def check_documents(run: Run) -> None:
    """Raises UserError if episodes are to send documents and an engine refuses them for this model."""
    for url in run.engines if run.config.rollout.documents else ():
        health: dict[str, Any] = await run.client.health(url)
        if refusal := health["documents"]["refusal"]:
            raise UserError(f"{refusal}: set rollout.documents to false")


def start_trainer(folder: Path, logs: Path) -> processes.Child:
    """The trainer process."""
    return processes.start("trainer", ["etude.trainer.rl.process", str(folder)], logs / "trainer.log")


def last_version(weights: Store) -> int:
    """The newest published version; -1 before the first."""
    return max((m.version for m in manifests(weights)), default=-1)
