"""Edits that come with tests: each undoes a mutation of a task dataset, and the hidden tests decide on an answer.

    a broken function (the file) + a sketch of the right one  ->  answer  ->  put back into its module  ->  hidden tests

The file is the broken function alone, without its indentation, so that short contexts hold it. Tests run only for
answers that are neither exact nor of equal syntax, and that touch no line outside the hunks. They run in a box, and
can pass for an answer that solves the task in another way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.code import parsed_lines
from etude.config import SandboxConfig
from etude.corpus.edits import Repository, edit_with_sketch
from etude.edits import Example
from etude.errors import UserError
from etude.grading import grade_changes, open_sandbox
from etude.records import CodeTask
from etude.tasks import Dataset, load_dataset


@dataclass(frozen=True)
class FunctionLines:
    """The place of a function in its module: [first, last) of its lines, and its indentation."""

    first: int
    last: int
    indent: str

    def text(self, module: str) -> str:
        """The function without its indentation."""
        lines = parsed_lines(module)[self.first : self.last]
        return "".join(line.removeprefix(self.indent) for line in lines)

    def put(self, module: str, text: str) -> str:
        """The module with `text` as the function; lines of white space stay unchanged."""
        lines = parsed_lines(module)
        inner = [self.indent + line if line.strip() else line for line in parsed_lines(text)]
        return "".join([*lines[: self.first], *inner, *lines[self.last :]])


@dataclass(frozen=True)
class Tested:
    """The edits of a dataset, and the task and place of each edit by its id."""

    dataset: Dataset
    examples: tuple[Example, ...]
    places: dict[str, tuple[CodeTask, FunctionLines]]


def load(folder: Path, split: str) -> Tested:
    """The edits that undo the mutations of a split, except those that a sketch does not determine. Raises UserError if
    `folder` is not a task dataset or gives no edit."""
    dataset = load_dataset(folder)
    repository = Repository(dataset.name, dataset.manifest.licence, dataset.manifest.licence_source, "files", (), ())
    places: dict[str, tuple[CodeTask, FunctionLines]] = {}
    examples: list[Example] = []
    for task in dataset.split(split):
        sides = _sides(task)
        if sides is None:
            continue
        place, before, after = sides
        rng = random.Random(f"tested/{task.id}")
        example = edit_with_sketch(repository, task.focus.path, "python", "synthetic", before, after, "", rng)
        if example is not None and example.id not in places:
            places[example.id] = (task, place)
            examples.append(example)
    if not examples:
        raise UserError(f"{folder} gives no edits of split {split}: build one with `--kinds mutation` and more tasks")
    return Tested(dataset, tuple(examples), places)


def _sides(task: CodeTask) -> tuple[FunctionLines, str, str] | None:
    """(place, broken function, right function), or None for a task that is not a mutation or cannot be put back
    exactly."""
    path = task.focus.path
    if task.kind != "mutation" or set(task.changes) != {path} or set(task.solution) != {path}:
        return None
    broken, right = task.changes[path], task.solution[path]
    first, last = task.focus.first_line - 1, task.focus.last_line
    more = len(parsed_lines(right)) - len(parsed_lines(broken))
    line = parsed_lines(broken)[first]
    place = FunctionLines(first, last, line[: len(line) - len(line.lstrip())])
    before, after = place.text(broken), FunctionLines(first, last + more, place.indent).text(right)
    if place.put(broken, before) != broken or place.put(broken, after) != right:
        return None
    return place, before, after


def passing(tested: Tested, answers: Sequence[tuple[Example, str]], boxes: SandboxConfig | None = None) -> list[bool]:
    """Whether each answer passes the tests of its task, in boxes of the table [sandbox] `boxes`. Raises UserError where
    boxes cannot be made."""
    return asyncio.run(_passing(tested, answers, boxes)) if answers else []


async def _passing(tested: Tested, answers: Sequence[tuple[Example, str]], boxes: SandboxConfig | None) -> list[bool]:
    dataset = tested.dataset
    dataset.check_boxes(boxes)
    async with open_sandbox(boxes) as sandbox:

        async def run(example: Example, text: str) -> bool:
            task, place = tested.places[example.id]
            module = place.put(task.changes[task.focus.path], text)
            changes: dict[str, bytes | None] = {task.focus.path: module.encode("utf-8", "surrogateescape")}
            return (await grade_changes(sandbox, task, dataset.image(task), dataset.hidden, changes)).passed

        return list(await asyncio.gather(*(run(example, text) for example, text in answers)))
