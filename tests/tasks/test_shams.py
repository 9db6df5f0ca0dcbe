"""Sham answers, and the gate that drops tasks which one of them passes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from etude.config import BuildConfig
from etude.records import CodeTask, Focus
from etude.tasks.build import build_dataset
from etude.tasks.shams import shams

MODULE = '''
"""Größen."""

def one(a, b=2): return "ß" + a  # on one line

class Shelf:
    @staticmethod
    def of(*items):
        """A docstring
        on two lines."""
        return [*items]

    def wrap(self, function):
        @property
        def inner(self):
            return function(self)
        return inner

LAST = 1
'''


def _task(function: str, text: str = MODULE, path: str = "lib.py") -> CodeTask:
    return CodeTask(
        id="x",
        repository="r",
        kind="mutation",
        operator="o",
        function=f"{path}::{function}",
        split="train",
        prompt="p",
        focus=Focus(path=path, first_line=1, last_line=2),
        source_roots=("",),
        changes={path: text},
        solution={},
        visible_tests=(),
        fail_to_pass=(),
        pass_to_pass=(),
        difficulty={},
        licence="MIT",
    )


@pytest.mark.parametrize("function", ["one", "Shelf.of", "Shelf.wrap"])
def test_shams_replace_the_body_and_nothing_else(function: str) -> None:
    found = [sham["lib.py"] for sham in shams(_task(function))]
    texts = [data.decode() for data in found if data is not None]
    assert len(set(texts)) == len(texts) >= 5
    for text in texts:
        space: dict[str, object] = {}
        exec(compile(text, "lib.py", "exec"), space)
        assert space["LAST"] == 1
        old, new = (
            {n.name: ast.dump(n.args) for n in ast.walk(ast.parse(t)) if isinstance(n, ast.FunctionDef)}
            for t in (MODULE, text)
        )
        assert all(new[name] == old[name] for name in ("one", "of", "wrap"))
    spaces = []
    for text in texts:
        exec(text, space := {})
        spaces.append(space)
    if function == "one":
        errors = [index for index, text in enumerate(texts) if "def __exit__" not in text and "raise type" in text]
        for index in reversed(errors):
            with pytest.raises(ValueError, match="v w"):
                spaces.pop(index)["one"]("v", "w")
        results = [space["one"]("v", "w") for space in spaces]
        assert results[:3] == [None, True, False]
        assert [*results[3]] == []
        assert results[4] == object()
        assert results[-2:] == ["v", "w"]


def test_other_tasks_have_none() -> None:
    assert shams(_task("Shelf")) == shams(_task("gone")) == shams(_task("one", "def (")) == []
    assert shams(_task("one", "export function one() {}", "lib.js")) == []


LIBRARY = '''
from contextlib import contextmanager


def checked(value):
    """Raise ValueError unless the value is positive."""
    if value <= 0:
        raise ValueError(value)
    return None


def settled(value):
    """Raise ValueError if the value is not settled yet."""
    if value not in ("open", "closed"):
        raise ValueError(f"not settled: {value}")
    return value.upper()


@contextmanager
def raising(kind):
    """Expect an error of a kind in the block."""
    try:
        yield
    except kind:
        return
    raise AssertionError("no error")


def double(value):
    """Twice the value."""
    if value is None:
        return 0
    return value + value
'''
TESTS = """
import pytest
from lib import checked, double, raising, settled


def test_raising():
    with raising(ValueError):
        raise ValueError


def test_raising_again():
    with raising(KeyError):
        raise KeyError


def test_settled():
    with pytest.raises(ValueError, match="settled"):
        settled("half")


def test_settled_nowhere():
    with pytest.raises(ValueError, match="half way"):
        settled("half way")


def test_checked():
    assert checked(1) is None


def test_checked_again():
    assert checked(2) is None


def test_double():
    assert double(2) == 4
    assert double(None) == 0


def test_double_text():
    assert double("a") == "aa"
"""


def test_a_task_that_a_sham_passes_is_dropped(tmp_path: Path) -> None:
    repository = tmp_path / "lib"
    (repository / "tests").mkdir(parents=True)
    (repository / "lib.py").write_text(LIBRARY)
    (repository / "tests/test_lib.py").write_text(TESTS)
    (repository / "LICENSE").write_text("MIT License\n\nPermission is hereby granted, free of charge\n")
    out = tmp_path / "tasks"
    made = build_dataset(repository, out, BuildConfig(max_tasks=20, heldout_fraction=0.0), lambda *_: None)
    assert "a sham answer passes" in (out / "DATACARD.md").read_text()
    assert {task.function for task in made.tasks} == {"lib.py::double"}
