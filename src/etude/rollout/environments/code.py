"""Coding tasks in repositories, and foreign Harbor folders: the agent works in a box, then hidden tests decide."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from etude.grading import Grade, note_state
from etude.grading.cheats import Decoys, cheat_signals, has_decoys, plant_decoys
from etude.harness import EpisodeSpec, UngradedEpisode, open_task, run_agent_loop
from etude.records import CodeTask, Outcome
from etude.rollout.environments.agent import Agent, run_agent
from etude.rollout.environments.environment import BOX_SECONDS, Environment, GradedEpisode, PlayedEpisode
from etude.rollout.environments.taskset import TaskPart
from etude.sandbox import Box, BoxError, Image, Limits, Sandbox
from etude.sandbox.egress import normal_project, wheel_project
from etude.tasks import Dataset, make_impossible
from etude.tasks.foreign import load_any_dataset

GRADE_SECONDS = 900.0  # to be graded, most of it a wait for the test runs before; those have deadlines of their own


@dataclass(frozen=True)
class CodeChanges:
    """The agent's change set; or none, and the grade of an episode without one."""

    changes: Mapping[str, bytes | None]
    fault: Grade | None = None


def foreign_refusal(compact: bool, sandbox: str) -> str:
    """The reason why a model or boxes cannot play foreign tasks; "" if they can."""
    why = ""
    if compact:
        why = "a model of the compact dialect, which has no shell of its own choice: take a chat model"
    elif sandbox != "namespace":
        why = f'boxes of sandbox.type = "{sandbox}", which cannot show folders where Harbor has them'
    return why and f"foreign Harbor tasks cannot be played with {why}"


class CodeTasks(Environment[CodeTask]):
    """The tasks of a dataset that `etude tasks build` has made."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.name = dataset, dataset.name

    def tasks(self) -> Iterable[CodeTask]:
        """The tasks of the dataset."""
        return self.dataset.tasks

    def image(self, task: CodeTask) -> Image:
        """The repository, its dependencies, and the files that break it."""
        return self.dataset.image(task)

    def limits(self, task: CodeTask) -> Limits:
        """The limits of the agent's box."""
        return self.dataset.limits(task)

    async def play(self, spec: EpisodeSpec, box: Box | None, agent: Agent | None = None) -> PlayedEpisode:
        """Plays an episode, and reads the agent's changes from the box."""
        task = spec.task
        assert box is not None
        assert isinstance(task, CodeTask)
        if agent is None:
            ungraded = await run_agent_loop(spec, await open_task(spec, box))
        else:
            ungraded = await run_agent(spec, agent, box)
        return PlayedEpisode(ungraded, await self._changes(box, ungraded, task.source_roots))

    async def _changes(self, box: Box, ungraded: UngradedEpisode, roots: tuple[str, ...]) -> CodeChanges:
        if ungraded.timed_out:
            return CodeChanges({}, Grade(Outcome.TIMEOUT, 0.0, False, "a tool did not end in time", None))
        try:
            async with asyncio.timeout(BOX_SECONDS):
                return CodeChanges(await self.read_changes(box, roots))
        except BoxError as e:
            if e.payer == "infra":
                raise
            return CodeChanges({}, Grade(Outcome.SCORED, 0.0, False, f"the box was left unreadable: {e}", None))

    async def read_changes(self, box: Box, roots: tuple[str, ...]) -> Mapping[str, bytes | None]:
        """The agent's change set below `roots`. Raises BoxError."""
        return await box.changes(roots)

    async def grade(self, sandbox: Sandbox, task: CodeTask, played: PlayedEpisode) -> GradedEpisode:
        """The grade of the changes by the hidden tests, and the signals of cheating in the whole episode."""
        evidence, ungraded, decoys = played.evidence, played.ungraded, played.decoys
        assert isinstance(evidence, CodeChanges)
        graded = evidence.fault
        if graded is None:
            async with asyncio.timeout(GRADE_SECONDS):
                graded = await self.dataset.grade(sandbox, task, evidence.changes)
            if ungraded.note:
                graded = replace(graded, detail=f"{graded.detail}; {ungraded.note}")
        passed = evidence.fault is None and ungraded.visible_passed
        signals = await asyncio.to_thread(  # it may take a while on an agent's files
            cheat_signals,
            task,
            self.image(task),
            evidence.changes,
            ungraded.turns,
            decoys,
            graded,
            passed,
            played.requests,
        )
        if "decoy" in signals.flags and evidence.fault is None:
            detail = "a planted answer was used"
            graded = replace(graded, outcome=Outcome.TAMPERED, score=0.0, passed=False, detail=detail)
        return GradedEpisode(graded, signals.figures, signals.flags)

    def decoys(self, task: CodeTask, seed: int, share: float) -> Decoys | None:
        """The decoys in a task's repository; its impossible version has the same."""
        return plant_decoys(task, seed) if has_decoys(task.id, seed, share) else None

    def impossible(self, folder: Path) -> CodeTasks | None:
        """The impossible versions of the training tasks."""
        made = make_impossible(self.dataset, folder)
        return CodeTasks(made) if made.tasks else None


class ForeignTasks(CodeTasks):
    """Tasks that others have written as Harbor folders: their own tests decide on the final state of the box."""

    async def read_changes(self, box: Box, roots: tuple[str, ...]) -> Mapping[str, bytes | None]:
        """The changes, after a note of the state that their tests look at."""
        await note_state(box)
        return await super().read_changes(box, roots)

    def refusal(self, compact: bool, sandbox: str) -> str:
        """As `foreign_refusal`."""
        return foreign_refusal(compact, sandbox)

    def decoys(self, task: CodeTask, seed: int, share: float) -> None:
        """None: there is no repository to hide them in."""

    def impossible(self, folder: Path) -> None:
        """None: foreign tasks have no tests by name."""


def dataset_part(dataset: Dataset | Path) -> TaskPart:
    """The tasks of a dataset or a dataset's folder, of foreign Harbor tasks or of our own. Raises UserError."""
    if isinstance(dataset, Path):
        dataset = load_any_dataset(dataset)
    manifest, name = dataset.manifest, dataset.name
    package = wheel_project(name)
    return TaskPart(
        (ForeignTasks if manifest.kind else CodeTasks)(dataset),
        dataset.tasks,
        project=name if manifest.kind else normal_project(package),
        digest=manifest.digests.get("dataset.json", ""),
        warnings=manifest.warnings,
        dataset=dataset,
        packages=frozenset({package, *(Path(root).stem for task in dataset.tasks for root in task.source_roots)}),
    )
