"""One episode from beginning to end (`run_episode`): a box, the agent loop, the grade, the record.

An infrastructure failure, proved not to be the agent's, is one of INFRA_ERRORS. Its episode has the outcome INFRA:
it is repeated, and has no reward. Any other exception is a mistake in etude, even if the agent provoked it: its
episode is QUARANTINED, without a reward, and the others go on. The agent pays for everything else that breaks.

The reward is settled in two places. `record` settles it when an episode ends: the grade, nothing if a decoy was used,
less the costs of `[reward]` (`rewards.py`). `group_audit.audit_group` may take the grade back when a group is complete;
it compares the members.
"""

import asyncio
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from etude.config import RewardConfig
from etude.errors import RunFailed, UserError
from etude.grading import Grade, note_state
from etude.grading.cheats import CheatSignals, Decoys, cheat_signals
from etude.harness import (
    Aborted,
    EpisodeSpec,
    Model,
    Toolset,
    UngradedEpisode,
    open_task,
    run_agent_loop,
)
from etude.protocol.backends import EngineError
from etude.records import Budget, Episode, Outcome, StopReason, Task, encode
from etude.renderers import escaped, one_line
from etude.rollout import apply_edits
from etude.rollout.agent import Agent, run_agent
from etude.rollout.environment import EnvironmentDataset, EnvironmentFailed
from etude.rollout.rewards import with_reward
from etude.sandbox import Box, BoxError, Sandbox
from etude.sandbox.egress import EgressRequest
from etude.tasks import Dataset
from etude.tasks.foreign import FOREIGN

BOX_SECONDS = 120.0  # to make a box, and to read the changes from it
GRADE_SECONDS = 900.0  # to be graded, most of it a wait for the test runs before; those have deadlines of their own
INFRA_ERRORS = (BoxError, EngineError, Aborted, TimeoutError, EnvironmentFailed)
MAX_DETAIL = 500  # characters of the reason of a lost episode
FRAMES = 6  # of a traceback that are named in it


@dataclass(frozen=True)
class RolloutContext:
    """The common settings of a run's or an evaluation's episodes; a task may have a budget of its own. An outside
    `agent` takes the place of the agent loop. `reward` has the costs that are subtracted from grades; without it the
    reward is the grade, as in evaluations."""

    dataset: Dataset
    sandbox: Sandbox
    model: Model
    budget: Budget
    agent: Agent | None = None
    toolset: Toolset = field(default_factory=Toolset)
    reward: RewardConfig | None = None

    def budget_of(self, task: Task) -> Budget:
        """The budget of an episode of `task`."""
        return task.budget or self.budget

    def spec(self, task: Task, seed: int) -> EpisodeSpec:
        """The specification of an episode of `task`."""
        return EpisodeSpec(task, self.model, self.budget_of(task), seed, self.toolset)


async def open_box(
    context: RolloutContext, task: Task, decoys: Decoys | None = None, agent: Agent | None = None
) -> Box:
    """The agent's box, decoys included. Raises one of INFRA_ERRORS."""
    image, limits = context.dataset.image(task), context.dataset.limits(task)
    if decoys is not None:
        image = replace(image, decoys=decoys.files)
    if agent is not None:
        image, limits = agent.image(image), agent.limits
    async with asyncio.timeout(BOX_SECONDS):
        return await context.sandbox.create(image, limits)


@dataclass(frozen=True)
class EpisodeId:
    """The identity of an episode in a run, and its seed."""

    group_id: int
    member: int
    attempt: int
    seed: int


async def run_episode(context: RolloutContext, task: Task, id: EpisodeId, decoys: Decoys | None = None) -> Episode:
    """Plays and grades one attempt at `task`. `decoys` lie in the agent's box. Raises UserError where the user can
    help: the outside agent cannot start, or the environment's code is wrong."""
    spec = context.spec(task, id.seed)
    try:
        if isinstance(context.dataset, EnvironmentDataset):
            return record(context, task, id, *await context.dataset.attempt(spec, context.sandbox))
        if task.sketch is not None:
            return record(context, task, id, *await apply_edits.attempt(spec))
        box = await open_box(context, task, decoys, context.agent)
        try:
            if context.agent is None:
                ungraded = await run_agent_loop(spec, await open_task(spec, box))
            else:
                ungraded = await run_agent(spec, context.agent, box)
            changes, fault = await changes_of(box, ungraded, task)
        finally:
            await box.close()
        grade, signals = await grade_of(context, task, ungraded, changes, fault, decoys, box.requests())
        return record(context, task, id, ungraded, grade, signals.figures, signals.flags)
    except Exception as e:
        return lost(context, task, id, e)


