"""One whole episode: a box, the agent loop, the grade, and who pays when something breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from etude.environments.base import Box, BoxError, Image, Limits, Sandbox
from etude.environments.cheats.canaries import Decoys
from etude.environments.cheats.signs import marks
from etude.environments.grading import Grade, grade
from etude.harness import applied
from etude.harness.agent import Agent, run_agent
from etude.harness.loop import Aborted, Draft, Policy, Sampling, Unforkable, fork_episode, run_episode
from etude.harness.renderers import Renderer
from etude.inference.client import EngineError
from etude.records import Budget, Episode, Outcome, StopReason, Task
from etude.tasks.dataset import Dataset

__all__ = ["Policy", "Renderer", "Sampling", "play", "play_forks"]

Played = tuple[Draft, Grade, dict[str, float]]

BOX_SECONDS = 60.0  # to make a box, and to read the changes from it
GRADE_SECONDS = 900.0  # to be graded, most of it a wait for the test runs before; those have deadlines of their own
_OURS = (BoxError, EngineError, Aborted, TimeoutError)


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
    if task.sketch is not None:
        played = applied.attempt(task, policy, renderer, budget, sampling, seed)
    else:
        played = _attempt(task, dataset, sandbox, policy, renderer, budget, sampling, seed, decoys, agent)
    return await _record(task, seed, group_id, member, attempt, played)


async def play_forks(
    task: Task,
    dataset: Dataset,
    sandbox: Sandbox,
    policy: Policy,
    renderer: Renderer,
    budget: Budget,
    sampling: Sampling,
    seed: int,
    group_id: int,
    attempt: int,
    turns: int,
    seeds: Sequence[int],
) -> list[Episode]:
    """Plays the first `turns` turns once, and from there and with that box a member of the group per seed.

    All members hold the first turns, so with a group's mean as baseline those cancel where all share them: what is
    learned is what was done after the fork. Each pays for its own failures, and all for those before.
    """
    image = dataset.image(task)
    try:
        box = await _box(sandbox, image, Limits())
        try:
            branches = await fork_episode(
                task, policy=policy, renderer=renderer, box=box, budget=budget, sampling=sampling, seed=seed,
                turns=turns, seeds=seeds,
            )  # fmt: skip
        finally:
            await box.close()
        played = [_graded(task, dataset, sandbox, image, b.box, b.play(), None) for b in branches]
    except (Unforkable, *_OURS) as e:
        played = [_spoiled(task, image, e) for _ in seeds]
    members = enumerate(zip(seeds, played, strict=True))
    return await asyncio.gather(*(_record(task, s, group_id, m, attempt, one) for m, (s, one) in members))


async def _spoiled(task: Task, image: Image, error: Exception) -> Played:
    """What a branch is that could not begin."""
    if not isinstance(error, Unforkable):
        raise error
    graded = Grade(Outcome.SCORED, 0.0, False, str(error), None)
    return error.draft, graded, marks(task, image, {}, error.draft.turns, None, graded, False)


async def _record(
    task: Task, seed: int, group_id: int, member: int, attempt: int, played: Coroutine[Any, Any, Played]
) -> Episode:
    """The episode that comes of an attempt."""
    draft: Draft | None = None
    signs: dict[str, float] = {}
    try:
        draft, graded, signs = await played
    except _OURS as e:
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
) -> Played:
    """Plays and grades. Raises one of `_OURS` when the infrastructure failed."""
    image = dataset.image(task)
    shown = replace(image, decoys=decoys.files) if decoys else image
    box = await _box(sandbox, agent.image(shown) if agent else shown, agent.limits if agent else Limits())
    parts: dict[str, Any] = {"policy": policy, "renderer": renderer, "box": box, "budget": budget}
    parts |= {"sampling": sampling, "seed": seed}
    playing = run_agent(task, agent, **parts) if agent else run_episode(task, **parts)
    return await _graded(task, dataset, sandbox, image, box, playing, decoys)


async def _box(sandbox: Sandbox, image: Image, limits: Limits) -> Box:
    async with asyncio.timeout(BOX_SECONDS):
        return await sandbox.create(image, limits)


async def _graded(
    task: Task,
    dataset: Dataset,
    sandbox: Sandbox,
    image: Image,
    box: Box,
    playing: Coroutine[Any, Any, Draft],
    decoys: Decoys | None,
) -> Played:
    """The draft that `playing` makes in `box`, which is closed then, its grade, and its marks."""
    try:
        draft = await playing
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
