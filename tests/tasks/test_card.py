"""The card warns of what a dataset cannot do, with its figures."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec

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
        installed={}, system="minimal blake3-0",
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
