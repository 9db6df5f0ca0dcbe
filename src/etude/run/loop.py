"""The controller and the loops of a run: what each consumes, waits for and unblocks. This page is the architecture.

    repository ──> tasks ──> rollout ──────────> ledger ──> trainer ──> weights ──> inference
                     ^       (sandbox, harness,  (every     (losses)    (versions)  (engines)
                     │        grading)            episode                              │
                     │         ^                  once)                                │
                     └─────────┴─────────── the served version plays the next ─────────┘

| loop       | process          | consumes                   | waits for                   | unblocks                  |
|------------|------------------|----------------------------|-----------------------------|---------------------------|
| admission  | controller       | task ids (curriculum)      | capacity: a newer version   | rollout                   |
| rollout    | controller       | leased episodes            | a free slot, then the model | the group's last member   |
| trainer    | trainer          | P ready groups             | the P-th ready group        | inference, so admission   |
| inference  | inference server | requests; newest manifest  | requests                    | rollout                   |
| impossible | controller       | impossible tasks           | a share of the episodes     | nothing: an alarm         |
| watch      | controller       | exit codes, served digests | -                           | stops the run, with a why |
| probes     | controller       | engines at a new version   | -                           | the trainer's guards      |

No loop runs once per token, and a process that dies loses nothing: every admitted episode is in the ledger, a version's
manifest names the groups it was trained on, and `--resume` starts again from those two. A step of the trainer and the
episodes of later groups overlap, as far as the admission bound allows (`rollout/admission.py`); no filter drops stale
episodes afterwards. The number of live episodes is fixed, or follows the engines' load (`rollout/concurrency.py`). If
nothing moves, the watch loop prints what the run waits for, and at last ends the run (`rollout/stall.py`).
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence

from etude.errors import RunFailed
from etude.ledger import MemberPlayer
from etude.processes import settle_objects
from etude.rollout import (
    STALL_LIMIT,
    Curriculum,
    MixedCurriculum,
    StallSnapshot,
    StallWatchdog,
    diagnose_stall,
    groups_to_admit,
)
from etude.run import sources
from etude.run.episodes import cancel, play_impossible
from etude.run.leased import LeasedEpisodes, LiveEpisode
from etude.run.state import Progress, Run, check_processes, last_version
from etude.run.versions import observe_versions

TICK_SECONDS = 0.1
PLAYERS_SECONDS = 1.0  # between two looks at the episodes that players have leased
SILENT_SECONDS = 30.0  # without a beat, after which a player offers nothing
GROUPS_AT_ONCE = 32  # admitted; on-policy, where a draw depends on what is open, all
OWNER = "controller"


async def rollouts(run: Run, tick: Callable[[Progress], None]) -> None:
    """Admits and plays episodes until the trainer has published its last version. Raises RunFailed if a part dies."""
    settle_objects()
    rollout, progress = run.config.rollout, run.progress
    curriculum = sources.curriculum_of(run.pool.taskset, rollout.group, run.config.seed)
    learned = 0
    episodes = LeasedEpisodes(run, OWNER)
    impossible = _ImpossibleTasks(run)
    stall = StallWatchdog(rollout.stall_seconds, time.monotonic())
    players = _Players(run)
    try:
        while run.trainer.exit_code != 0:
            check_processes(run)
            await observe_versions(run)
            live = episodes.live
            elsewhere = await players.look()
            progress.live = len(live) + elsewhere
            run.concurrency.rows = max(1, len(run.engines.serving)) * run.config.inference.max_batch
            run.concurrency.observe(time.monotonic(), progress.live, _requests(run))
            for number in sources.arrived(run.folder, run.pool):
                await asyncio.to_thread(sources.join, run.config, run.folder, run.pool, number)
                sources.extend(curriculum, run.pool.taskset, rollout.group, run.config.seed)
            # In threads: episodes go on while the ledger's server is away.
            learned = await asyncio.to_thread(_admit, run, curriculum, learned)
            await episodes.fill(0 if run.fleet.playing else run.concurrency.limit - elsewhere)
            impossible.play()
            progress.limit = run.concurrency.limit
            progress.tests_run, progress.tests_remembered = run.sandbox.stats.misses, run.sandbox.stats.hits
            _check_stall(run, stall, live)
            tick(progress)
            await asyncio.sleep(TICK_SECONDS)
            episodes.reap()
    finally:
        await episodes.close()
        await cancel(impossible.live)
        await players.close()


class _Players:
    """The players of a run, as its ledger has them: the stage of the run for them, and their live episodes."""

    def __init__(self, run: Run) -> None:
        self._run, self._looked, self._live = run, -math.inf, 0
        self._beats: dict[str, tuple[int, float]] = {}  # the last of each player, and when it was new
        self._rest: set[str] = set()

    async def look(self) -> int:
        """The number of episodes that players have leased. The first look begins the stage for them."""
        run, now = self._run, time.monotonic()
        if now > self._looked + PLAYERS_SECONDS:
            if self._looked < 0:
                await asyncio.to_thread(run.ledger.members.set_stage, "training")
            self._looked = now
            held = await asyncio.to_thread(run.ledger.members.players)
            self._live = sum(count for owner, count in held.items() if owner != OWNER)
            rows = await asyncio.to_thread(run.ledger.members.offers)
            run.progress.offered = sum([row.episodes for row in rows if await self._lives(row, now)])
        return self._live

    async def _lives(self, row: MemberPlayer, now: float) -> bool:
        """Whether the player is not silent. One that is is forgotten: it comes back with its next beat. One that rests
        is printed once."""
        if self._beats.get(row.owner, (-1, 0.0))[0] != row.beat:
            self._beats[row.owner] = row.beat, now
        if now - self._beats[row.owner][1] > SILENT_SECONDS:
            del self._beats[row.owner]
            await asyncio.to_thread(self._run.ledger.members.withdraw, row.owner)
            return False
        if row.why and row.owner not in self._rest:
            print(f"the player {row.owner} rests: {row.why}", file=sys.stderr)
        (self._rest.add if row.why else self._rest.discard)(row.owner)
        return True

    async def close(self) -> None:
        """Ends the stage for the players."""
        await asyncio.to_thread(self._run.ledger.members.set_stage, "ended")


class _ImpossibleTasks:
    """Impossible tasks, played one at a time as a share of the accepted episodes. A model that passes one cheats."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._number = run.ledger.next_impossible()
        self.live: list[asyncio.Task[None]] = []

    def play(self) -> None:
        """Starts the next task if it is due. Raises the exception of the task before."""
        run, tasks = self._run, self._run.impossible
        for task in [task for task in self.live if task.done()]:
            self.live.remove(task)
            task.result()
        due = int(run.config.cheats.impossible * run.progress.accepted)
        if tasks is not None and tasks.tasks and not self.live and self._number < due:
            self.live.append(asyncio.create_task(play_impossible(run, tasks, self._number)))
            self._number += 1


