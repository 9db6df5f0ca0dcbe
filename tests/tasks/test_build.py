"""A small library becomes gated tasks, through the sandbox and the grader that training uses."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from etude.code import functions as discover
from etude.code import mutate
from etude.code.mutate import MutationCandidate
from etude.config import BuildConfig
from etude.errors import UserError
from etude.sandbox.base import BoxDead, TestReport
from etude.tasks import dataset, gates
from etude.tasks.build import build_dataset
from etude.tasks.check import check_dataset
from etude.tasks.gates import Bench, Candidate, Rejected
from etude.tasks.survey import survey_repository

TINY = Path(__file__).parent / "repositories/tiny-1.0"
OPTIONS = BuildConfig(seed=1, max_tasks=14, kinds=("mutation", "removal"), per_function=2, heldout_fraction=0.3)
# Passes once in sixteen runs, so that it survives the trace and three repeats once in 65,536.
FLAKY = "import os\n\nfrom tiny import chunk\n\n\ndef test_flaky():\n    assert chunk([1]) and os.urandom(1)[0] < 16\n"


def quiet(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total, stage


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dataset.Dataset:
    return build_dataset(TINY, tmp_path_factory.mktemp("built") / "tiny", OPTIONS, quiet)


def test_a_dataset_may_lie_in_a_folder_that_is_left_out(tmp_path: Path) -> None:
    inside = shutil.copytree(TINY, tmp_path / "inside")
    (inside / "outputs/earlier").mkdir(parents=True)
    (inside / "outputs/earlier/copy.py").write_text((inside / "src/tiny/lists.py").read_text())
    out = inside / "outputs/tasks"
    here = build_dataset(inside, out, OPTIONS.model_copy(update={"exclude": ("outputs",), "max_tasks": 2}), quiet)
    assert here.tasks
    assert not list(out.rglob("copy.py"))


def test_tasks(built: dataset.Dataset) -> None:
    assert len(built.tasks) == 14
    assert {task.kind for task in built.tasks} == {"mutation", "removal"}
    assert len({task.id for task in built.tasks}) == 14
    train, heldout = ({task.function for task in built.split(name)} for name in ("train", "heldout"))
    assert train
    assert heldout
    assert not train & heldout
    for task in built.tasks:
        path, name = task.function.split("::")
        request, *wish, symptom = task.prompt.split("\n\n")
        assert request == f"{'Implement' if task.kind == 'removal' else 'Fix'} `{name}` in {path}."
        assert len(wish) == (task.kind == "removal")
        assert symptom.startswith(f"The test fails: `{path}::doctest:{name}`. The first says: ")
        assert task.visible_tests == (f"{path}::doctest:{name}",)
        assert task.fail_to_pass
        assert task.difficulty["visible_fails"] == 1
        assert task.solution[path] == (TINY / path).read_text()
        focus = task.changes[path].split("\n")[task.focus.first_line - 1 : task.focus.last_line]
        assert focus[0].lstrip().startswith(f"def {name.split('.')[-1]}(")
        outside = "\n".join(line for line in task.changes[path].split("\n") if line not in focus)
        assert all(line in task.solution[path] for line in outside.split("\n"))


def test_what_the_agent_sees(built: dataset.Dataset) -> None:
    files = {p.relative_to(built.repository).as_posix() for p in built.repository.rglob("*") if p.is_file()}
    assert files == {"LICENSE", "pyproject.toml", "src/tiny/__init__.py", "src/tiny/lists.py", "src/tiny/words.py"}
    assert {p.name for p in built.hidden.rglob("*") if p.is_file()} == {
        *("test_lists.py", "test_words.py"),
        *("LICENSE", "pyproject.toml"),  # beside the tests, which may read them
    }
    image = built.image(built.tasks[0])
    assert (image.repository, image.changes) == (built.repository, built.tasks[0].changes)


def test_check(built: dataset.Dataset, tmp_path: Path) -> None:
    report = check_dataset(built.root, quiet)
    assert (report.tasks, report.problems, report.failures) == (14, (), {})
    assert report.ok
    spoiled = tmp_path / "spoiled"
    shutil.copytree(built.root, spoiled)
    fixed, wrong = built.tasks[0], built.tasks[1]
    for path, text in fixed.solution.items():
        (spoiled / "tasks" / fixed.id / "environment/files" / path).write_text(text)
    for path, text in wrong.changes.items():
        (spoiled / "tasks" / wrong.id / "solution/files" / path).write_text(text)
    shutil.copytree(built.hidden / "tests", spoiled / "repository/tests")
    report = check_dataset(spoiled, quiet)
    assert not report.ok
    assert set(report.failures) == {fixed.id, wrong.id}
    assert "repository has changed since it was built" in report.problems
    assert "tasks has changed since it was built" in report.problems
    assert "repository/tests/test_lists.py holds hidden tests" in report.problems


def test_card(built: dataset.Dataset) -> None:
    card = (built.root / "DATACARD.md").read_text()
    assert "Licence of the code: MIT (from pyproject.toml)" in card
    assert "| removal | removal |" in card
    assert "14 tasks were kept." in card
    assert json.loads((built.root / "dataset.json").read_text())["counts"]["tasks"] == 14


@pytest.mark.slow
def test_only_tasks_that_a_visible_test_notices(tmp_path: Path) -> None:
    """`clamp` without its doctest makes tasks only when nothing visible has to fail."""
    repository = tmp_path / "tiny-1.0"
    shutil.copytree(TINY, repository)
    lists = repository / "src/tiny/lists.py"
    lists.write_text(re.sub(r"    >>> clamp.*\n    .*\n", "", lists.read_text()))
    assert ">>> clamp" not in lists.read_text()
    telling: dict[bool, set[str]] = {}
    for only in (False, True):
        options = BuildConfig(max_tasks=40, kinds=("mutation",), visible="doctests", visible_failure=only)
        data = build_dataset(repository, tmp_path / f"out-{only}", options, quiet)
        telling[only] = {task.function.split("::")[1] for task in data.tasks}
        assert all(task.difficulty["visible_fails"] for task in data.tasks) == only
    assert telling[False] - telling[True] == {"clamp"}


@pytest.mark.slow
def test_same_seed_same_bytes(built: dataset.Dataset, tmp_path: Path) -> None:
    again = build_dataset(TINY, tmp_path / "again", OPTIONS, quiet)
    assert dataset.tree_digest(again.root) == dataset.tree_digest(built.root)


@pytest.mark.slow
def test_half_of_the_tests_visible_and_flaky_ones_left_out(tmp_path: Path) -> None:
    repository = tmp_path / "tiny-1.0"
    shutil.copytree(TINY, repository)
    (repository / "tests/test_flaky.py").write_text(FLAKY)
    (repository / "tests/test_wrong.py").write_text(
        "from tiny import chunk\n\n\ndef test_wrong():\n    assert chunk([1]) == 2\n"
    )
    options = BuildConfig(
        max_tasks=16, kinds=("mutation",), visible="half", min_lines=2, operators=("op_flip", "op_const", "negate_cond")
    )
    data = build_dataset(repository, tmp_path / "out", options, quiet)
    assert {task.operator for task in data.tasks} <= set(options.operators)
    seen = {test for task in data.tasks for test in task.visible_tests}
    hidden = {test for task in data.tasks for test in (*task.fail_to_pass, *task.pass_to_pass)}
    assert seen
    assert hidden
    assert not {t.partition("[")[0] for t in seen} & {t.partition("[")[0] for t in hidden}
    assert not any("flaky" in test or "wrong" in test for test in seen | hidden)
    shown = "".join(p.read_text() for p in (data.repository / "tests").glob("*.py"))
    assert all(f"def {test.split('::')[1].partition('[')[0]}(" in shown for test in seen)
    assert not any(f"def {test.split('::')[1].partition('[')[0]}(" in shown for test in hidden)
    assert check_dataset(data.root, quiet).ok


class _Scripted:
    """A sandbox whose test "b" fails in the second of three runs; a real flaky test could not fail on demand."""

    def __init__(self) -> None:
        self.runs = 0
        self.asked: list[tuple[str, ...]] = []

    async def run_tests(self, image: object, changes: object, tests: Sequence[str], *_: object) -> TestReport:
        self.runs += 1
        self.asked.append(tuple(tests))
        outcomes = {test: "failed" if test == "b" and self.runs == 2 else "passed" for test in tests}
        return TestReport(outcomes=outcomes, messages={}, seconds=0.0)


def _bench(sandbox: _Scripted, folder: Path) -> Bench:
    return Bench(
        sandbox=sandbox,  # type: ignore[arg-type]
        name="x",
        repository=folder,
        site=folder,
        hidden=folder,
        source_roots=(),
        licence="MIT",
        options=BuildConfig(workers=1),
    )


class _Failing:
    """A sandbox that fails the first `times`."""

    def __init__(self, times: int, alive: bool = True) -> None:
        self.times, self.alive = times, alive

    async def run_tests(self, *_: object) -> TestReport:
        self.times -= 1
        if self.times >= 0:
            raise BoxDead("no answer")
        return TestReport(outcomes={}, messages={}, seconds=0.0, timed_out=True)


def test_a_program_whose_boxes_fail_is_one_program(tmp_path: Path) -> None:
    function = discover.functions("m.py", "def f():\n    return 1 + 1\n")[0]
    mutant = mutate.mutants("def f():\n    return 1 + 1\n", function, 1)[0]
    candidate = Candidate(function, MutationCandidate("mutation", mutant), "train", (), ("t.py::test",), 0.0)

    def probed(sandbox: _Failing) -> object:
        return asyncio.run(gates.probe(_bench(sandbox, tmp_path), candidate))  # type: ignore[arg-type]

    assert probed(_Failing(1)) is Rejected.HANGS
    assert probed(_Failing(2)) is Rejected.BOX
    with pytest.raises(UserError, match=r"boxes can no longer be made \(no answer\)"):
        probed(_Failing(1, alive=False))


def test_a_test_that_fails_once_is_dropped(tmp_path: Path) -> None:
    bench = _bench(_Scripted(), tmp_path)
    assert asyncio.run(gates.stable_tests(bench, ["a", "b", "c"], None, {})) == ({"a", "c"}, {"b"})


def test_a_javascript_file_runs_once_for_all_of_its_tests(tmp_path: Path) -> None:
    sandbox, names = _Scripted(), [f"t/{file}.test.js::{i}" for file in "mn" for i in range(45)]
    stable, dropped = asyncio.run(gates.stable_tests(_bench(sandbox, tmp_path), names, None, {}))
    assert (stable, dropped) == (set(names), set())
    assert sandbox.asked == [tuple(names[:45]), tuple(names[45:])] * BuildConfig().repeats


def _repository(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_refusals(tmp_path: Path) -> None:
    def refused(repository: Path, reason: str, out: Path = tmp_path / "out") -> None:
        with pytest.raises(UserError, match=reason):
            build_dataset(repository, out, OPTIONS, quiet)
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.incomplete").exists()

    refused(tmp_path / "absent", "is not a folder")
    refused(_repository(tmp_path / "empty", {"README": ""}), "no Python package")
    refused(_repository(tmp_path / "untested", {"m.py": "def f():\n    return 1\n"}), "has no test modules")
    refused(_repository(tmp_path / "broken", {"m.py": "def f(:\n", "test_m.py": ""}), "m.py, line 1 is not valid")
    inside = shutil.copytree(TINY, tmp_path / "inside")
    refused(inside, "leave it out with `--exclude outputs`", inside / "outputs/tasks")
    refused(TINY, "cannot be written", Path("/proc/out"))
    refused(TINY, "cannot be written", tmp_path / "empty/README/out")
    taken = _repository(tmp_path / "taken", {"file": ""})
    refused(TINY, "exists and is not empty", taken)


def test_a_suite_that_fails_is_refused(tmp_path: Path) -> None:
    repository = _repository(tmp_path / "r", {"m.py": "x = 1\n", "test_m.py": "def test_m():\n    assert 0\n"})
    with pytest.raises(UserError, match=r"no test of .*r passes .* said: assert 0\. To go on, run its suite"):
        build_dataset(repository, tmp_path / "out", OPTIONS, quiet)
    assert not (tmp_path / "out.incomplete").exists()


def test_a_tests_file_is_collected_where_no_file_has_a_name_of_pytest(tmp_path: Path) -> None:
    def modules(files: dict[str, str]) -> tuple[str, ...]:
        return survey_repository(_repository(tmp_path / str(len(files)), files), ()).layout.modules

    library = {"lib/__init__.py": "def f():\n    return 1\n", "tests.py": "def test_f(): pass\n"}
    assert modules(library) == ("tests.py",)
    # Where there are such names, a tests.py may be a part of the library.
    assert modules({**library, "tests/test_f.py": "def test_f(): pass\n"}) == ("tests/test_f.py",)
