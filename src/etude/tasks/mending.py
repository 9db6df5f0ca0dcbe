"""Mends a task that wrong answers pass: further hidden tests, which the gold answer passes and they fail, decide too.

A reward needs all deciding tests, so that a test less would only help the wrong answers. A test that is decided inside
of the tested process gains no company: tests that are decided outside come first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from etude.code import is_script, parse
from etude.grading import graded_changes
from etude.records import CodeTask, Outcome
from etude.sandbox import Changes, Limits, Sandbox, TestReport
from etude.tasks import split
from etude.tasks.dataset import Dataset
from etude.tasks.gates import MAX_EQUALITY
from etude.tasks.statements import Determined, failing

MAX_POOL = 240  # tests that are tried
PER_ANSWER = 3  # tests that are added against one wrong answer
_BATCH = 40
_SECONDS = 60.0
_GOLD_RUNS = 2


async def other_failures(
    sandbox: Sandbox, data: Dataset, task: CodeTask, answers: Sequence[Changes]
) -> tuple[list[list[str]], TestReport]:
    """For each answer the tests of the pool that it fails and the gold answer passes each time; and a report of the
    gold answer. Raises BoxError."""
    tests = pool(data, task)
    gold: Changes = {path: text.encode("utf-8", "surrogateescape") for path, text in task.solution.items()}
    reports = [await _run(sandbox, data, task, gold, tests) for _ in range(_GOLD_RUNS)]
    good = [
        test
        for test in tests
        if all(report.outcomes.get(test) == "passed" for report in reports)
        and reports[0].equality.get(test, 0.0) <= MAX_EQUALITY
    ]
    failures: list[list[str]] = []
    for answer in answers:
        report = await _run(sandbox, data, task, answer, good)
        failures.append(failing(report, good))
    return failures, reports[0]


async def mended(sandbox: Sandbox, data: Dataset, task: CodeTask, wrong: Sequence[Changes]) -> CodeTask | None:
    """The task with further deciding tests, at least one against each wrong answer, whose gates hold; None if there is
    no such task. Raises BoxError."""
    failures, gold = await other_failures(sandbox, data, task, wrong)
    stated = Determined(data.repository, data.hidden)
    guesses = stated.guesses([t for tests in failures for t in tests], task.changes, task.solution, task.prompt)
    added: dict[str, None] = {}
    for tests in failures:
        fit = sorted((t for t in tests if t not in guesses), key=lambda t: (t not in gold.outside, t not in added))
        if not fit:
            return None
        added |= dict.fromkeys(fit[:PER_ANSWER])
    broken = await _run(sandbox, data, task, {}, [*added])
    failed = set(failing(broken, [*added]))
    f2p = tuple(sorted({*task.fail_to_pass, *failed}))
    p2p = tuple(sorted({*task.pass_to_pass, *(set(added) - failed)}))
    made = msgspec.structs.replace(task, fail_to_pass=f2p, pass_to_pass=p2p)
    return await _gated(sandbox, data, made)


async def _gated(sandbox: Sandbox, data: Dataset, task: CodeTask) -> CodeTask | None:
    """The task with the figures of its tests, or None if a gate does not hold."""
    none = await data.grade(sandbox, task, {})
    if none.passed or none.outcome is not Outcome.SCORED:
        return None
    gold: Changes = {path: text.encode("utf-8", "surrogateescape") for path, text in task.solution.items()}
    for _ in range(_GOLD_RUNS):
        fixed = await data.grade(sandbox, task, gold)
        if not fixed.passed:
            return None
    report = fixed.report
    outside = set[str]() if report is None else report.outside.intersection(task.hidden_tests)
    decided = len(outside) / len(task.hidden_tests) if outside.intersection(task.fail_to_pass) else 0.0
    counts = {"f2p": float(len(task.fail_to_pass)), "p2p": float(len(task.pass_to_pass)), "decided": round(decided, 3)}
    return msgspec.structs.replace(task, difficulty=task.difficulty | counts)


def pool(data: Dataset, task: CodeTask) -> list[str]:
    """Hidden tests that do not decide the task, those of its files first: of other tasks, and by their names in
    files."""
    own = list(dict.fromkeys(test.partition("::")[0] for test in task.hidden_tests))
    if is_script(task.function):
        tests = [test for each in data.tasks for test in each.hidden_tests if test.partition("::")[0] in own]
    else:
        files = [*own, *(test.partition("::")[0] for each in data.tasks for test in each.hidden_tests)]
        tests = [test for each in data.tasks for test in each.hidden_tests]
        tests += [test for path in dict.fromkeys(files) for test in _named(data, path)]
    deciding = {split.base(test) for test in task.hidden_tests}
    others = [test for test in dict.fromkeys(tests) if split.base(test) not in deciding and "::doctest:" not in test]
    return sorted(others, key=lambda test: test.partition("::")[0] not in own)[:MAX_POOL]


def _named(data: Dataset, path: str) -> Iterator[str]:
    """The test functions of a hidden file that the agent does not see."""
    file, shown = data.hidden / path, data.repository / path
    tree = parse(file.read_text("utf-8", "replace")) if path.endswith(".py") and file.is_file() else None
    seen = parse(shown.read_text("utf-8", "replace")) if shown.is_file() else None
    visible = set() if seen is None else set(_tests_of(seen))
    for name in () if tree is None else _tests_of(tree):
        if name not in visible:
            yield f"{path}::{name}"


def _tests_of(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from (f"{node.name}::{name}" for name in _functions(node.body))
    yield from _functions(tree.body)


def _functions(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.name


async def _run(sandbox: Sandbox, data: Dataset, task: CodeTask, answer: Changes, tests: Sequence[str]) -> TestReport:
    """One report of many tests, in runs of a few."""
    kept, _ = graded_changes(answer, task.source_roots)
    joined = TestReport(outcomes={}, messages={}, seconds=0.0)
    for start in range(0, len(tests), _BATCH):
        some = tests[start : start + _BATCH]
        report = await sandbox.run_tests(data.image(task), kept, some, data.hidden, Limits(seconds=_SECONDS))
        joined = replace(
            joined,
            outcomes=joined.outcomes | report.outcomes,
            messages=joined.messages | report.messages,
            outside=joined.outside | report.outside,
            equality={**joined.equality, **report.equality},
        )
    return joined