def _requests(run: Run) -> int:
    """The requests at all engines, running or waiting."""
    return int(run.progress.engine.get("running", 0) + run.progress.engine.get("waiting", 0))


def _admit(run: Run, curriculum: Curriculum | MixedCurriculum, learned: int) -> int:
    """Admits as many groups as the bound allows; returns the mark of the last result that the curriculum has seen."""
    rollout = run.config.rollout
    figures = run.ledger.figures()
    run.progress.trained, run.progress.accepted = figures.consumed_version, figures.accepted
    run.progress.in_flight = figures.in_flight
    run.progress.ended = figures.accepted + figures.reserved - figures.in_flight
    if rollout.staleness == 0 and run.progress.served > max(figures.consumed_version, 0):
        return learned  # on-policy, a draw depends on all earlier results: the ledger must catch up with the engines
    # On-policy, only groups of versions that are already trained count: those are complete, whatever the timing.
    for result in run.ledger.results(learned, consumed_only=rollout.staleness == 0):
        curriculum.observe(result.task_id, result.passed, result.episodes)
        learned = result.mark
    count = groups_to_admit(
        version=run.progress.served,
        staleness=rollout.staleness,
        prompts=rollout.prompts,
        group=rollout.group,
        accepted=figures.accepted,
        reserved=figures.reserved,
        in_flight=figures.in_flight,
        max_in_flight=max(run.concurrency.limit, run.progress.offered, rollout.group) * 2,
    )
    count = min(count, run.config.trainer.steps * rollout.prompts - figures.groups)
    count = min(count, GROUPS_AT_ONCE) if rollout.staleness else count
    busy = frozenset(figures.open_tasks)
    for index in range(figures.groups, figures.groups + count):
        task = curriculum.draw(index, busy)
        busy |= {task}
        run.ledger.admit(index, task, rollout.group, run.progress.served)
    return learned


def _check_stall(run: Run, stall: StallWatchdog, live: Sequence[LiveEpisode]) -> None:
    """Prints what the run waits for after rollout.stall_seconds without progress; raises RunFailed after
    `STALL_LIMIT` times as long."""
    progress, now = run.progress, time.monotonic()
    timeline = run.folder / "timeline.jsonl"  # where the trainer notes steps that it computes again after a resume
    repeated = timeline.stat().st_size if timeline.exists() else 0
    tokens = progress.engine.get("generated_tokens")
    marks = (progress.ended, progress.in_flight, progress.served, progress.trained, tokens, repeated)
    still = stall.observe(marks, now)
    if stall.warns(still):
        print(f"no progress for {still:.0f} s: {diagnose_stall(_snapshot(run, live, now))}", file=sys.stderr)
    if still > stall.seconds * STALL_LIMIT:
        raise RunFailed(
            f"no progress for {still:.0f} s: {diagnose_stall(_snapshot(run, live, now))}; see the logs in "
            f"{run.folder / 'logs/latest'}, then continue with --resume {run.folder}, or raise rollout.stall_seconds"
        )


def _snapshot(run: Run, live: Sequence[LiveEpisode], now: float) -> StallSnapshot:
    """The figures of a stall, read from store and ledger; too costly for every tick."""
    rollout, published = run.config.rollout, last_version(run.weights)
    taken = run.ledger.ready_groups(
        rollout.prompts, in_order=run.config.deterministic, due=published - rollout.staleness
    )
    oldest = min(live, key=lambda episode: episode.since, default=None)
    lease = oldest and oldest.lease
    return StallSnapshot(
        served=run.progress.served,
        published=published,
        prompts=rollout.prompts,
        ready=len(run.ledger.ready_groups(rollout.prompts, in_order=False)),
        takeable=len(taken),
        live=run.progress.live,
        at_engine=_requests(run),
        oldest=f"member {lease.member} of group {lease.group_id} (task {lease.task_id})" if lease else "",
        oldest_seconds=now - oldest.since if oldest else 0.0,
    )