async def changes_of(
    box: Box, ungraded: UngradedEpisode, task: Task
) -> tuple[Mapping[str, bytes | None], Grade | None]:
    """The agent's change set, and None; or an empty one, and the grade of an episode without a change set."""
    if ungraded.timed_out:
        return {}, Grade(Outcome.TIMEOUT, 0.0, False, "a tool did not end in time", None)
    try:
        async with asyncio.timeout(BOX_SECONDS):
            if task.kind == FOREIGN:
                await note_state(box)
            return await box.changes(task.source_roots), None
    except BoxError as e:
        if e.payer == "infra":
            raise
        return {}, Grade(Outcome.SCORED, 0.0, False, f"the box was left unreadable: {e}", None)


async def grade_of(
    context: RolloutContext,
    task: Task,
    ungraded: UngradedEpisode,
    changes: Mapping[str, bytes | None],
    fault: Grade | None,
    decoys: Decoys | None,
    requests: Sequence[EgressRequest] | None,
) -> tuple[Grade, CheatSignals]:
    """The grade of the changes by the hidden tests, and the signals of cheating in the whole episode."""
    image = context.dataset.image(task)
    if fault is not None:
        return fault, cheat_signals(task, image, {}, ungraded.turns, decoys, fault, False, requests)
    async with asyncio.timeout(GRADE_SECONDS):
        graded = await context.dataset.grade(context.sandbox, task, changes)
    if ungraded.note:
        graded = replace(graded, detail=f"{graded.detail}; {ungraded.note}")
    signals = await asyncio.to_thread(  # it may take a while on an agent's files
        cheat_signals, task, image, changes, ungraded.turns, decoys, graded, ungraded.visible_passed, requests
    )
    if "decoy" in signals.flags:
        graded = replace(graded, outcome=Outcome.TAMPERED, reward=0.0, passed=False, detail="a planted answer was used")
    return graded, signals


def record(
    context: RolloutContext,
    task: Task,
    id: EpisodeId,
    ungraded: UngradedEpisode,
    grade: Grade,
    figures: Mapping[str, float],
    flags: tuple[str, ...] = (),
) -> Episode:
    """The record of an episode that ended, with its reward. Raises an exception for values that no record can hold."""
    repository = task.repository if len(context.dataset.parts) > 1 else ""
    episode = Episode(
        id=f"{id.group_id}-{id.member}-{id.attempt}",
        group_id=id.group_id,
        member=id.member,
        attempt=id.attempt,
        task_id=task.id,
        repository=repository,
        seed=id.seed,
        outcome=grade.outcome,
        stop_reason=ungraded.stop_reason,
        reward=grade.reward,
        passed=grade.passed,
        segments=ungraded.segments,
        turns=ungraded.turns,
        metrics=ungraded.metrics | dict(figures),
        flags=flags,
        tools=ungraded.tools,
        detail=grade.detail,
    )
    if context.reward is not None:
        episode = with_reward(episode, context.reward, context.budget_of(task))
    encode(episode)
    return episode


def lost(context: RolloutContext, task: Task, id: EpisodeId, error: Exception) -> Episode:
    """The record of an episode that infrastructure or a mistake in etude lost: without tokens, turns and reward. Raises
    `error` if it concerns the whole run."""
    if isinstance(error, (UserError, RunFailed)):
        raise error
    outcome = Outcome.INFRA if isinstance(error, INFRA_ERRORS) else Outcome.QUARANTINED
    detail = escaped(one_line(f"{type(error).__name__}: {error}", MAX_DETAIL))
    if outcome is Outcome.QUARANTINED:
        frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
        detail += f" ({', '.join(f'{Path(frame.filename).name}:{frame.lineno}' for frame in reversed(frames))})"
    nothing = UngradedEpisode((), (), StopReason.ERROR, {}, False)
    return record(context, task, id, nothing, Grade(outcome, 0.0, False, detail, None), {})
