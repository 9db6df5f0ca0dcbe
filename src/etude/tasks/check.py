"""`etude tasks check`: tests on this machine whether a dataset still has the properties that its card claims."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.code import functions
from etude.config import SandboxConfig
from etude.grading import grade_changes, open_sandbox
from etude.records import CodeTask, Outcome
from etude.tasks import dataset, installed, leaks, node, split, system_index
from etude.tasks.dataset import Dataset
from etude.tasks.gates import in_order
from etude.tasks.search import Progress
from etude.tasks.system_index import SystemIndex

_WORKERS = 2
_BATCH = 20  # tasks between two calls of `progress`


@dataclass(frozen=True)
class CheckReport:
    """`problems` concern the dataset as a whole; `failures` maps the id of a task to its problem."""

    tasks: int
    problems: tuple[str, ...]
    failures: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether every gate holds."""
        return not self.problems and not self.failures


def check_dataset(dataset_dir: Path, progress: Progress, boxes: SandboxConfig | None = None) -> CheckReport:
    """Verify digests and secrecy, then grade every task unchanged (must fail) and with its gold answer (must pass), in
    boxes of the table [sandbox] `boxes`.
    Raises UserError if `dataset_dir` is not a dataset that etude has made."""
    data, changed = dataset.load_changed(dataset_dir)
    data.check_boxes(boxes)
    failures, systems = asyncio.run(_grade_all(data, progress, boxes))
    problems = [*_problems(data, changed), *_installed(data, systems)]
    return CheckReport(tasks=len(data.tasks), problems=tuple(problems), failures=failures)


def _problems(data: Dataset, changed: list[str]) -> list[str]:
    problems = [f"{name} has changed since it was built" for name in changed]
    clean = set(functions.clean_files(data.repository))
    extra = sorted(
        p.relative_to(data.repository).as_posix()
        for p in data.repository.rglob("*")
        if not p.is_dir() and not node.is_link(p)
    )
    problems += [f"repository/{path} may hold the answer" for path in extra if path not in clean]
    hidden = {split.base(test) for task in data.tasks for test in task.hidden_tests}
    for path in sorted({test.split("::")[0] for test in hidden}):
        file = data.repository / path
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if split.without_tests(path, text, hidden) != text:
            problems.append(f"repository/{path} holds hidden tests")
    copied = leaks.stored({"repository": data.repository, "site": data.site}, data.tasks)
    problems += [f"{place} holds the answer of {task}" for task, place in sorted(copied.items())]
    both = split.touched_by_all(data.split("train")) & split.touched_by_all(data.split("heldout"))
    problems += [f"{function} is both trained on and held out" for function in sorted(both)]
    if len({frozenset(task.changes.items()) for task in data.tasks}) < len(data.tasks):
        problems.append("two tasks have the same broken text")
    return problems


def _installed(data: Dataset, systems: list[SystemIndex]) -> list[str]:
    """Problems with the system of boxes."""
    library = installed.library_of(data.name, data.repository, data.manifest.source_roots)
    problems = [
        f"{index.shown(place)} of boxes is a copy of {library.project}"
        for index in systems
        for place in installed.copies(library, index)
    ]
    held = installed.held(systems, data.tasks)
    return problems + [f"{place} of boxes holds the answer of {task}" for task, place in sorted(held.items())]


async def _grade_all(
    data: Dataset, progress: Progress, boxes: SandboxConfig | None
) -> tuple[dict[str, str], list[SystemIndex]]:
    """The problems of tasks, and what their boxes have besides them."""
    failures: dict[str, str] = {}
    async with open_sandbox(boxes, workers=_WORKERS, memo=0) as sandbox:

        async def check_task(task: CodeTask) -> str | None:
            image = data.image(task)
            unchanged = await grade_changes(sandbox, task, image, data.hidden, {})
            if unchanged.passed or unchanged.outcome is not Outcome.SCORED:
                return f"unchanged, it should fail: {unchanged.outcome}, reward {unchanged.score:g}"
            gold = {path: text.encode() for path, text in task.solution.items()}
            fixed = await grade_changes(sandbox, task, image, data.hidden, gold)
            return None if fixed.passed else f"the gold answer fails: {fixed.detail}"

        for start in range(0, len(data.tasks), _BATCH):
            tasks = data.tasks[start : start + _BATCH]
            results = await in_order(check_task, tasks, _WORKERS)
            failures.update({t.id: reason for t, reason in zip(tasks, results, strict=True) if reason})
            progress("checking tasks", start + len(tasks), len(data.tasks))
        return failures, await asyncio.to_thread(system_index.indexes, sandbox)
