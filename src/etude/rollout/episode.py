"""One whole episode: a box, the agent loop, the grade, and who pays when something breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import blake3

from etude.grading.cheats.decoys import Decoys
from etude.grading.cheats.signals import signals
from etude.grading.grade import Grade, grade
from etude.harness.loop import Aborted, EpisodeSpec, Policy, Sampling, UngradedEpisode, fork_episode, run_episode
from etude.harness.sketches import Apply, merged
from etude.protocol.client import EngineError
from etude.records import Budget, Episode, Fork, Outcome, StopReason, Task
from etude.renderers import Renderer
from etude.rollout import apply_edits
from etude.rollout.agent import Agent, run_agent
from etude.sandbox.base import Box, BoxError, EgressRequest, Limits, Sandbox
from etude.tasks.dataset import Dataset

Played = tuple[UngradedEpisode, Grade, dict[str, float]]

BOX_SECONDS = 60.0  # to make a box, and to read the changes from it
GRADE_SECONDS = 900.0  # to be graded, most of it a wait for the test runs before; those have deadlines of their own
_OURS = (BoxError, EngineError, Aborted, TimeoutError)


@dataclass(frozen=True)
class RolloutContext:
    """What the episodes of a run have in common; a task may have a budget of its own.

    An outside `agent` takes the loop's place. `lay` is what the tool `apply` asks.
    """

    dataset: Dataset
    sandbox: Sandbox
    policy: Policy
    renderer: Renderer
    budget: Budget
    sampling: Sampling
    agent: Agent | None = None
    lay: Apply = merged

    def budget_of(self, task: Task) -> Budget:
        return task.budget or self.budget

    def play(self, task: Task, seed: int) -> EpisodeSpec:
        """What an episode of `task` is played with."""
        return EpisodeSpec(task, self.policy, self.renderer, self.budget_of(task), self.sampling, seed, self.lay)

    async def box(self, task: Task, decoys: Decoys | None) -> Box:
        """The agent's box, decoys included. Raises what is ours."""
        image, limits = self.dataset.image(task), Limits()
        if decoys is not None:
            image = replace(image, decoys=decoys.files)
        if self.agent is not None:
            image, limits = self.agent.image(image), self.agent.limits
        async with asyncio.timeout(BOX_SECONDS):
            return await self.sandbox.create(image, limits)


@dataclass(frozen=True)
class EpisodeId:
    """Which episode of a run one is, and its seed."""

    group_id: int
    member: int
    attempt: int
    seed: int


async def play(setting: RolloutContext, task: Task, slot: EpisodeId, decoys: Decoys | None = None) -> Episode:
    """Plays and grades one attempt at `task`. The agent pays for everything that is not proved to be our fault.

    `decoys` lie in the agent's box; an episode that uses one is tampered. A task with a sketch has no box. Raises only
    for mistakes in etude itself, such as TokenLedgerError, and UserError if the outside agent cannot start.
    """
    plan = setting.play(task, slot.seed)
    played = apply_edits.attempt(plan) if task.sketch is not None else _attempt(setting, plan, decoys)
    return await _record(task, slot, played)


async def play_forks(
    setting: RolloutContext,
    task: Task,
    slots: Sequence[EpisodeId],
    decoys: Decoys | None = None,
    *,
    seed: int,
    turns: int,
) -> list[Coroutine[Any, Any, Episode]]:
    """Plays the first `turns` turns once under `seed`; what is returned plays an episode per slot on from there.

    Each has a fork of the box, and must be awaited. Each pays for its own failures, and all for those before, so every
    episode is distributed as one that was played alone; but siblings are not independent (see `trainer.batch`).
    """
    try:
        trunk, ways = await _ways_on(setting, setting.play(task, seed), slots, decoys, turns)
    except _OURS as e:
        return [_record(task, slot, _settled(e)) for slot in slots]
    tokens = b"".join(segment.ids for segment in trunk.segments)
    digest = blake3.blake3(b"%d/%d/" % (seed, turns) + tokens).hexdigest(length=16)
    sampled = int(trunk.metrics["sampled_tokens"])
    fork = Fork(trunk=digest, seed=seed, after=turns, turns=len(trunk.turns), tokens=sampled)
    return [_record(task, slot, way, fork) for slot, way in zip(slots, ways, strict=True)]


