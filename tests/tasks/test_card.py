"""The card warns of what a dataset cannot do, with its figures."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from etude.config import BuildConfig
from etude.records import CodeTask
from etude.sandbox import TestReport
from etude.tasks import card, gates
from etude.tasks.inventory import Inventory
from etude.tasks.settings import PytestSettings
from tests.tasks.test_harbor import TASK


def _log(copies: dict[str, int], candidates: int = 100) -> card.TaskBuildLog:
    return card.TaskBuildLog(
        functions=9, eligible=9, covered=9, candidates=candidates, rejected={}, tests=9, unstable=(), failed={},
        inventory=Inventory(()), settings=PytestSettings(), generated=(), straddling={}, copies=copies,
        installed={}, system="minimal blake3-0", passed=50,
    )  # fmt: skip


def _tasks(train: int, heldout: int, kind: str = "mutation") -> list[CodeTask]:
    """As many tasks of a side as given, each of a function of its own."""
    made = []
    for i in range(train + heldout):
        path = f"m{kind}{i}.py"
        wrong, right = ({path: f"def f{i}():\n    return {value}\n"} for value in (1, 2))
        side = "train" if i < train else "heldout"
        made.append(msgspec.structs.replace(TASK, id=str(i), kind=kind, split=side, changes=wrong, solution=right))
    return made


def test_enough() -> None:
    options = BuildConfig(kinds=("mutation",))
    assert card.warnings(_tasks(60, 30), _log({"a.py": 10}), options) == ()


def test_too_small() -> None:
    options = BuildConfig(kinds=("mutation",), operators=("op_flip",), visible_failure=True, max_lines=20)
    teach, measure = card.warnings(_tasks(8, 7), _log({}), options)
    assert teach.startswith("Too small to teach: 8 training tasks of 8 functions; with fewer than 50 of 25 a model")
    assert teach.endswith("more `kinds`, more `operators`, `visible_failure = false`, a higher `max_lines`.")
    assert "7 held-out tasks of 7 functions; differences below some 37 points" in measure
    # Many tasks of few functions are few.
    same = [msgspec.structs.replace(_tasks(1, 0)[0], id=str(i)) for i in range(90)]
    assert "90 training tasks of 1 functions" in card.warnings([*same, *_tasks(0, 30)], _log({}), options)[0]


def test_kinds_that_are_missing() -> None:
    options = BuildConfig(kinds=("mutation", "removal", "commit"), max_tasks=95)
    tasks = [*_tasks(60, 30), *_tasks(5, 0, "commit")]
    assert card.warnings(tasks, _log({}), options) == (
        "No held-out task of the kind commit: it cannot be measured.",
        "0 of 95 tasks are of the kind removal; others came first: ask for it alone, or for more tasks.",
        "5 of 95 tasks are of the kind commit; others came first: ask for it alone, or for more tasks.",
    )


def test_a_repository_that_repeats_itself() -> None:
    options = BuildConfig(kinds=("mutation",))
    (warning,) = card.warnings(_tasks(60, 30), _log({"urlutils.py": 60, "a.py": 5}), options)
    assert "the answers of 65 of 100 programs" in warning
    assert "most often in urlutils.py (60), a.py (5)" in warning


def test_comparisons_by_the_library() -> None:
    """A hidden test that rests on them is not used; the card has the share of those that hold one."""
    report = TestReport({}, {}, 0.0, equality={"a": 0.0, "b": 0.5, "c": 0.6})
    candidate = SimpleNamespace(hidden=("a", "b", "c", "d"))
    assert gates._telling(candidate, report) == ["a", "b", "d"]  # type: ignore[arg-type]
    tasks = [msgspec.structs.replace(TASK, difficulty={"library_equality": share}) for share in (0.5, 0.25)]
    (sentence,) = card._decided(tasks)
    assert "38% of a task's tests on average" in sentence
    assert "more than 50% of the judged lines" in sentence


@pytest.mark.parametrize(
    ("tasks", "passed", "failed", "most", "said"),
    [
        (20, 90, 10, 80, "good: 20 tasks of 20 files, with 90% of the repository's tests"),
        (
            19,
            90,
            0,
            80,
            "thin: 19 tasks of 19 files, with 100% of the repository's tests; a good dataset has 20 of 5. ",
        ),
        (
            20,
            89,
            11,
            80,
            "thin: 20 tasks of 20 files, with 89% of the repository's tests; 11 fail on the unbroken tree ",
        ),
        (40, 49, 51, 80, "hollow: 40 tasks of 40 files, with 49% "),
        (4, 9, 0, 80, "hollow: 4 tasks of 4 files, "),
        (4, 9, 0, 4, "good: 4 tasks of 4 files, "),
    ],
)
def test_the_verdict(tasks: int, passed: int, failed: int, most: int, said: str) -> None:
    log = replace(_log({}), passed=passed, failed={f"t::{n}": "" for n in range(failed)})
    told = card.verdict(_tasks(tasks, 0), log, BuildConfig(max_tasks=most))
    assert told.startswith(said)
    assert told.startswith("good") or re.search(r"\. Next: .*\w\W?\.$", told)


def test_tasks_of_few_files_are_thin_and_what_could_not_be_installed_is_the_next_step() -> None:
    tasks = [msgspec.structs.replace(_tasks(1, 0)[0], id=str(i)) for i in range(40)]
    assert card.verdict(tasks, _log({}), BuildConfig()).startswith("thin: 40 tasks of 1 files")
    log = replace(_log({}), failed=dict.fromkeys(map(str, range(20)), ""), refused="x has no wheel")
    assert "Next: name wheels of what was not installed" in card.verdict(_tasks(40, 0), log, BuildConfig())
