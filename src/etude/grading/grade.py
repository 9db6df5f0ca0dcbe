"""Grades an attempt: hidden tests run on its change set in a fresh box; the rest of the agent's own box does not
count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from etude.code import SCRIPT_SUFFIXES
from etude.records import CodeTask, Outcome
from etude.renderers import escaped
from etude.sandbox import MAX_FILE_BYTES, BoxError, Changes, Image, Limits, Sandbox, TestReport, checked_path

GRADE_LIMITS = Limits()
MAX_CHANGES = 1000

_NAMES = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "setup.py", "pyproject.toml", "noxfile.py"}
    | {"sitecustomize.py", "usercustomize.py", "pytest.py", "Makefile"}
    | {"package.json", "package-lock.json", ".npmrc", ".swcrc"}
)
_SETTINGS = re.compile(
    r"(jest|vitest|vite|babel)\.[\w.-]*\.[cm]?[jt]s|setup-?[tT]ests?\.[jt]sx?|tsconfig.*\.json|\.(mocha|babel)rc.*"
)
_FOLDERS = frozenset(
    {"tests", "test", "__tests__", ".git", ".github", ".venv", "venv", "__pycache__", "node_modules"}
    | {"__mocks__", "__snapshots__"}  # jest reads their files as packages and as expected values
)
_SCRIPT_TESTS = frozenset({"test", "tests", "__tests__", "spec"})  # folders of JavaScript tests
_SUFFIXES = (".pth", ".pyc", ".so", ".ini", ".cfg", ".lock")


@dataclass(frozen=True)
class Grade:
    """The grade of an attempt. `detail` is one sentence. `report` is None if no test was run.

    `flags` are for people to look at, and never raise a score: "tests-touched", "outside-roots", "tamper", "crash",
    "timeout".
    """

    outcome: Outcome
    score: float  # from 0 to 1, of environments of users any number
    passed: bool
    detail: str
    report: TestReport | None
    flags: tuple[str, ...] = ()


async def grade_changes(
    sandbox: Sandbox, task: CodeTask, image: Image, hidden: Path, changes: Changes, limits: Limits = GRADE_LIMITS
) -> Grade:
    """Run the task's hidden tests on `image` with the acceptable part of `changes`.

    Any effect of the change on the tests counts against the agent. Raises BoxError, payer infra, if the sandbox failed.
    """
    taken, aside = graded_changes(changes, task.source_roots)
    note = f"; set aside {len(aside)}: {', '.join(map(escaped, aside[:3]))}"[:200] if aside else ""
    tests = tuple(dict.fromkeys(task.hidden_tests))
    if not tests:
        return Grade(Outcome.SCORED, 0.0, False, f"no hidden test decides{note}", None, _flags(aside, None))
    report = await sandbox.run_tests(image, taken, tests, hidden, limits)
    flags = _flags(aside, report)
    if report.tampered:
        return Grade(Outcome.TAMPERED, 0.0, False, f"the test results are not genuine{note}", report, flags)
    bad = [test for test in tests if report.outcomes.get(test) != "passed"]
    if not bad and not report.crashed and not report.timed_out:
        return Grade(Outcome.SCORED, 1.0, True, f"all {len(tests)} tests passed{note}", report, flags)
    return Grade(Outcome.SCORED, 0.0, False, _why(report, bad, len(tests), limits) + note, report, flags)


def _flags(aside: Sequence[str], report: TestReport | None) -> tuple[str, ...]:
    paths = [PurePosixPath(path) for path in aside]
    tests = [p.name == "conftest.py" or p.name.startswith("test_") or {"tests", "test"} & set(p.parts) for p in paths]
    touched = {"tests-touched" if of_tests else "outside-roots" for of_tests in tests}
    signals: dict[str, bool] = {}
    if report is not None:
        signals = {"tamper": report.tampered, "crash": report.crashed, "timeout": report.timed_out}
    return (*sorted(touched), *(name for name, present in signals.items() if present))


def _why(report: TestReport, bad: Sequence[str], total: int, limits: Limits) -> str:
    if report.timed_out:
        return f"the tests did not end within {limits.seconds:.0f} s"
    if report.crashed:
        return "the test process died"
    return f"{len(bad)} of {total} tests failed, first {bad[0]}: {report.messages.get(bad[0], '')}"


def graded_changes(changes: Changes, source_roots: Sequence[str]) -> tuple[dict[str, bytes | None], list[str]]:
    """(files to grade, sorted paths that are set aside): only code below the task's source roots is graded."""
    taken: dict[str, bytes | None] = {}
    aside: list[str] = []
    for path in sorted(changes):
        data = changes[path]
        fits = len(taken) < MAX_CHANGES and (data is None or len(data) <= MAX_FILE_BYTES)
        if fits and acceptable(path, source_roots):
            taken[path] = data
        else:
            aside.append(path)
    return taken, aside


def acceptable(path: str, source_roots: Sequence[str]) -> bool:
    """Whether a changed file may take part in grading; false for a name with unprintable characters."""
    try:
        if checked_path(path) != path or escaped(path) != path:
            return False
    except BoxError:
        return False
    pure = PurePosixPath(path)
    below = any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in source_roots)
    outer = next((root for root in source_roots if path.startswith(f"{root.rstrip('/')}/")), "")
    inner = pure.relative_to(outer).parts if outer else pure.parts
    name = pure.name
    if name in _NAMES or name.endswith(_SUFFIXES) or name.startswith("test_") or name.endswith("_test.py"):
        return False
    if is_test_file(inner[-1]) or _SETTINGS.fullmatch(name):
        return False
    return below and not _FOLDERS.intersection(inner[:-1])


def is_test_file(path: str) -> bool:
    """Whether a file holds JavaScript tests, by its name or its folder."""
    pure = PurePosixPath(path)
    if not path.endswith(SCRIPT_SUFFIXES):
        return False
    named = re.search(r"(^|[._-])(test|tests|spec)\.[cm]?[jt]sx?$", pure.name) is not None
    below = _SCRIPT_TESTS.intersection(pure.parts[:-1]) and not {"helpers", "fixtures", "support"} & set(pure.parts)
    if re.search(r"(\.d|[-.]test-d)\.[cm]?tsx?$", pure.name):  # types alone
        return False
    return named or bool(below)
