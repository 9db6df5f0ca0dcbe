"""Applied edits as tasks: no box and no tools, one turn that writes the whole new file.

    tables of `etude tasks fast-apply` -> tasks -> (file, sketch: `/v1/apply`'s prompt) -> file -> edits/grades.py

An episode earns 1 for the exact bytes, a little less for a file that differs in blanks or has equal syntax, 0 for other
files and for an answer that does not close its tag. It passes only with the exact bytes. Osmosis-Apply rewards 1 / .2 /
0; here equal syntax earns nearly 1, since the program is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from etude.code import language_of, shown_lines
from etude.edits import EditGrade, EditPrompt, Example, edit_prompt, grade_edit, load_examples
from etude.errors import UserError
from etude.grading import Grade
from etude.harness import EpisodeSpec, Opening, Tools, run_agent_loop
from etude.records import Budget, Outcome, Task
from etude.renderers import Renderer
from etude.rollout.environments.agent import Agent
from etude.rollout.environments.environment import Environment, GradedEpisode, PlayedEpisode
from etude.sandbox import Box, Sandbox

REWARDS = {EditGrade.EXACT: 1.0, EditGrade.WHITESPACE: 0.9, EditGrade.SYNTAX: 0.9, EditGrade.FAIL: 0.0}


class EditTask(Task, frozen=True, kw_only=True):
    """One edit to apply: `prompt` is its instruction, `sketch` the edit, `result` the right new text of `file`."""

    path: str
    file: str
    sketch: str
    result: str
    kind: str  # of edit
    lines: int  # that change
    fraction: float  # of the file

    @property
    def cluster(self) -> str:
        """The file."""
        return f"{self.repository}/{self.path}"

    @property
    def text(self) -> str:
        """The instruction and the file."""
        return "\n".join([self.prompt, *shown_lines(self.file)])

    @property
    def damage(self) -> str:
        """The kind of edit."""
        return self.kind

    @property
    def question(self) -> EditPrompt:
        """The prompt and the tags of the answer."""
        return edit_prompt(self.file, self.sketch, self.prompt)


class AppliedEdits(Environment[EditTask]):
    """The edits of a folder's tables that fit the budget."""

    def __init__(self, name: str, table: tuple[EditTask, ...]) -> None:
        self.name, self.table = name, table

    def tasks(self) -> Iterable[EditTask]:
        """The edits."""
        return self.table

    async def play(self, spec: EpisodeSpec, box: Box | None, agent: Agent | None = None) -> PlayedEpisode:
        """One answer. Raises EngineError or Aborted if the engine failed."""
        task = spec.task
        assert isinstance(task, EditTask)
        edit = task.question

        async def messages(memory: str) -> list[dict[str, str]]:
            return [{"role": "user", "content": edit.content}]

        budget = msgspec.structs.replace(spec.budget, turns=1)
        opening = Opening(_NoTools(task), messages, prefill=edit.opening)
        return PlayedEpisode(await run_agent_loop(replace(spec, budget=budget), opening))

    async def grade(self, sandbox: Sandbox, task: EditTask, played: PlayedEpisode) -> GradedEpisode:
        """The grade of the file in the answer, and its kind as figures."""
        edit, turns = task.question, played.ungraded.turns
        file, closed, _ = turns[0].text.partition(edit.close) if turns else ("", "", "")
        kind = grade_edit(task.result, file if closed else None, language_of(task.path) or "")
        detail = f"the file is {kind}" if closed else "the answer does not end its file"
        # An answer without an end counts as a malformed call of the only tool.
        figures = {"edits": float(bool(closed)), "malformed": float(not closed)}
        figures |= {f"applied/{each}": float(each == kind) for each in REWARDS}
        return GradedEpisode(Grade(Outcome.SCORED, REWARDS[kind], kind == EditGrade.EXACT, detail, None), figures)


def applied_edits(folder: Path, renderer: Renderer | None, budget: Budget) -> AppliedEdits:
    """The edits of `folder` whose prompt and right answer fit the budget, counted by the renderer, if there is one.
    Raises UserError for a folder without tables, or if none fits."""
    tasks: dict[str, EditTask] = {}
    for split, name in (("train", "train.parquet"), ("heldout", "heldout.parquet")):
        every = [_task(example, split) for example in load_examples(folder / name)]
        fitting = [task for task in every if renderer is None or _fits(task, renderer, budget)]
        if not fitting:
            raise UserError(
                f"no edit of {folder / name} fits rollout.context = {budget.context} and rollout.tokens = "
                f"{budget.tokens}: raise them, or make tables of shorter files"
            )
        tasks |= {task.id: task for task in fitting}
    return AppliedEdits(folder.name, tuple(tasks[id] for id in sorted(tasks)))


def _task(example: Example, split: str) -> EditTask:
    return EditTask(
        id=example.id,
        repository=example.repository,
        split=split,
        prompt=example.instruction,
        path=example.path,
        file=example.file,
        sketch=example.sketch,
        result=example.result,
        kind=example.kind,
        lines=example.lines,
        fraction=example.fraction,
    )


def _fits(task: EditTask, renderer: Renderer, budget: Budget) -> bool:
    edit = task.question
    answer = len(renderer.plain(task.result + edit.close)) + 1  # and the end of the turn
    prompt = len(renderer.prompt([{"role": "user", "content": edit.content}]) + renderer.plain(edit.opening))
    return answer <= budget.tokens and prompt + answer <= budget.context


class _NoTools(Tools):
    """No tools: the answer is text, a call names an unknown tool, and the first turn is the last."""

    def __init__(self, task: Task) -> None:
        no_box: Any = None
        super().__init__(no_box, task)
