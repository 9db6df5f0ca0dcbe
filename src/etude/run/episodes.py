"""Episodes of a run: leased episodes are played, scored and recorded; impossible tasks are played beside them."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace

from etude.errors import RunFailed, UserError
from etude.failpoints import failpoint
from etude.harness import EngineModel, Model
from etude.ledger import EpisodeLease, blob_key, put_blob
from etude.protocol import GenerateRequest
from etude.protocol.backends import EngineClient, OnPart
from etude.records import Episode, Generation, Outcome, Task
from etude.rollout import EpisodeId, EpisodeJournal, RolloutContext, Taskset, open_journal, run_episode
from etude.run.state import Play, Run

STOP_SECONDS = 30.0  # until cancelled episodes have closed their boxes
NOTICE_SECONDS = 0.1  # until a killed process is seen as gone
QUARANTINED_SHARE = 0.1  # of the episodes that have ended, above which the run ends
FEW_QUARANTINED = 8  # quarantined episodes, up to which a run goes on in any case


class TooManyQuarantined(RunFailed):
    """Too many episodes of this process are quarantined."""


def episode_seed(seed: int, group: int, member: int) -> int:
    """A 63-bit seed from counters, so that an episode's randomness does not depend on when or where it ran."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{group}/{member}".encode(), digest_size=8).digest()) >> 1


async def play_leased(play: Play, lease: EpisodeLease) -> None:
    """Plays a leased episode, and records it when it ends."""
    taskset = play.pool.taskset
    task = taskset.by_id.get(lease.task_id)
    if task is None:
        raise UserError(
            f"group {lease.group_id} of the ledger is of task {lease.task_id}, which no source of {play.folder} has: "
            "restore its tasks, or start a new run"
        )
    seed = episode_seed(play.config.seed, lease.index, lease.member)
    episode_id = EpisodeId(lease.group_id, lease.member, lease.attempt, seed)
    journal = await _journal(play, lease)
    context = replace(play.training, taskset=taskset, model=_since_admission(play.training.model, lease.version))
    episode = await _play(play, context, task, episode_id, journal)
    # Of a player whose host is broken, or without an engine, the failure says nothing about the episode.
    blamed = play.row is None or (_served(context.model) and not play.row.add(episode))
    if journal is not None:
        await journal.close(keep=episode.outcome is Outcome.INFRA)
    # In a thread: a database that is away delays this episode alone.
    await asyncio.to_thread(_record, play, lease, episode, journal, blamed)
    play.progress.finished += 1
    failpoint("controller.finished")
    if episode.outcome is Outcome.QUARANTINED:
        _alarm(play, episode)


def _served(model: Model) -> bool:
    """Whether an engine gets turns: else a lost episode is not its host's fault."""
    policy = model.policy if isinstance(model, EngineModel) else None
    return not isinstance(policy, _SinceAdmission) or bool(policy.client.serving)


@dataclass(frozen=True)
class _SinceAdmission:
    """The policy of an episode: older weights than those that its group was admitted under sample none of its
    tokens."""

    client: EngineClient
    version: int

    async def generate(
        self, request: GenerateRequest, timeout: float, on_part: OnPart | None = None, begun: Generation | None = None
    ) -> Generation:
        return await self.client.generate(request, timeout, on_part, begun, oldest=self.version)


def _since_admission(model: Model, version: int) -> Model:
    if not isinstance(model, EngineModel) or not isinstance(model.policy, EngineClient):
        return model
    return replace(model, policy=_SinceAdmission(model.policy, version))


async def play_impossible(run: Run, tasks: Taskset, number: int) -> None:
    """Plays an impossible task in a box like other tasks, and prints an alarm if it is passed. An episode lost to
    infrastructure is not repeated."""
    seed = episode_seed(run.config.seed, number, -1)
    task = tasks.tasks[seed % len(tasks.tasks)]
    episode_id = EpisodeId(group_id=number, member=0, attempt=0, seed=seed)
    episode = await _play(run, replace(run.measuring, taskset=tasks), task, episode_id)
    if episode.outcome is Outcome.QUARANTINED:
        _alarm(run, episode)
    if episode.outcome.lost:
        return
    key = f"impossible/{number:06d}.msgpack"
    await asyncio.to_thread(lambda: run.ledger.add_impossible(number, episode, put_blob(run.rollouts, key, episode)))
    if episode.passed or episode.outcome is Outcome.TAMPERED:
        how = "passed" if episode.passed else f"tampered with ({episode.detail})"
        print(f"cheating: impossible task {number}, made of {task.id}, was {how}", file=sys.stderr)


async def cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels episodes. An episode still running after `STOP_SECONDS` ends with the sandbox, whose box it waits for."""
    for task in tasks:
        task.cancel()
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=STOP_SECONDS)
        for task in done:
            _ = task.cancelled() or task.exception()  # read, so that asyncio does not complain


async def _journal(play: Play, lease: EpisodeLease) -> EpisodeJournal | None:
    """The journal of a leased episode; None for an outside agent, whose state nobody can record."""
    if play.training.agent is not None:
        return None
    return await open_journal(play.rollouts, lease.group_id, lease.member, lease.attempt)


async def _play(
    play: Play, context: RolloutContext, task: Task, episode_id: EpisodeId, journal: EpisodeJournal | None = None
) -> Episode:
    """Plays an episode with the task's decoys, which its impossible version has, too. Raises RunFailed if a process has
    died, the cause of a lost episode: its retries would be lost as well."""
    config = play.config
    decoys = context.taskset.of(task)[0].decoys(task, config.seed, config.cheats.decoys)
    episode = await run_episode(context, task, episode_id, decoys, journal)
    if episode.outcome is Outcome.INFRA:
        await asyncio.sleep(NOTICE_SECONDS)
        play.check()
    return episode


def _record(
    play: Play, lease: EpisodeLease, episode: Episode, journal: EpisodeJournal | None, blamed: bool = True
) -> None:
    """Blob first, ledger second, then the journal goes: a row that says "done" always has its tokens. An episode that
    infrastructure lost goes on from its journal, unless it was lost before it recorded anything new: then the recorded
    part may be what leads there."""
    key = blob_key(lease.group_id, lease.member, lease.attempt)
    blob = None if episode.outcome.lost else put_blob(play.rollouts, key, episode)
    taken = play.ledger.finish(
        lease,
        outcome=episode.outcome,
        reward=episode.reward,
        passed=episode.passed,
        blob=blob,
        tokens=episode.sampled_tokens,
        min_version=episode.min_version,
        metrics=episode.metrics,
        flags=episode.flags,
        reason=episode.detail if episode.outcome.lost else "",
        recovered=None if journal is None else journal.recovered,
        blamed=blamed,
    )
    if journal is not None and taken and (episode.outcome is not Outcome.INFRA or not journal.grew):
        journal.delete()


def _alarm(play: Play, episode: Episode) -> None:
    """Prints that an episode is quarantined. Raises TooManyQuarantined if too many are: the fault is then no rare one,
    and the remaining episodes of the groups are no fair sample of the policy."""
    play.progress.quarantined += 1
    what = f"episode {episode.id} (task {episode.task_id}) is quarantined, not trained on: {episode.detail}"
    print(what, file=sys.stderr)
    count, of = play.progress.quarantined, max(play.progress.finished, 1)
    if count > max(FEW_QUARANTINED, QUARANTINED_SHARE * of):
        raise TooManyQuarantined(
            f"{count} of {of} episodes are quarantined, the last for {episode.detail}: this is a mistake in etude or "
            f"in your code that it calls; once it is mended, continue with --resume {play.folder}"
        )
