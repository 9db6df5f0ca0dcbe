"""The gates: the conditions that a broken program must meet in the grading box before it becomes a task.

The broken tree fails the same hidden tests every time, scores 0 without a change, and scores 1 with the gold answer;
each `repeats` times. Sham answers (`shams.py`) score 0. Programs that hang, crash the runner or change the outcome of
no test are dropped.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, wraps
from pathlib import Path
from typing import TypeVar

import blake3

from etude.code import Mutant, MutationCandidate, is_script
from etude.code.functions import Unit
from etude.config import BuildConfig
from etude.errors import UserError
from etude.grading import grade_changes
from etude.records import CodeTask, Focus, Outcome
from etude.sandbox import BoxError, Changes, Image, Limits, Sandbox, TestReport
from etude.tasks.shams import sham_answers
from etude.tasks.statements import WORDS, Determined, description, failing, wish, with_symptom

MAX_TESTS = 12  # of a task that must start to pass, and as many that must keep passing
# Of the judged lines of a hidden test, those at which an operator of the library decides and no decoy comparison could
# show it to be wrong (`grading/guest/decoys.py`). Beyond half, such operators weigh more than the test's own values.
MAX_EQUALITY = 0.5
_GUESSED = ("removal", "feature", "class", "commit")  # kinds that remove more text than the agent still sees
_BATCH = 200  # tests that run together
T = TypeVar("T")
R = TypeVar("R")


class Rejected(StrEnum):
    """The reason for which a candidate did not become a task."""

    EQUIVALENT = "no hidden test notices"
    EQUALITY = "only comparisons by the library notice"
    SILENT = "no visible test notices"
    HANGS = "runs too long"
    CRASHES = "kills the test runner"
    BOX = "its boxes fail"
    UNSTABLE = "results differ between runs"
    GOLD = "the gold answer does not pass"
    NO_OP = "scores without a change"
    SHAM = "a sham answer passes, such as one that returns None"
    DUPLICATE = "same text as another task"
    GUESS = "the tests need a name or text that is stated nowhere"
    VAGUE = "neither a test, an example nor a docstring says what is wanted"
    LEAK = "the answer is elsewhere in the tree"
    INSTALLED = "the answer is in the system of boxes"


@dataclass(frozen=True)
class Candidate:
    """A broken function, its visible tests, and the hidden tests that call it, the most telling first."""

    function: Unit
    broken: MutationCandidate
    split: str
    visible: tuple[str, ...]
    hidden: tuple[str, ...]
    leak: float  # share of the lost text that the tree holds elsewhere

    @property
    def mutants(self) -> dict[str, Mutant]:
        """Path -> the change of that file."""
        return {self.function.path: self.broken.mutant, **dict(self.broken.elsewhere)}

    @property
    def changes(self) -> dict[str, str]:
        """Path -> broken text."""
        return {path: mutant.text for path, mutant in self.mutants.items()}

    @property
    def solution(self) -> dict[str, str]:
        """Path -> original text."""
        return {path: mutant.source for path, mutant in self.mutants.items()}


@dataclass(frozen=True)
class Bench:
    """The place where candidates are tried: the sandbox, and the folders of the dataset that is being built."""

    sandbox: Sandbox
    name: str
    repository: Path
    site: Path
    hidden: Path
    source_roots: tuple[str, ...]
    licence: str
    options: BuildConfig

    @cached_property
    def determined(self) -> Determined:
        """The words in the files that the agent sees, and in the hidden tests."""
        return Determined(self.repository, self.hidden)

    @property
    def limits(self) -> Limits:
        """The limits of one test run; a program that hangs is stopped."""
        return Limits(seconds=self.options.hang_seconds)

    def image(self, changes: dict[str, str]) -> Image:
        """The repository with `changes` (path -> text), and its dependencies."""
        return Image(self.repository, self.site, changes)


@dataclass(frozen=True)
class ProvisionalTask:
    """A task that passed one run and is not yet proved; `outcomes` are those of that run."""

    task: CodeTask
    outcomes: dict[str, str]


def _twice(work: Callable[[Bench, T], Awaitable[R]]) -> Callable[[Bench, T], Awaitable[R | Rejected]]:
    """Repeats `work` once if its box fails: one program must not end a build."""

    @wraps(work)
    async def run(bench: Bench, item: T) -> R | Rejected:
        for _ in range(2):
            try:
                return await work(bench, item)
            except BoxError as e:
                if not bench.sandbox.alive:
                    raise UserError(f"boxes can no longer be made ({e}); build again with fewer `--workers`.") from None
        return Rejected.BOX

    return run


@_twice
async def probe(bench: Bench, candidate: Candidate) -> ProvisionalTask | Rejected:
    """Run the tests of a candidate once. Returns the task that the candidate would make, or the reason against it.
    Raises UserError if no more boxes can be made."""
    # The changes lie over the whole tree, since few candidates would repay the cost of a tree of their own.
    changes = {path: text.encode("utf-8", "surrogateescape") for path, text in candidate.changes.items()}
    tests = [*candidate.hidden, *candidate.visible]
    report = await bench.sandbox.run_tests(bench.image({}), changes, tests, bench.hidden, bench.limits)
    if report.timed_out:
        return Rejected.HANGS
    if report.crashed or report.tampered:
        return Rejected.CRASHES
    failed, shown = failing(report, _telling(candidate, report)), failing(report, candidate.visible)
    if not failed:
        return Rejected.EQUALITY if failing(report, candidate.hidden) else Rejected.EQUIVALENT
    if bench.options.visible_failure and not shown:
        return Rejected.SILENT
    sample = ("", "") if shown else await _example(bench, candidate, report, changes, failed)
    statement = await _statement(bench, candidate, report, changes, sample)
    if candidate.broken.kind in _GUESSED:
        guessed = bench.determined.guesses(failed, candidate.changes, candidate.solution, statement)
        failed = [test for test in failed if test not in guessed]
        if not failed:
            return Rejected.GUESS
    if bench.options.symptoms and not (shown or _says(candidate, bool(sample[1]) and failed != [sample[0]])):
        return Rejected.VAGUE
    return ProvisionalTask(task=_task(bench, candidate, report, failed, statement), outcomes=report.outcomes)


def _telling(candidate: Candidate, report: TestReport) -> list[str]:
    """The hidden tests that do not rest on comparisons by the library alone."""
    return [test for test in candidate.hidden if report.equality.get(test, 0.0) <= MAX_EQUALITY]


def _says(candidate: Candidate, example: bool) -> bool:
    """Whether a statement determines what is wanted although no visible test fails, with or without an example. One
    example does not tell what a body did that is gone: that takes words, and so does a commit."""
    broken, unit = candidate.broken, candidate.function
    described = bool(description(unit, broken.mutant.source))
    if broken.kind == "commit":
        text = re.sub(r" \([^()\n]*\)", "", broken.instruction)  # without the names of files
        return len(text.split()) >= (WORDS if example else 3 * WORDS)
    if broken.kind in ("removal", "feature"):
        return described
    return example or (described and broken.kind != "class")  # whose docstring tells little of its methods


async def _example(
    bench: Bench, candidate: Candidate, report: TestReport, changes: Changes, failed: Sequence[str]
) -> tuple[str, str]:
    """An example out of a failing hidden test, if it fails there each time: (test, example), or empty texts."""
    if not bench.options.symptoms:
        return "", ""
    test, code = bench.determined.example(report, failed)
    if test:
        again = await bench.sandbox.run_tests(bench.image({}), changes, [test], bench.hidden, bench.limits)
        if (again.messages.get(test), again.lines.get(test)) == (report.messages.get(test), report.lines.get(test)):
            return test, code
    return "", ""


async def _statement(
    bench: Bench, candidate: Candidate, report: TestReport, changes: Changes, sample: tuple[str, str]
) -> str:
    """The statement of the task. A message that differs from run to run is left out, so that equal builds give equal
    datasets."""
    function, broken = candidate.function, candidate.broken
    verb = "Implement" if broken.kind == "removal" else "Fix"
    request = broken.instruction or f"{verb} `{function.qualname}` in {function.path}"
    if not bench.options.symptoms:
        return request.partition("\n")[0]
    if shown := failing(report, candidate.visible):
        again = await bench.sandbox.run_tests(bench.image({}), changes, shown[:1], bench.hidden, bench.limits)
        if again.messages.get(shown[0]) != report.messages.get(shown[0]):
            report = replace(report, messages={})
    if broken.kind in ("removal", "feature"):
        request = f"{request}.\n\n{wish(function, broken.mutant.source)}"
    return with_symptom(request, report, candidate.visible, candidate.hidden, sample)


@_twice
async def prove(bench: Bench, provisional: ProvisionalTask) -> Rejected | None:
    """Repeat the broken tree and the gold answer through the grader itself. Returns the reason against the task, or
    None. Together with the probe, the broken tree has then been run `repeats` times, and the gold answer as often.
    Raises UserError if no more boxes can be made."""
    task = provisional.task
    image = bench.image(task.changes)
    gold = {path: text.encode() for path, text in task.solution.items()}
    for _ in range(max(1, bench.options.repeats - 1)):
        none = await grade_changes(bench.sandbox, task, image, bench.hidden, {})
        if none.passed or none.outcome is not Outcome.SCORED:
            return Rejected.NO_OP
        decisive = (*task.fail_to_pass, *task.pass_to_pass)
        if none.report is None or any(none.report.outcomes.get(t) != provisional.outcomes[t] for t in decisive):
            return Rejected.UNSTABLE
    for sham in sham_answers(task, bench.repository):
        if (await grade_changes(bench.sandbox, task, image, bench.hidden, sham, bench.limits)).passed:
            return Rejected.SHAM
    for _ in range(bench.options.repeats):
        fixed = await grade_changes(bench.sandbox, task, image, bench.hidden, gold)
        if not fixed.passed or fixed.outcome is not Outcome.SCORED:
            return Rejected.GOLD
    return None


def _task(bench: Bench, candidate: Candidate, report: TestReport, failed: Sequence[str], statement: str) -> CodeTask:
    function, broken = candidate.function, candidate.broken
    f2p = tuple(sorted(failed[:MAX_TESTS]))
    p2p = tuple(
        sorted([test for test in _telling(candidate, report) if report.outcomes.get(test) == "passed"][:MAX_TESTS])
    )
    # Lines of the original that the broken text lacks; at least 1, since moved lines occur in both.
    lost = (Counter(m.original.split("\n")) - Counter(m.snippet.split("\n")) for m in candidate.mutants.values())
    outside = report.outside.intersection((*f2p, *p2p))
    decided = len(outside) / len((*f2p, *p2p)) if outside.intersection(f2p) else 0.0
    difficulty = {
        "lines": float(function.body_lines),
        "complexity": float(function.complexity),
        "sites": float(broken.sites),
        "changed_lines": float(max(1, sum(lines.total() for lines in lost))),
        "f2p": float(len(f2p)),
        "p2p": float(len(p2p)),
        "visible_fails": float(bool(failing(report, candidate.visible))),
        "leak": round(candidate.leak, 3),
        "decided": round(decided, 3),
    }
    if is_script(function.path):
        difficulty["covered"] = round(report.covered, 3)
    else:
        resting = [test for test in (*f2p, *p2p) if report.equality.get(test)]
        difficulty["library_equality"] = round(len(resting) / len((*f2p, *p2p)), 3)
    return CodeTask(
        id=task_id(candidate),
        repository=bench.name,
        kind=broken.kind,
        operator=broken.mutant.operator,
        function=function.id,
        split=candidate.split,
        prompt=statement,
        focus=Focus(path=function.path, first_line=broken.mutant.first_line, last_line=broken.mutant.last_line),
        source_roots=bench.source_roots,
        changes=candidate.changes,
        solution=candidate.solution,
        visible_tests=candidate.visible,
        fail_to_pass=f2p,
        pass_to_pass=p2p,
        difficulty=difficulty,
        licence=bench.licence,
    )


def task_id(candidate: Candidate) -> str:
    """A readable, unique id: module, function, operator, and a digest of the broken function."""
    module = candidate.function.path.removesuffix(".py").rsplit("/", 1)[-1]
    mutant = candidate.broken.mutant
    text = f"{candidate.function.path}\0{mutant.text if candidate.broken.kind == 'commit' else mutant.snippet}"
    digest = blake3.blake3(text.encode()).hexdigest()[:8]
    return f"{module}.{candidate.function.qualname}.{mutant.operator}.{digest}"


async def in_order(
    work: Callable[[T], Awaitable[R]],
    items: Sequence[T],
    workers: int,
    ended: Callable[[int, int], None] | None = None,
) -> list[R]:
    """Run `work` on every item, at most `workers` at a time. Returns the results in the order of `items`. `ended` is
    called with the numbers of items that are done, and of all."""
    free, done = asyncio.Semaphore(workers), 0
    if ended is not None:
        ended(0, len(items))

    async def run(item: T) -> R:
        nonlocal done
        async with free:
            result = await work(item)
        done += 1
        if ended is not None:
            ended(done, len(items))
        return result

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(item)) for item in items]
    return [task.result() for task in tasks]


async def stable_tests(
    bench: Bench,
    tests: Sequence[str],
    hidden: Path | None,
    changes: Changes,
    ended: Callable[[int, int], None] | None = None,
) -> tuple[set[str], set[str]]:
    """(stable, dropped) of `tests` on the unbroken tree after `changes`: stable tests pass each time. `ended`: as of
    `in_order`, for batches of tests."""
    files: dict[str, list[str]] = {}  # of JavaScript: each takes a process or two as a whole
    for test in filter(is_script, tests):
        files.setdefault(test.partition("::")[0], []).append(test)
    others = [test for test in tests if not is_script(test)]
    batches = [others[i : i + _BATCH] for i in range(0, len(others), _BATCH)] + list(files.values())
    batches *= bench.options.repeats
    limits = Limits(seconds=max(60.0, bench.options.hang_seconds))

    async def run(chunk: Sequence[str]) -> TestReport:
        report = await bench.sandbox.run_tests(bench.image({}), changes, chunk, hidden, limits)
        if not report.timed_out or len(chunk) == 1 or is_script(chunk[0]):
            return report
        first, second = await run(chunk[: len(chunk) // 2]), await run(chunk[len(chunk) // 2 :])
        return replace(first, outcomes={**first.outcomes, **second.outcomes})

    reports = await in_order(run, batches, bench.options.workers, ended)
    dropped = {test for chunk, report in zip(batches, reports, strict=True) for test in failing(report, chunk)}
    return set(tests) - dropped, dropped
