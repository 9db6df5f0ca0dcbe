"""Applied edits as tasks: no box and no tools, one turn that writes the whole new file.

    tables of `etude tasks fast-apply` -> tasks -> (file, sketch: `/v1/apply`'s prompt) -> file -> edits/grades.py

An episode earns 1 for the exact bytes, a little less for a file that differs in blanks or has equal syntax, 0 for other
files and for an answer that does not close its tag. It passes only with the exact bytes. Osmosis-Apply rewards 1 / .2 /
0; here equal syntax earns nearly 1, since the program is right.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from etude.code import language_of
from etude.edits import EditGrade, EditPrompt, Example, edit_prompt, grade_edit, load_examples
from etude.errors import UserError
from etude.grading import Grade
from etude.harness import EpisodeSpec, Opening, Tools, UngradedEpisode, run_from_opening
from etude.records import Budget, CodeTask, Focus, Outcome
from etude.renderers import Renderer
from etude.tasks import DATASET_FORMAT, Dataset, Manifest

REWARDS = {EditGrade.EXACT: 1.0, EditGrade.WHITESPACE: 0.9, EditGrade.SYNTAX: 0.9, EditGrade.FAIL: 0.0}


def edit_tasks(folder: Path, renderer: Renderer, budget: Budget) -> Dataset:
    """The edits of train.parquet and heldout.parquet whose prompt and right answer fit the budget. Raises UserError for
    a folder without tables, or if none fits."""
    tasks_by_id: dict[str, CodeTask] = {}
    for split, name in (("train", "train.parquet"), ("heldout", "heldout.parquet")):
        examples = load_examples(folder / name)
        tasks = [task for task in (_task(e, split) for e in examples) if _fits(task, renderer, budget)]
        if not tasks:
            raise UserError(
                f"no edit of {folder / name} fits rollout.context = {budget.context} and rollout.tokens = "
                f"{budget.tokens}: raise them, or make tables of shorter files"
            )
        tasks_by_id |= {task.id: task for task in tasks}
    manifest = Manifest(
        format=DATASET_FORMAT,
        name=folder.name,
        licence="",
        licence_source="",
        seed=0,
        python_path=(),
        source_roots=(),
        visible="",
        options={},
        counts={},
        digests={},
    )
    tasks = tuple(tasks_by_id[id] for id in sorted(tasks_by_id))
    return Dataset(folder, folder.name, folder, folder, folder, tasks, manifest)


def _task(example: Example, split: str) -> CodeTask:
    return CodeTask(
        id=example.id,
        repository=example.repository,
        kind="apply",
        operator=example.kind,
        function=f"{example.repository}/{example.path}",
        split=split,
        prompt=example.instruction,
        focus=Focus(path=example.path, first_line=1, last_line=example.file.count("\n") + 1),
        source_roots=(),
        changes={example.path: example.file},
        solution={example.path: example.result},
        visible_tests=(),
        fail_to_pass=(),
        pass_to_pass=(),
        difficulty={"lines": float(example.lines), "fraction": example.fraction},
        licence=example.licence,
        sketch=example.sketch,
    )


def _question(task: CodeTask) -> EditPrompt:
    assert task.sketch is not None
    return edit_prompt(task.changes[task.focus.path], task.sketch, task.prompt)


def _prompt(edit: EditPrompt, renderer: Renderer) -> list[int]:
    return renderer.prompt([{"role": "user", "content": edit.content}]) + renderer.plain(edit.opening)


def _fits(task: CodeTask, renderer: Renderer, budget: Budget) -> bool:
    edit = _question(task)
    answer = len(renderer.plain(task.solution[task.focus.path] + edit.close)) + 1  # and the end of the turn
    return answer <= budget.tokens and len(_prompt(edit, renderer)) + answer <= budget.context


async def attempt(spec: EpisodeSpec) -> tuple[UngradedEpisode, Grade, dict[str, float]]:
    """One answer, its grade, and figures of it as metrics. Raises EngineError or Aborted if the engine failed."""
    task, edit = spec.task, _question(spec.task)
    opening = Opening(_NoTools(task), _prompt(edit, spec.renderer), _never_reopened)
    one_turn = msgspec.structs.replace(spec.budget, turns=1)
    sampling = replace(spec.sampling, max_tokens=spec.budget.tokens)
    ungraded = await run_from_opening(replace(spec, budget=one_turn, sampling=sampling), opening)
    file, closed, _ = ungraded.turns[0].text.partition(edit.close) if ungraded.turns else ("", "", "")
    path = task.focus.path
    edit_grade = grade_edit(task.solution[path], file if closed else None, language_of(path) or "")
    reward, passed = REWARDS[edit_grade], edit_grade == EditGrade.EXACT
    detail = f"the file is {edit_grade}" if closed else "the answer does not end its file"
    # An answer without an end counts as a malformed call of the only tool.
    figures = {"grade": reward, "edits": float(bool(closed)), "malformed": float(not closed)}
    figures |= {f"applied/{each}": float(each == edit_grade) for each in REWARDS}
    return ungraded, Grade(Outcome.SCORED, reward, passed, detail, None), figures


async def _never_reopened(summary: str, count: int) -> list[int]:
    raise AssertionError("an answer of one turn is never summarised")


class _NoTools(Tools):
    """No tools: the answer is text, a call names an unknown tool, and the first turn is the last."""

    def __init__(self, task: CodeTask) -> None:
        no_box: Any = None
        super().__init__(no_box, task)
