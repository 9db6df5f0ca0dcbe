"""The gate runs what failed once more, and remembers the tests that passed only then."""

import ast
import collections
from pathlib import Path

import pytest

from tests.helpers.suite import FLAKY, PARALLEL, run_twice

# A test that fails as often as its file says, in any process.
TEST = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", {names})
def test_of(name):
    left = Path(__file__).parent / name
    tries = int(left.read_text()) if left.exists() else 0
    left.write_text(str(tries - 1))
    assert tries <= 0
"""


def suite(folder, **failures: int) -> int:
    """Runs tests of which each fails as often as given; at most once in parallel, where the first try is."""
    (folder / "test_it.py").write_text(TEST.format(names=list(failures)))
    for name, times in failures.items():
        (folder / name).write_text(str(times))
    return run_twice(["-q", "-c", "/dev/null", "--rootdir", str(folder)], folder, folder / "flaky.txt", [])


def flaky(folder) -> list[str]:
    written = folder / "flaky.txt"
    return [line.split(" ", 2)[2] for line in written.read_text().splitlines()] if written.exists() else []


def test_what_passes_the_second_time_is_written_down(tmp_path):
    assert suite(tmp_path, good=0, once=1) == 0
    assert flaky(tmp_path) == ["test_it.py::test_of[once]"]


def test_what_fails_twice_fails_the_suite(tmp_path):
    assert suite(tmp_path, good=0, once=1, twice=2) == 1
    assert flaky(tmp_path) == []


def test_many_failures_are_no_accident(tmp_path):
    assert suite(tmp_path, **{f"t{i}": 1 for i in range(11)}) == 1
    assert flaky(tmp_path) == []


@pytest.mark.parametrize("then", ["pytest.skip('no server')", "os._exit(0)"])
def test_what_does_not_pass_the_second_time_fails_the_suite(tmp_path, then):
    (tmp_path / "test_again.py").write_text(f"""
import os
from pathlib import Path
import pytest

def test_again():
    tried = Path(__file__).parent / "tried"
    if tried.exists():
        {then}
    tried.touch()
    assert False
""")
    assert suite(tmp_path, good=0) == 1
    assert flaky(tmp_path) == []


def test_a_process_that_dies_fails_the_suite(tmp_path):
    """Once, in xdist: its other tests have not run."""
    (tmp_path / "test_dies.py").write_text("""
import os
from pathlib import Path

def test_dies():
    tried = Path(__file__).parent / "tried"
    if not tried.exists():
        tried.touch()
        os._exit(1)

def test_of_the_same_process():
    Path(__file__).with_name("ran").touch()
""")
    given = ["-q", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    assert run_twice(given, tmp_path, tmp_path / "flaky.txt", PARALLEL) != 0
    assert flaky(tmp_path) == []
    assert not (tmp_path / "ran").exists()


def test_options_of_the_caller_leave_no_test_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    assert suite(tmp_path, once=1, twice=2) == 1


@pytest.mark.parametrize("broken", ["import nothing_of_this_name", "import os; os._exit(3)"])
def test_a_suite_that_did_not_run_whole_is_no_flake(tmp_path, broken):
    (tmp_path / "test_broken.py").write_text(broken)
    assert suite(tmp_path, once=1) not in (0, 1)
    assert flaky(tmp_path) == []


def test_no_test_stands_in_the_list_twice():
    names = [line.split(" ", 2)[2] for line in FLAKY.read_text().splitlines() if line and not line.startswith("#")]
    assert [name for name, times in collections.Counter(names).items() if times > 1] == [], "mend or drop these tests"


def test_no_test_alters_the_clock_of_the_whole_process():
    """The servers of other tests read that clock, too (tests/helpers/clocks.py)."""
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("setattr", "patch", "patch.object")):
                target = ast.unparse(call.args[0]).strip("'\"") if call.args else ""
                altered = target.split(".")[-1] == "time" or ".time." in f".{target}"
                assert not altered or path.name == "clocks.py", f"{path}:{call.lineno}: use tests/helpers/clocks.py"
