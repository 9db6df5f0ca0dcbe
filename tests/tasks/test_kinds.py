"""Kinds of tasks that break more than a function: classes, features, commits, several sites; and written tests."""

from __future__ import annotations

import ast
import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude.code import functions as discover
from etude.code import mutate
from etude.code.operators import OPERATORS
from etude.config import BuildConfig
from etude.errors import UserError
from etude.records import CodeTask
from etude.tasks import classes, commits, features, leaks, synthesis
from etude.tasks.build import build_dataset
from etude.tasks.check import check_dataset
from etude.tasks.dataset import Dataset

SHELF = '''"""Things on shelves."""


class Base:
    def size(self):
        return 0


class Shelf(Base):
    """Holds items in order."""

    def __init__(self, items=()):
        self.items = list(items)

    def size(self):
        return len(self.items)

    @property
    def full(self):
        return self.size() >= 3

    def add(self, item):
        """Puts an item on the shelf."""
        if self.full:
            raise ValueError("full")
        self.items.append(item)
        self._sort()

    def _sort(self):
        for i in range(len(self.items)):
            for j in range(i):
                if self.items[j] > self.items[i] and i != j:
                    self.items[i], self.items[j] = self.items[j], self.items[i]

    def find(self, item, default=None):
        for i, other in enumerate(self.items):
            if other == item or (other is None and item is None):
                return i
        return default if default is not None else -1


def label(words, limit=10):
    """A short text of words."""
    joined = _join(words)
    if len(joined) > limit:
        joined = _cut(joined, limit)
    return joined


def _join(words):
    text = ""
    for word in words:
        text = text + "-" + word if text else word
    return text


def _cut(text, limit):
    if limit < 1:
        return ""
    return text[:limit]


def double(value):
    """Twice a value."""
    result = value
    result = result + value
    return result
'''
TESTS = """import pytest

from shelf import Shelf, label


def test_add():
    shelf = Shelf()
    for item in (3, 1, 2):
        shelf.add(item)
    assert shelf.items == [1, 2, 3]


def test_full():
    shelf = Shelf([1, 2, 3])
    with pytest.raises(ValueError):
        shelf.add(4)


def test_add_again():
    shelf = Shelf([2])
    shelf.add(1)
    assert shelf.items == [1, 2]


def test_find():
    assert Shelf([5, 6]).find(6) == 1
    assert Shelf([5, 6]).find(7) == -1


def test_find_default():
    assert Shelf([5, 6]).find(7, 9) == 9


def test_size():
    assert Shelf([5]).size() == 1
    assert not Shelf([5]).full


def test_label():
    assert label(["a", "b"]) == "a-b"


def test_label_long():
    assert label(["abc", "def"], 4) == "abc-"


def test_label_none():
    assert label([]) == ""


def test_label_cut():
    assert label(["abc"], 0) == ""
"""


