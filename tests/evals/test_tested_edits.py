"""Edits that come with tests, in real boxes: an answer that differs in bytes passes if its tests do."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from etude.cli import main
from etude.edits.grades import EditGrade, grade_edit
from etude.edits.merge import merge
from etude.errors import UserError
from etude.evals import tested_edits
from etude.evals.fast_apply import Applied, with_tests
from etude.tasks import dataset as datasets

TINY = Path(__file__).parents[1] / "tasks/data/tiny"


def test_every_edit_undoes_its_mutation() -> None:
    found = tested_edits.load(TINY, "train")
    assert len(found.examples) == 3
    for example in found.examples:
        task, place = found.places[example.id]
        path = task.focus.path
        assert task.changes[path] != task.solution[path]
        assert place.put(task.changes[path], example.file) == task.changes[path]
        assert place.put(task.changes[path], example.result) == task.solution[path]
        assert example.file.startswith("def ")
        assert (merge(example.file, example.sketch).text == example.result) == example.merges
        assert example.licence == "MIT"
    assert found.examples == tested_edits.load(TINY, "train").examples


def test_a_method_stands_without_its_indentation_and_is_put_back() -> None:
    (task,) = (t for t in datasets.load_dataset(TINY).tasks if "shorten" in t.id)
    module = "class A:\n    x = 1\n\n    def f(self):\n        if self.x:\n\n            return 1\n\n    y = 2\n"
    focus = msgspec.structs.replace(task.focus, first_line=4, last_line=7)
    right = module.replace("return 1", "return 2\n        return 3")
    method = msgspec.structs.replace(task, focus=focus, changes={focus.path: module}, solution={focus.path: right})
    sides = tested_edits._sides(method)
    assert sides is not None
    place, before, after = sides
    assert before == "def f(self):\n    if self.x:\n\n        return 1\n"
    assert after == "def f(self):\n    if self.x:\n\n        return 2\n    return 3\n"
    assert place.put(module, after) == right
    # A line of a string that is less indented than the function could not be put back.
    text = 'class A:\n    def f(self):\n        return """\nx\n"""\n'
    focus = msgspec.structs.replace(task.focus, first_line=2, last_line=5)
    odd = msgspec.structs.replace(method, focus=focus, changes={focus.path: text}, solution={focus.path: text})
    assert tested_edits._sides(odd) is None


@pytest.mark.slow
def test_the_grade_tests_is_of_answers_that_pass_and_leave_the_rest_alone() -> None:
    found = tested_edits.load(TINY, "train")
    by_name = {e.result.split("(")[0].removeprefix("def "): e for e in found.examples}
    chunk, clamp, count = (by_name[name] for name in ("chunk", "clamp", "count_if"))
    texts = {
        "another way": (chunk, chunk.result.replace("i + size]", "size + i]")),
        "still broken": (clamp, clamp.file),
        "another flip": (clamp, clamp.result.replace("if number < low", "if low > number")),
        "and elsewhere": (
            count,
            count.result.replace("total += 1", "total = total + 1").replace("total = 0", "total=0+0"),
        ),
        "no python": (count, "def count_if("),
        "hangs": (count, count.file.replace("total += 2", "while True: pass")),
        "exact": (count, count.result),
    }
    applied = [Applied(e, grade_edit(e.result, t, "python"), 0, True, t) for e, t in texts.values()]
    index = list(texts).index("and elsewhere")
    applied[index] = Applied(count, EditGrade.FAIL, 1, True, texts["and elsewhere"][1])
    assert [a.grade for a in applied] == [EditGrade.FAIL] * 6 + [EditGrade.EXACT]
    graded = dict(zip(texts, (a.grade for a in with_tests(applied, found)), strict=True))
    assert graded == {
        "another way": EditGrade.TESTS, "still broken": EditGrade.FAIL, "another flip": EditGrade.TESTS,
        "and elsewhere": EditGrade.FAIL, "no python": EditGrade.FAIL, "hangs": EditGrade.FAIL, "exact": EditGrade.EXACT,
    }  # fmt: skip
    (chunk_task, place) = found.places[chunk.id]
    module = place.put(chunk_task.changes[chunk_task.focus.path], texts["and elsewhere"][1])
    assert "def chunk" not in module, "the answer replaces the function"


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    nano = Path(__file__).parents[2] / "models/nano"
    with pytest.raises(SystemExit) as end:
        main.main(["eval", str(nano), "--suite", "fast-apply", "--tests", str(TINY), "--json"])
    assert end.value.code == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    merged, model = report["results"]
    assert report["edits"] == 1
    assert set(merged["grades"]) == {"exact", "whitespace", "syntax", "tests", "fail"}
    assert merged["exact"]["mean"] == 1.0
    assert sum(model["grades"].values()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "fast-apply", "--judge", "http://127.0.0.1:9/v1"], "belong together"),
        (["--suite", str(TINY), "--tests", str(TINY)], "belong to --suite fast-apply"),
        (["--suite", "x.parquet", "--tests", str(TINY)], "brings edits of its own"),
        (["--suite", "fast-apply", "--tests", "nowhere"], "is not a task dataset"),
    ],
)
def test_what_a_user_may_get_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["eval", "models/nano", *arguments])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_split_without_mutations_is_refused() -> None:
    with pytest.raises(UserError, match="gives no edits of split none"):
        tested_edits.load(TINY, "none")
