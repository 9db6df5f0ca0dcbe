"""Applied edits as tasks: no box and no tools, one turn that writes the whole new file.

    tables of `etude tasks fast-apply` -> tasks -> (file and sketch, as `/v1/apply` asks) -> file -> edits/grade.py

An episode earns 1 for the very bytes, a little less for what differs in blanks or has equal syntax, 0 for the rest and
for an answer that does not close its tag. It passes only with the very bytes. As Osmosis-Apply does (rewards 1 / .2 /
0), but equal syntax is worth nearly as much: it leaves the program as it should be.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec

from etude.code.languages import language_of
from etude.edits import examples as tables
from etude.edits.examples import Example
from etude.edits.formats import EditPrompt, question
from etude.edits.grade import EditGrade, grade
from etude.errors import UserError
from etude.grading import grade as grading
from etude.harness.loop import EpisodeSpec, UngradedEpisode, play_opened
from etude.harness.prompts import Opening
from etude.harness.tools import Tools
from etude.records import Budget, Focus, Outcome, Task
from etude.renderers import Renderer
from etude.tasks.dataset import FORMAT, Dataset, Manifest

REWARDS = {EditGrade.EXACT: 1.0, EditGrade.WHITESPACE: 0.9, EditGrade.SYNTAX: 0.9, EditGrade.FAIL: 0.0}


def tasks_of(folder: Path, renderer: Renderer, budget: Budget) -> Dataset:
    """The edits of train.parquet and heldout.parquet whose prompt and right answer fit the budget.

    Raises UserError for a folder without tables, or if none fits.
    """
    found: dict[str, Task] = {}
    for split, name in (("train", "train.parquet"), ("heldout", "heldout.parquet")):
        examples = tables.load(folder / name)
        tasks = [task for task in (_task(e, split) for e in examples) if _fits(task, renderer, budget)]
        if not tasks:
            raise UserError(
                f"no edit of {folder / name} fits rollout.context = {budget.context} and rollout.tokens = "
                f"{budget.tokens}: raise them, or make tables of shorter files"
            )
        found |= {task.id: task for task in tasks}
    manifest = Manifest(
        format=FORMAT, name=folder.name, licence="", licence_source="", seed=0, python_path=(), source_roots=(),
        visible="", options={}, counts={}, digests={},
    )  # fmt: skip
    tasks = tuple(found[key] for key in sorted(found))
    return Dataset(folder, folder.name, folder, folder, folder, tasks, manifest)


def _task(example: Example, split: str) -> Task:
    return Task(
        id=example.id, repository=example.repository, kind="apply", operator=example.kind,
        function=f"{example.repository}/{example.path}", split=split, instruction=example.instruction,
        focus=Focus(path=example.path, first_line=1, last_line=example.file.count("\n") + 1), source_roots=(),
        changes={example.path: example.file}, solution={example.path: example.result}, visible_tests=(),
        fail_to_pass=(), pass_to_pass=(), difficulty={"lines": float(example.lines), "fraction": example.fraction},
        licence=example.licence, sketch=example.sketch,
    )  # fmt: skip


def _asked(task: Task) -> EditPrompt:
    assert task.sketch is not None
    return question(task.changes[task.focus.path], task.sketch, task.instruction)


def _prompt(asked: EditPrompt, renderer: Renderer) -> list[int]:
    return renderer.prompt([{"role": "user", "content": asked.content}]) + renderer.plain(asked.opening)


def _fits(task: Task, renderer: Renderer, budget: Budget) -> bool:
    asked = _asked(task)
    answer = len(renderer.plain(task.solution[task.focus.path] + asked.close)) + 1  # and the end of the turn
    return answer <= budget.tokens and len(_prompt(asked, renderer)) + answer <= budget.context


async def attempt(play: EpisodeSpec) -> tuple[UngradedEpisode, grading.Grade, dict[str, float]]:
    """One answer, its grade, and `grade`, what it is worth. Raises EngineError or Aborted if the engine failed."""
    task, budget = play.task, play.budget
    asked = _asked(task)
    opening = Opening(_NoTools(task), _prompt(asked, play.renderer), ())
    one, whole = msgspec.structs.replace(budget, turns=1), replace(play.sampling, max_tokens=budget.tokens)
    draft = await play_opened(replace(play, budget=one, sampling=whole), opening)
    given, closed, _ = draft.turns[0].text.partition(asked.close) if draft.turns else ("", "", "")
    path = task.focus.path
    found = grade(task.solution[path], given if closed else None, language_of(path) or "")
    worth, detail = REWARDS[found], f"the file is {found}" if closed else "the answer does not end its file"
    passed = found == EditGrade.EXACT
    graded = grading.Grade(Outcome.SCORED, worth, passed, detail, None)
    # An answer without an end is a malformed call of the only thing there is to do.
    shown = {"grade": worth, "edits": float(bool(closed)), "malformed": float(not closed)}
    return draft, graded, shown | {f"applied/{g}": float(g == found) for g in REWARDS}


class _NoTools(Tools):
    """An answer is text here: every call is one of an unknown tool, and there is no turn after it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.metrics = Counter()
        self.deadline = math.inf
        self._handlers = {}