def quiet(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total, stage


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "shelf-1.0"
    (root / "tests").mkdir(parents=True)
    (root / "shelf.py").write_text(SHELF)
    (root / "tests/test_shelf.py").write_text(TESTS)
    (root / "LICENSE").write_text("MIT License\n")
    return root


def _class(source: str = SHELF) -> discover.Function:
    return next(unit for unit in discover.classes("shelf.py", source) if unit.qualname == "Shelf")


def test_class_operators() -> None:
    found = mutate.mutants(SHELF, _class(), 1, classes.OPERATORS)
    by_operator: dict[str, list[str]] = {}
    for mutant in found:
        assert ast.dump(ast.parse(mutant.text)) != ast.dump(ast.parse(SHELF))
        by_operator.setdefault(mutant.operator, []).append(mutant.text)
    assert set(by_operator) == set(classes.OPERATORS)
    assert ["class Shelf:" in text for text in by_operator["class_rm_base"]] == [True]
    (shuffled,) = by_operator["class_shuffle"]
    assert sorted(shuffled.split()) == sorted(SHELF.split())
    without = next(text for text in by_operator["class_rm_funcs"] if "def _sort" not in text)
    assert "self._sort()" not in without
    assert "self.items.append(item)\n        pass\n" in without
    assert "def full" in without
    assert any("@property\n    def full" not in text and "def add" in text for text in by_operator["class_rm_funcs"])


def test_a_class_with_several_bases_and_keywords() -> None:
    source = "class A(B, C, metaclass=M):\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"
    (unit,) = discover.classes("a.py", source)
    heads = {m.text.split("\n")[0] for m in mutate.mutants(source, unit, 1, classes.OPERATORS)}
    assert {"class A(C, metaclass=M):", "class A(B, metaclass=M):"} <= heads


def test_combined_mutants_differ_at_each_site() -> None:
    function = next(f for f in discover.functions("shelf.py", SHELF) if f.qualname == "Shelf.find")
    found = mutate.combined_mutants(SHELF, function, 1, set(OPERATORS))
    assert {mutant.operator.count("+") for mutant in found} == {1, 2}
    for mutant in found:
        ast.parse(mutant.text)
        assert len(mutant.edits) >= mutant.operator.count("+") + 1
        assert len(set(mutant.operator.split("+"))) == mutant.operator.count("+") + 1
    assert [m.text for m in found] == [m.text for m in mutate.combined_mutants(SHELF, function, 1, set(OPERATORS))]


def test_a_slice_is_what_only_one_function_needs() -> None:
    functions = discover.functions("shelf.py", SHELF)
    by_name = {f.qualname: f for f in functions}
    callers = {
        "shelf.py::label": {"t::a", "t::b"},
        "shelf.py::_join": {"t::a", "t::b"},
        "shelf.py::_cut": {"t::b"},
        "shelf.py::double": {"t::c"},
    }
    (members,) = features.slices(functions, callers)
    assert members == (by_name["label"], by_name["_join"], by_name["_cut"])
    broken = features.deletion(members, {"shelf.py": SHELF})
    assert broken is not None
    assert broken.instruction == "Implement `label` in shelf.py and what it calls: `_join`, `_cut`"
    tree = ast.parse(broken.mutant.text)
    bodies = {n.name: ast.unparse(n.body[-1]) for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert {name for name, text in bodies.items() if "NotImplementedError" in text} == {"label", "_join", "_cut"}
    line = broken.mutant.text.split("\n")[broken.mutant.first_line - 1]
    assert line.startswith("def label(")
    # A helper that another test needs stays.
    assert [[f.qualname for f in s] for s in features.slices(functions, callers | {"shelf.py::_cut": {"t::c"}})] == [
        ["label", "_join"]
    ]


def changed_functions(task: CodeTask) -> set[str]:
    """The functions whose lines a task's difference touches: written apart from what the build uses."""
    found: set[str] = set()
    for path, wrong in task.changes.items():
        right = task.solution[path].split("\n")
        lines, place = set(), 0
        for line in difflib.ndiff(right, wrong.split("\n")):
            if line.startswith(("  ", "- ")):
                place += 1
            if line.startswith("- "):
                lines.add(place)
        for node in ast.walk(ast.parse("\n".join(right))):
            if isinstance(node, ast.FunctionDef) and lines & set(range(node.lineno, (node.end_lineno or 0) + 1)):
                found.add(f"{path}::{node.name}")
    return found


def overlap(data: Dataset) -> set[str]:
    train, heldout = (set().union(*map(changed_functions, data.split(name))) for name in ("train", "heldout"))
    return train & heldout


def test_feature_and_class_tasks(repository: Path, tmp_path: Path) -> None:
    options = BuildConfig(max_tasks=12, kinds=("feature", "class", "mutation"), visible="half", heldout_fraction=0.4)
    data = build_dataset(repository, tmp_path / "out", options, quiet)
    assert {task.kind for task in data.tasks} == {"feature", "class", "mutation"}
    assert overlap(data) == set()
    assert {task.split for task in data.tasks if task.kind == "class"} == {"train", "heldout"}
    for task in data.tasks:
        gone = task.changes["shelf.py"].count("NotImplementedError")
        assert task.kind != "feature" or (
            gone == task.difficulty["sites"] > 1 and " and what it calls: `" in task.prompt
        )
        assert task.kind != "feature" or task.pass_to_pass, "the rest works"
    assert check_dataset(data.root, quiet).ok


def _git(repository: Path, *arguments: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    people = ["-c", "user.name=A", "-c", "user.email=a@b"]
    subprocess.run(["git", *people, *arguments], cwd=repository, check=True, capture_output=True, env=environment)


def test_commit_tasks(repository: Path, tmp_path: Path) -> None:
    fixed = SHELF.replace("if limit < 1:", "if limit <= 0:").replace("other == item or", "item == other or")
    buggy = fixed.replace('    if limit <= 0:\n        return ""\n', "").replace("text[:limit]", "text[: limit + 1]")
    (repository / "shelf.py").write_text(buggy)
    (repository / "tests/test_shelf.py").write_text(TESTS.partition("def test_label_long")[0])
    _git(repository, "init", "-q", "-b", "main")
    _git(repository, "add", ".")
    _git(repository, "commit", "-q", "-m", "Shelves and labels")
    (repository / "shelf.py").write_text(fixed)
    (repository / "tests/test_shelf.py").write_text(TESTS)
    _git(repository, "commit", "-q", "-a", "-m", "fix: Labels are cut at their limit (#12)")
    (repository / "shelf.py").write_text(fixed.replace("Twice a value", "Two times a value"))
    _git(repository, "commit", "-q", "-a", "-m", "Other words, no tests")
    options = BuildConfig(max_tasks=4, kinds=("commit", "mutation"), visible="half", operators=("op_const",))
    data = build_dataset(repository, tmp_path / "out", options, quiet)
    (task,) = [task for task in data.tasks if task.kind == "commit"]
    assert task.prompt.startswith("Labels are cut at their limit (shelf.py)")
    assert task.changes == {"shelf.py": buggy.replace("Twice a value", "Two times a value")}
    assert task.solution == {"shelf.py": (repository / "shelf.py").read_text()}
    assert task.fail_to_pass
    assert all("label" in test for test in task.fail_to_pass)
    assert overlap(data) == set()
    assert not (data.repository / ".git").exists()
    assert check_dataset(data.root, quiet).ok
    commit = subprocess.run(["git", "rev-parse", "HEAD~1"], cwd=repository, capture_output=True, text=True, check=True)
    words = tmp_path / "requests.jsonl"
    words.write_text(
        json.dumps({"commit": commit.stdout.strip(), "request": "labels too long!!\n", "turn": "01X"}) + "\n"
    )
    asked = build_dataset(repository, tmp_path / "asked", options.model_copy(update={"requests": str(words)}), quiet)
    (task,) = [task for task in asked.tasks if task.kind == "commit"]
    assert task.prompt.startswith("labels too long!!\n"), "a user's words, not the commit's"
    assert "cut at their limit" not in task.prompt


def test_requests_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    words = tmp_path / "requests.jsonl"
    for text in ("{", '{"commit": "a"}', '{"commit": "a", "request": " "}', "[1]"):
        words.write_text(text + "\n")
        with pytest.raises(UserError, match="give the file that `etude live requests` wrote"):
            commits.users_requests(words)
    with pytest.raises(ValueError, match="add commit to kinds"):
        BuildConfig(requests=str(words))


@pytest.mark.slow
def test_written_tests_count_if_mutants_die(repository: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def writer(function: discover.Function, source: str) -> str:
        seen.append(function.qualname)
        assert source == SHELF
        return "from shelf import double\n\n\ndef test_double():\n    assert double(3) == 6\n"

    options = BuildConfig(max_tasks=40, kinds=("mutation",), visible="half", heldout_fraction=0.2)
    data = build_dataset(repository, tmp_path / "out", options, quiet, writer)
    assert seen == ["double"]
    written = [task for task in data.tasks if task.function == "shelf.py::double"]
    assert written
    (path,) = {test.split("::")[0] for task in written for test in task.fail_to_pass}
    assert (data.hidden / path).is_file()
    assert not (data.repository / path).exists()
    assert check_dataset(data.root, quiet).ok
    blind = build_dataset(
        repository,
        tmp_path / "blind",
        options,
        quiet,
        lambda *_: "from shelf import double\ndef test_double(): double(3)\n",
    )
    assert not [task for task in blind.tasks if task.function == "shelf.py::double"]


def test_a_command_writes_tests(tmp_path: Path) -> None:
    script = tmp_path / "writer.py"
    script.write_text("import json, sys\nasked = json.load(sys.stdin)\nprint('# ' + asked['qualname'])\n")
    function = next(f for f in discover.functions("shelf.py", SHELF) if f.qualname == "double")
    assert synthesis.by_command(f"{sys.executable} {script}")(function, SHELF) == "# double\n"
    with pytest.raises(UserError, match="writes tests failed on"):
        synthesis.by_command("/nonexistent/writer")(function, SHELF)


@pytest.mark.slow
def test_an_installed_copy_of_the_answer_is_found(repository: Path, tmp_path: Path) -> None:
    data = build_dataset(
        repository, tmp_path / "out", BuildConfig(max_tasks=6, visible="half", kinds=("removal",)), quiet
    )
    folders = {"repository": data.repository, "site": data.site}
    assert leaks.stored(folders, data.tasks) == {}
    (data.site / "shelf_copy.py").write_text(SHELF)
    found = leaks.stored(folders, data.tasks)
    assert set(found) == {task.id for task in data.tasks}
    assert set(found.values()) == {"site/shelf_copy.py"}
    report = check_dataset(data.root, quiet)
    assert any(problem.startswith("site/shelf_copy.py holds the answer of") for problem in report.problems)
    (data.site / "shelf_copy.py").unlink()