async def _ways_on(
    setting: RolloutContext, plan: EpisodeSpec, slots: Sequence[EpisodeId], decoys: Decoys | None, turns: int
) -> tuple[UngradedEpisode, list[Coroutine[Any, Any, Played]]]:
    """A trunk, and what plays and grades an episode per slot from there. Raises one of `_OURS`."""
    task = plan.task
    box = await setting.box(task, decoys)
    try:
        trunk = await fork_episode(plan, box, turns, [slot.seed for slot in slots])
    finally:
        await box.close()
    draft, asked = trunk.draft, box.requests()
    if trunk.fault:
        graded = Grade(Outcome.SCORED, 0.0, False, trunk.fault, None)
        found = signals(task, setting.dataset.image(task), {}, draft.turns, decoys, graded, False, asked)
        return draft, [_settled((draft, graded, found)) for _ in slots]
    return draft, [
        _graded(setting, task, b.box, b.play(), decoys, () if b.box is box else asked or ()) for b in trunk.branches
    ]


async def _settled(what: Played | Exception) -> Played:
    if isinstance(what, Exception):
        raise what
    return what


async def _record(
    task: Task, slot: EpisodeId, played: Coroutine[Any, Any, Played], fork: Fork | None = None
) -> Episode:
    """The episode that comes of an attempt."""
    draft: UngradedEpisode | None = None
    signs: dict[str, float] = {}
    try:
        draft, graded, signs = await played
    except _OURS as e:
        graded = Grade(Outcome.INFRA, 0.0, False, f"{type(e).__name__}: {e}", None)
    lost = draft is None
    shared = {} if fork is None else {"trunk_tokens": float(fork.tokens)}
    return Episode(
        id=f"{slot.group_id}-{slot.member}-{slot.attempt}",
        group_id=slot.group_id,
        member=slot.member,
        attempt=slot.attempt,
        task_id=task.id,
        seed=slot.seed,
        outcome=graded.outcome,
        stop_reason=StopReason.ERROR if lost else draft.stop_reason,
        reward=graded.reward,
        passed=graded.passed,
        segments=() if lost else draft.segments,
        turns=() if lost else draft.turns,
        metrics={} if lost else draft.metrics | signs | shared,
        detail=graded.detail,
        fork=None if lost else fork,
    )


async def _attempt(setting: RolloutContext, plan: EpisodeSpec, decoys: Decoys | None) -> Played:
    """Plays and grades. Raises one of `_OURS` when the infrastructure failed."""
    box = await setting.box(plan.task, decoys)
    agent = setting.agent
    playing = run_agent(plan, agent, box) if agent is not None else run_episode(plan, box)
    return await _graded(setting, plan.task, box, playing, decoys)


async def _graded(
    setting: RolloutContext,
    task: Task,
    box: Box,
    playing: Coroutine[Any, Any, UngradedEpisode],
    decoys: Decoys | None,
    before: Sequence[EgressRequest] = (),
) -> Played:
    """The draft that `playing` makes in `box`, which is closed then, its grade, and its marks.

    `before` is what was asked of the outside in the box that this one was forked from.
    """
    image = setting.dataset.image(task)

    def signs(changes: Mapping[str, bytes | None], visible_passed: bool = False) -> dict[str, float]:
        asked = box.requests()
        asked = None if asked is None else [*before, *asked]
        return signals(task, image, changes, draft.turns, decoys, graded, visible_passed, asked)

    try:
        draft = await playing
        if draft.timed_out:
            graded = Grade(Outcome.TIMEOUT, 0.0, False, "a tool did not end in time", None)
            return draft, graded, signs({})
        try:
            async with asyncio.timeout(BOX_SECONDS):
                changes = await box.changes()
        except BoxError as e:
            if e.payer == "infra":
                raise
            graded = Grade(Outcome.SCORED, 0.0, False, f"the box was left unreadable: {e}", None)
            return draft, graded, signs({})
    finally:
        await box.close()
    async with asyncio.timeout(GRADE_SECONDS):
        graded = await grade(setting.sandbox, task, image, setting.dataset.hidden, changes)
    if draft.note:
        graded = replace(graded, detail=f"{graded.detail}; {draft.note}")
    found = signs(changes, bool(draft.metrics.get("visible_passed")))
    if "flag/decoy" in found:
        graded = replace(graded, outcome=Outcome.TAMPERED, reward=0.0, passed=False, detail="a planted answer was used")
    return draft, graded, found
