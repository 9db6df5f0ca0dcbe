"""One episode from beginning to end (`run_episode`): a box, the agent loop, the grade, the record.

The environment of the task plays and grades the episode (`environments/`). An infrastructure failure, proved not to be
the agent's, is one of INFRA_ERRORS. Its episode has the outcome INFRA: it is repeated, and has no reward. Any other
exception is a mistake in etude, even if the agent provoked it: its episode is QUARANTINED, without a reward, and the
others go on. The agent pays for everything else that breaks.

With a journal (`journal.py`) an episode goes on where an earlier attempt was killed. A journal that does not fit is
forgotten, and the episode begins anew.

The reward is settled once, by `record` when an episode ends: the grade, nothing if a decoy was used, less the costs of
`[reward]` (`rewards.py`). `group_audit.audit_group` may withhold the grade when a group is complete; it compares the
members.
"""

import asyncio
import traceback
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from etude.config import RewardConfig
from etude.errors import RunFailed, UserError
from etude.grading import Grade
from etude.grading.cheats import Decoys
from etude.harness import Aborted, EngineModel, EpisodeSpec, Model, Toolset, UngradedEpisode
from etude.protocol.backends import EngineError
from etude.records import Budget, Episode, Outcome, StopReason, Task, encode
from etude.renderers import escaped, one_line
from etude.rollout.environments.agent import Agent
from etude.rollout.environments.environment import (
    BOX_SECONDS,
    Environment,
    EnvironmentFailed,
    GradedEpisode,
)
from etude.rollout.environments.taskset import Taskset
from etude.rollout.journal import EpisodeJournal
from etude.rollout.journal_seams import JournalBox, JournalPolicy
from etude.rollout.rewards import with_reward
from etude.sandbox import Box, BoxError, Sandbox, ValueBox

INFRA_ERRORS = (BoxError, EngineError, Aborted, TimeoutError, EnvironmentFailed)
MAX_DETAIL = 500  # characters of the reason of a lost episode
FRAMES = 6  # of a traceback that are named in it


@dataclass(frozen=True)
class RolloutContext:
    """The common settings of a run's or an evaluation's episodes; a task may have a budget of its own. An outside
    `agent` takes the place of the agent loop. `reward` has the costs that are subtracted from grades; without it the
    reward is the grade, as in evaluations."""

    taskset: Taskset
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


@asynccontextmanager
async def open_box(
    context: RolloutContext,
    environment: Environment[Any],
    task: Task,
    decoys: Decoys | None = None,
    journal: EpisodeJournal | None = None,
) -> AsyncGenerator[Box | None]:
    """The agent's box, decoys included, recorded in the journal; None for a task without one. Raises one of
    INFRA_ERRORS."""
    image, limits = environment.image(task), environment.limits(task)
    if image is None:
        yield None
        return
    if decoys is not None:
        image = replace(image, decoys=decoys.files)
    if context.agent is not None:
        image, limits = context.agent.image(image), context.agent.limits
    async with asyncio.timeout(BOX_SECONDS):
        box = await context.sandbox.create(image, limits)
    try:
        yield box if journal is None or not isinstance(box, ValueBox) else cast(Box, JournalBox(journal, box))
    finally:
        await box.close()


@dataclass(frozen=True)
class EpisodeId:
    """The identity of an episode in a run, and its seed."""

    group_id: int
    member: int
    attempt: int
    seed: int


async def run_episode(
    context: RolloutContext,
    task: Task,
    id: EpisodeId,
    decoys: Decoys | None = None,
    journal: EpisodeJournal | None = None,
) -> Episode:
    """Plays and grades one attempt at `task`. `decoys` lie in the agent's box. Raises UserError where the user can
    help: the outside agent cannot start, the environment's code is wrong, or a chat API refuses."""
    error: Exception | None = None
    episode: Episode | None = None
    try:
        episode = await _played(context, task, id, decoys, journal)
    except Exception as e:
        error = e
    if journal is not None and journal.unfit:  # whatever a user's function made of the exception
        await journal.begin_anew()
        return await run_episode(context, task, id, decoys, journal)
    return episode if episode is not None else lost(context, task, id, cast(Exception, error))


async def _played(
    context: RolloutContext, task: Task, id: EpisodeId, decoys: Decoys | None, journal: EpisodeJournal | None
) -> Episode:
    environment, own = context.taskset.of(task)
    spec = context.spec(own, id.seed)
    if journal is not None and isinstance(spec.model, EngineModel):
        policy = JournalPolicy(journal, spec.model.policy)
        spec = replace(spec, model=replace(spec.model, policy=policy), started=journal.started)
    async with open_box(context, environment, own, decoys, journal) as box:
        played = await environment.play(spec, box, context.agent)
    played = replace(played, decoys=decoys, requests=None if box is None else box.requests())
    graded = await environment.grade(context.sandbox, own, played)
    return record(context, task, id, played.ungraded, graded)


def record(
    context: RolloutContext, task: Task, id: EpisodeId, ungraded: UngradedEpisode, graded: GradedEpisode
) -> Episode:
    """The record of an episode that ended, with its reward. Raises an exception for values that no record can hold."""
    grade = graded.grade
    episode = Episode(
        id=f"{id.group_id}-{id.member}-{id.attempt}",
        group_id=id.group_id,
        member=id.member,
        attempt=id.attempt,
        task_id=task.id,
        repository=task.repository if context.taskset.mixed else "",
        seed=id.seed,
        outcome=grade.outcome,
        stop_reason=ungraded.stop_reason,
        reward=grade.score,
        grade=grade.score,
        passed=grade.passed,
        segments=ungraded.segments,
        turns=ungraded.turns,
        metrics=ungraded.metrics | dict(graded.figures),
        flags=graded.flags,
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
    return record(context, task, id, nothing, GradedEpisode(Grade(outcome, 0.0, False, detail, None)))
