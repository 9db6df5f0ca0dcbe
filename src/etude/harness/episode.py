"""One whole episode: a box, the agent loop, the grade, and who pays when something breaks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from etude.environments.base import BoxError, Limits, Sandbox
from etude.environments.cheats.canaries import Decoys
from etude.environments.cheats.signs import marks
from etude.environments.grading import Grade, grade
from etude.harness import applied
from etude.harness.agent import Agent, run_agent
from etude.harness.loop import Aborted, Draft, Policy, Sampling, run_episode
from etude.harness.renderers import Renderer
from etude.inference.client import EngineError
from etude.records import Budget, Episode, Outcome, StopReason, Task
from etude.tasks.dataset import Dataset

__all__ = ["Policy", "Renderer", "Sampling", "play"]

BOX_SECONDS = 60.0  # to make a box, and to read the changes from it
GRADE_SECONDS = 900.0  # to be graded, most of it a wait for the test runs before; those have deadlines of their own


async def play(
    task: Task,
    dataset: Dataset,
    sandbox: Sandbox,
    policy: Policy,
    renderer: Renderer,
    budget: Budget,
    sampling: Sampling,
    seed: int,
    group_id: int,
    member: int,
    attempt: int,
    decoys: Decoys | None = None,
    agent: Agent | None = None,
) -> Episode:
    """Plays and grades one attempt at `task`. The agent pays for everything that is not proved to be our fault.

    `decoys` lie in the agent's box; an episode that uses one is tampered. An outside `agent` takes the loop's place.
    A task with a sketch has no box. Raises only for mistakes in etude itself, such as TokenLedgerError, and UserError
    if the outside agent cannot start.
    """
    draft: Draft | None = None
    signs: dict[str, float] = {}
    try:
        if task.sketch is not None:
            draft, graded, signs = await applied.attempt(task, policy, renderer, budget, sampling, seed)
        else:
            draft, graded, signs = await _attempt(
                task, dataset, sandbox, policy, renderer, budget, sampling, seed, decoys, agent
            )
    except (BoxError, EngineError, Aborted, TimeoutError) as e:
        graded = Grade(Outcome.INFRA, 0.0, False, f"{type(e).__name__}: {e}", None)
    lost = draft is None
    return Episode(
        id=f"{group_id}-{member}-{attempt}",
        group_id=group_id,
        member=member,
        attempt=attempt,
        task_id=task.id,
        seed=seed,
        outcome=graded.outcome,
        stop_reason=StopReason.ERROR if lost else draft.stop_reason,
        reward=graded.reward,
        passed=graded.passed,
        segments=() if lost else draft.segments,
        turns=() if lost else draft.turns,
        metrics={} if lost else draft.metrics | signs,
        detail=graded.detail,
    )


async def _attempt(
    task: Task,
    dataset: Dataset,
    sandbox: Sandbox,
    policy: Policy,
    renderer: Renderer,
    budget: Budget,
    sampling: Sampling,
    seed: int,
    decoys: Decoys | None,
    agent: Agent | None,
) -> tuple[Draft, Grade, dict[str, float]]:
    """The draft, its grade, and its marks.

    Raises BoxError, EngineError, Aborted or TimeoutError when the infrastructure failed.
    """
    image = dataset.image(task)
    shown = replace(image, decoys=decoys.files) if decoys else image
    async with asyncio.timeout(BOX_SECONDS):
        box = await sandbox.create(agent.image(shown) if agent else shown, agent.limits if agent else Limits())
    try:
        parts: dict[str, Any] = {"policy": policy, "renderer": renderer, "box": box, "budget": budget}
        parts |= {"sampling": sampling, "seed": seed}
        draft = await (run_agent(task, agent, **parts) if agent else run_episode(task, **parts))
        if draft.timed_out:
            graded = Grade(Outcome.TIMEOUT, 0.0, False, "a tool did not end in time", None)
            return draft, graded, marks(task, image, {}, draft.turns, decoys, graded, False, box.requests())
        try:
            async with asyncio.timeout(BOX_SECONDS):
                changes = await box.changes()
        except BoxError as e:
            if e.payer == "infra":
                raise
            graded = Grade(Outcome.SCORED, 0.0, False, f"the box was left unreadable: {e}", None)
            return draft, graded, marks(task, image, {}, draft.turns, decoys, graded, False, box.requests())
    finally:
        await box.close()
    async with asyncio.timeout(GRADE_SECONDS):
        graded = await grade(sandbox, task, image, dataset.hidden, changes)
    if draft.note:
        graded = replace(graded, detail=f"{graded.detail}; {draft.note}")
    visible_passed = bool(draft.metrics.get("visible_passed"))
    found = marks(task, image, changes, draft.turns, decoys, graded, visible_passed, box.requests())
    if "flag/canary" in found:
        graded = replace(graded, outcome=Outcome.TAMPERED, reward=0.0, passed=False, detail="a planted answer was used")
    return draft, graded, found
