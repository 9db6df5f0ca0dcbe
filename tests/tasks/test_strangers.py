"""Repositories of strangers: settings of pytest, generated files, groups, monorepos, failing tests, and good advice."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from etude.code import functions as discover
from etude.code import install_wheels
from etude.config import BuildConfig
from etude.config.tasks import TasksConfig
from etude.errors import UserError
from etude.sandbox.base import BoxDead, BoxError, Escape, ExecResult, NotRegular, TooLarge
from etude.tasks import coverage, environment, inventory, requirements, search, settings
from etude.tasks.build import build_dataset
from tests.tasks.test_build import quiet
from tests.tasks.test_inventory import clone, git, write

LIB = """def total(items, start=0):
    result = start
    for item in items:
        if item > 0:
            result = result + item
    return result


def last(items, default=None):
    if not items:
        return default
    place = len(items) - 1
    return items[place]
"""
OPTIONS = BuildConfig(max_tasks=6, kinds=("mutation",), repeats=2, heldout_fraction=0.4)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels in the place of the package index: pytest-mock and frozen, as far as the tests need them."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    plugin = "import pytest\n\n\n@pytest.fixture\ndef mocker():\n    return lambda value: value\n"
    for name, module, text in (
        ("pytest_mock", "pytest_mock", plugin),
        ("frozen", "frozen", "def now():\n    return 7\n"),
    ):
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{module}.py", text)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            if name == "pytest_mock":
                wheel.writestr(f"{info}/entry_points.txt", "[pytest11]\nmocks = pytest_mock\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_repository_with_everything_at_once(index: Path, tmp_path: Path) -> None:
    """One build, since a build takes seconds: a folder to import from, files and functions of tests with other names,
    a plugin and a module from a dependency group, a version file, a submodule with tests of its own, failing tests."""
    clone(tmp_path / "inner", {"tests/test_inner.py": "import nothing_like_it\n\n\ndef test_inner():\n    pass\n"})
    root = clone(tmp_path / "lib", {
        "pyproject.toml": """
            [project]
            name = "lib"
            dynamic = ["version"]
            [dependency-groups]
            base = ["frozen"]
            tests = ["pytest", "pytest-mock", {include-group = "base"}]
            [tool.hatch.build.hooks.vcs]
            version-file = "code/shelf/_version.py"
            [tool.pytest.ini_options]
            pythonpath = ["code"]
            testpaths = ["checks"]
            python_files = ["check_*.py"]
            python_functions = ["test_*", "it_*"]
            addopts = "-ra --cov=shelf -p no:randomly"
            """,
        "code/shelf/__init__.py": "from shelf._version import version\n" + LIB,
        "data/rows.txt": "1 2 3\n",
        "checks/check_a.py": """
import os
import socket

import frozen
from importlib.metadata import version as installed
from pathlib import Path

import pytest

from shelf import last, total, version


def it_adds(mocker):
    assert total(mocker([1, 2, -5])) == 3


def it_adds_to_a_start():
    assert total([1], 4) == 5


def it_adds_two():
    assert total([7, 8]) == 15


def it_adds_rows():
    text = (Path(__file__).parents[1] / "data/rows.txt").read_text()
    assert total([int(word) for word in text.split()]) == 6


def it_adds_what_a_terminal_says():
    master, slave = os.openpty()
    os.write(slave, b"4")
    assert os.isatty(slave) and total([int(os.read(master, 1))]) == 4


def it_adds_what_a_server_says():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.send(b"5")
        assert total([int(server.accept()[0].recv(1))]) == 5


def test_last():
    assert last([1, frozen.now()]) == 7
    assert version == installed("lib") == "1.2.3"


def test_last_of_nothing():
    assert last([], 5) == 5


def test_last_of_one():
    assert last([3]) == 3


def test_wrong():
    assert total([1]) == 2, "a mistake"


def test_wrong_fixture(nothing_like_it):
    assert last([3]) == 3
""",
        "checks/check_b.py": "import nothing_like_it\n\n\ndef test_b():\n    pass\n",
    })  # fmt: skip
    git(root, "submodule", "add", "-q", str(tmp_path / "inner"), "vendor/inner")
    git(root, "commit", "-q", "-m", "with a submodule")
    git(root, "tag", "v1.2.3")
    data = build_dataset(root, tmp_path / "out", OPTIONS, quiet)
    assert {task.function for task in data.tasks} == {"code/shelf/__init__.py::total", "code/shelf/__init__.py::last"}
    tests = {test for task in data.tasks for test in (*task.visible_tests, *task.fail_to_pass, *task.pass_to_pass)}
    assert {"checks/check_a.py::it_adds", "checks/check_a.py::test_last"} <= tests
    assert not any("wrong" in test or "check_b" in test for test in tests)
    assert (data.hidden / "data/rows.txt").is_file(), "tests read files beside them by their own place"
    assert not (data.hidden / "code").exists()
    shown = (data.repository / "checks/check_a.py").read_text()
    assert "def it_" in shown
    assert "def test_wrong" not in shown
    assert not (data.repository / "checks/check_b.py").exists()
    assert "version = '1.2.3'" in (data.repository / "code/shelf/_version.py").read_text()
    assert not (root / "code/shelf/_version.py").exists()
    assert data.manifest.python_path == ("code",)
    assert " -p mocks\n" in (data.root / "site/pytest.ini").read_text(), "the name under which pytest loads it itself"
    card = (data.root / "DATACARD.md").read_text()
    assert "it_adds_" not in card, "they pass every time"
    assert "`checks/check_a.py::test_wrong`: AssertionError: a mistake" in card
    assert "`checks/check_a.py::test_wrong_fixture`" in card
    assert "`checks/check_b.py`" in card
    assert "pytest's settings come from pyproject.toml: kept `python_functions`, `testpaths`" in card
    assert "Options of `addopts` that are not used: `-ra --cov=shelf -p no:randomly`." in card
    assert "Written as the project's build would: `code/shelf/_version.py`." in card
    assert not (tmp_path / "out.incomplete").exists()


def test_the_message_names_what_is_missing_and_the_option_brings_it(index: Path, tmp_path: Path) -> None:
    test = "import frozen\nfrom m import total\n\n\ndef test_{0}():\n    assert total([{0}]) == {0}\n"
    root = write(tmp_path / "r", {"m.py": LIB, **{f"test_{i}.py": test.format(i) for i in (1, 2)}})
    # A package of the name of a module may be anybody's, so the name is proposed only if the repository has it.
    with pytest.raises(UserError, match=r"'frozen'.*find out which package brings frozen, which no file of the repo"):
        build_dataset(root, tmp_path / "out", OPTIONS, quiet)
    write(root, {"requirements/extra.in": "Frozen >= 1\n"})
    with pytest.raises(UserError, match=r"No module named 'frozen'.*To go on, .*add `--requires frozen` to the comm"):
        build_dataset(root, tmp_path / "out", OPTIONS, quiet)
    options = BuildConfig(max_tasks=2, kinds=("mutation",), repeats=1, requires=("frozen",))
    assert build_dataset(root, tmp_path / "out", options, quiet).tasks


def test_requirements_without_a_wheel_are_left_out_and_named(index: Path, tmp_path: Path) -> None:
    """One of them, or one that needs such a package, unloads no other; the user's own are refused."""
    needy = index / "needy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(needy, "w") as wheel:
        wheel.writestr("needy.py", "")
        needs = "Metadata-Version: 2.1\nName: needy\nVersion: 1.0\nRequires-Dist: gone\n"
        wheel.writestr("needy-1.0.dist-info/METADATA", needs)
        wheel.writestr("needy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("needy-1.0.dist-info/RECORD", "")
    declared = ("Frozen>=1", "nowhere >= 2", "needy", "other @ https://files.example/other.whl")
    left, why = environment.install_most(declared, (), install_wheels, tmp_path / "site")
    assert left == ("Frozen>=1",)
    assert (tmp_path / "site/frozen.py").is_file()
    assert not (tmp_path / "site/needy.py").exists()
    assert re.fullmatch(
        r"the requirement 'other @ \S+' is an address: etude installs wheels of the package index alone\. "
        r"nowhere>=2 has no wheel for Python .* needy: gone has no wheel for Python .*", why,
    ), why  # fmt: skip
    with pytest.raises(UserError, match="nowhere>=2 has no wheel"):
        environment.install_most(declared[:2], ("nowhere >= 2",), install_wheels, tmp_path / "site")
    # Of two lines of one project the one without a wheel alone, and the user's line in place of it.
    assert environment.install_most(["frozen>=2", "frozen"], ["frozen"], install_wheels, tmp_path / "site")[0] == (
        "frozen",
    )
    text = ", ".join(f"'{line}'" for line in ("frozen", "nowhere"))
    root = write(tmp_path / "r", {
        "pyproject.toml": f"[project]\nname = 'm'\nversion = '1'\ndependencies = [{text}]\n",
        "m.py": LIB,
        "test_m.py": "import frozen\nfrom m import total\n\n\ndef test_a():\n    assert total([1]) == 1\n\n\n"
        "def test_b():\n    assert total([5]) == 5\n",
    })  # fmt: skip
    options = BuildConfig(max_tasks=2, kinds=("mutation",), repeats=1)
    data = build_dataset(root, tmp_path / "out", options, quiet)
    assert "Not installed: nowhere has no wheel" in (data.root / "DATACARD.md").read_text()


def test_links_are_followed_within_the_repository(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/key.txt").write_text("private")
    files = {"shared/a.py": "x = 1\n", "rows/deep/b.txt": "b\n", "lib/c.py": "", "own.txt": "", "tests/test_a.py": "",
             ".hidden": "", "private/c.csv": ""}  # fmt: skip
    root = write(tmp_path / "r", files)
    links = {"lib/a.py": "../shared/a.py", "more": "rows", "round": "round", "up/all": "..", "gone": "nothing",
             "out.txt": "../outside/key.txt", "away": "../outside", "git": ".git/config", "new": "untracked.py",
             "twice": "lib/a.py", "code": "shared", "checks": "tests", "check.py": "tests/test_a.py", "dist": "rows",
             "conf": ".hidden", "docs/private": "../private"}  # fmt: skip
    for name, target in links.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).symlink_to(target)
    clone(root, {})
    write(root, {"untracked.py": ""})
    taken = inventory.take(root, [".hidden", "private", "twice"])
    assert {*taken.files} == {*files, "lib/a.py", "more/deep/b.txt"} - {".hidden", "private/c.csv"}
    assert {*links} - {*taken.links} == {"lib/a.py", "more"}
    discover.copy(root, tmp_path / "copy", taken.files)
    assert (tmp_path / "copy/more/deep/b.txt").read_text() == "b\n"
    assert not any(path.is_symlink() for path in (tmp_path / "copy").rglob("*"))


def test_links_do_not_multiply_a_repository(tmp_path: Path) -> None:
    root = write(tmp_path / "r", {f"rows/{n}.txt": "" for n in range(30)})
    for n in range(50):
        (root / f"more{n}").symlink_to("rows")
    taken = inventory.take(clone(root, {}))
    assert len(taken.files) == 60, "once"
    assert len(taken.links) == 49


def test_a_broken_suite_is_quoted() -> None:
    trace = coverage.SuiteTrace({}, 0, {}, {}, "x\nINTERNALERROR> KeyError: 'a'\n\n=====\n")
    assert "said: x / INTERNALERROR> KeyError: 'a'. To go on, run its suite" in str(
        environment.explained(Path("r"), trace, "")
    )


def test_a_module_of_the_repository_is_not_taken_for_a_package(tmp_path: Path) -> None:
    """It cannot be found where it lies, or is a link to no file of the repository."""
    root = write(tmp_path / "r", {"lib/coerce.py": "", "tests/test_a.py": "", ".venv/frozen/__init__.py": ""})
    trace = coverage.SuiteTrace({}, 0, {}, {"a": "No module named 'coerce'"}, "")
    assert "To go on, run its suite by hand" in str(environment.explained(root, trace, ""))
    (root / "tests/coerce.py").symlink_to("../lib/coerce.py")
    (root / "lib/coerce.py").unlink()
    assert (
        "To go on, tests/coerce.py is a link that leads to no file of the repository: put a copy in its place."
        in str(environment.explained(root, trace, ""))
    )
    trace = coverage.SuiteTrace({}, 0, {}, {"a": "No module named 'frozen'"}, "")
    assert "which package brings frozen" in str(environment.explained(root, trace, ""))


def test_a_docstring_in_the_first_column_is_no_hindrance() -> None:
    method = '    def f(self):\n        """First.\n\nSecond.\n"""\n        return 1\n'
    assert search._meaning(method) == search._meaning("def f(self):\n    return 1\n")


def test_slow_tests_are_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sleeps in its body or its fixture, and the rest of a file that takes its time; nothing stalls."""
    monkeypatch.setattr(coverage, "TEST_SECONDS", 0.7)
    monkeypatch.setattr(coverage, "FILE_SECONDS", 1.2)
    sleeps = "import time\n\nimport pytest\nfrom m import total\n\n\n"
    slow = "def test_{0}():\n    time.sleep(0.5)\n\n\n"  # calls nothing, so that it is no hidden test
    root = write(tmp_path / "r", {
        "m.py": LIB,
        "test_quick.py": "from m import total\n\n\n" + "".join(
            f"def test_{i}{i}():\n    assert total([{i}, -1, 2]) == {i + 2}\n\n\n" for i in range(1, 6)
        ),
        "test_one.py": sleeps + "@pytest.fixture\ndef late():\n    time.sleep(60)\n\n\n"
        "def test_late(late):\n    pass\n\n\n"
        "def test_ever():\n    try:\n        time.sleep(60)\n    except Exception:\n        pass\n",
        "test_alarm.py": "import signal\n\n\ndef test_own():\n    signal.signal(signal.SIGALRM, signal.SIG_DFL)\n",
        "test_many.py": sleeps + "".join(slow.format(i) for i in range(1, 6)),
    })  # fmt: skip
    monkeypatch.setattr(coverage, "COUNT_SECONDS", 0.3)
    said: list[tuple[int, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "running the test suite":
            said.append((done, total))

    data = build_dataset(root, tmp_path / "out", BuildConfig(max_tasks=2, kinds=("mutation",), repeats=1), progress)
    counts = [done for done, total in said if total == 13]
    assert len(set(counts)) > 2, said
    assert counts == sorted(counts)
    assert "4 slow tests were left out, most of them of test_" in " ".join(data.manifest.warnings)
    card = (data.root / "DATACARD.md").read_text()
    for test in ("test_one.py::test_late", "test_one.py::test_ever"):
        assert f"`{test}`: TookLong: left out, since it takes longer than 1 s" in card
    for i in (4, 5):
        assert f"`test_many.py::test_{i}`: TookLong: left out, since the tests of its file take longer" in card
    shown = "".join(path.read_text() for path in data.repository.glob("test_*.py"))
    assert not re.search(r"def test_(late|ever|4|5)\b", shown)


def test_the_rest_of_a_slow_suite_is_left_out() -> None:
    limits = coverage.TimeLimits("left out, since", 30.0, 90.0, 100.0)
    item = SimpleNamespace(nodeid="test_c.py::test_c")
    limits.used = {"test_a.py": 60.0, "test_b.py": 40.0}
    limits.pytest_runtest_setup(item)
    limits.used["test_d.py"] = 1.0
    with pytest.raises(coverage.TookLong, match="left out, since the suite takes longer than 100 s"):
        limits.pytest_runtest_setup(item)


NO_TESTS = discover.RepositoryLayout((), (), (), (), ())


class _NoResult:
    """A box whose suite has ended its process before the record was written; a real one is `os._exit` in a test."""

    async def write(self, path: str, data: bytes) -> None:
        pass

    async def exec(self, command: str, seconds: float) -> ExecResult:
        return ExecResult(3, "Fatal: gone\n", 0, 0.0, False)

    async def read(self, path: str, max_bytes: int) -> bytes:
        raise coverage.NotFound(path)


def test_a_suite_that_ends_the_process(tmp_path: Path) -> None:
    import asyncio

    trace = asyncio.run(coverage.trace(_NoResult(), NO_TESTS, 1.0, print))  # type: ignore[arg-type]
    assert "which said: Fatal: gone." in str(environment.explained(tmp_path, trace, ""))


SPOILED = [Escape, NotRegular, TooLarge, BoxDead, b"\xff", b"{", b'{"functions": [], "tests": 3}']


@pytest.mark.parametrize("error", SPOILED)
def test_a_suite_that_spoils_its_record(error: type[BoxError] | bytes) -> None:
    """By a link or a folder in its place, gigabytes, or other bytes; a box that is gone is not the suite's doing."""
    import asyncio

    class Spoiled(_NoResult):
        async def read(self, path: str, max_bytes: int) -> bytes:
            if isinstance(error, bytes):
                return error
            raise error("it was")

    expected, match = (BoxDead, "it was") if error is BoxDead else (UserError, "the test suite spoiled the record")
    with pytest.raises(expected, match=match):
        asyncio.run(coverage.trace(Spoiled(), NO_TESTS, 1.0, print))  # type: ignore[arg-type]


def test_monorepos_are_answered_with_a_command(tmp_path: Path) -> None:
    files = {
        f"packages/{name}/{file}": "" for name in ("one", "two") for file in ("pyproject.toml", f"{name}/__init__.py")
    }
    root = write(tmp_path / "mono", files | {"pyproject.toml": "", "docs/pyproject.toml": ""})
    command = rf"several projects \(packages/one, packages/two\).*`etude tasks build {root}/packages/one -o OUTPUT`"
    with pytest.raises(UserError, match=command):
        discover.layout(root)
    root = write(tmp_path / "deep", {"python/lib/__init__.py": "", "python/lib/m.py": ""})
    with pytest.raises(UserError, match=r"but python/lib; name python in pytest's `pythonpath`"):
        discover.layout(root)


@pytest.mark.parametrize("key", ["repository", "dataset"])
def test_several_repositories_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"one {key} per source"):
        TasksConfig(**{key: ["a", "b"]})


WORDS = "testpaths = tests{0}more\npython_files = check_*.py\naddopts = -k 'not slow' --cov x\n"
TOML = """[tool.pytest]
testpaths = ["tests", "more", "/abs", "../up"]
python_files = ["check_*.py"]
addopts = ["-k", "not slow", "--cov", "x"]
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytest.ini", "[pytest]\n" + WORDS.format(" ")),
        ("tox.ini", "[pytest]\n" + WORDS.format("\n  ")),
        ("setup.cfg", "[tool:pytest]\n" + WORDS.format(" ")),
        ("pyproject.toml", TOML),
    ],
)
def test_where_settings_stand(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, {name: text})
    found = settings.read(tmp_path)
    assert (found.source, found.testpaths, found.python_files) == (name, ("tests", "more"), ("check_*.py",))
    assert (found.options, found.dropped) == (("-k", "not slow"), ("--cov", "x"))
    assert found.ini(["pytest_mock"]) == "[pytest]\naddopts =\n    -k 'not slow' -p pytest_mock\n"
    assert found.is_module("tests/check_a.py")
    assert not any(map(found.is_module, ("check_a.py", "tests/test_a.py", "tests2/check_a.py")))
    assert settings.PytestSettings(testpaths=("test.py", "src/*/tests")).is_module("test.py")
    assert settings.PytestSettings(testpaths=("test.py", "src/*/tests")).is_module("src/a/tests/unit/test_b.py")


def test_versions_of_clones(tmp_path: Path) -> None:
    root = clone(
        tmp_path / "r", {"pyproject.toml": "[project]\nname='r'\n[tool.setuptools_scm]\nwrite_to='src/r/v.py'\n"}
    )
    assert environment.version_of(root) == environment.UNKNOWN
    git(root, "tag", "r-2.0rc1")
    assert environment.version_of(root) == "2.0rc1"
    taken = inventory.take(root)
    assert environment.version_files(root, taken, "2.0") == {}  # its folder is not there
    (root / "src/r").mkdir(parents=True)
    (text,) = environment.version_files(root, taken, "2.0+x").values()
    made: dict = {}
    exec(text, made)
    assert (made["__version__"], made["version_tuple"]) == ("2.0+x", (2, 0, "x"))
    write(root, {"pyproject.toml": "[tool.setuptools_scm]\nwrite_to='../../evil.py'\nversion_file='/evil.py'\n"})
    assert environment.version_files(root, taken, "2.0") == {}


def test_known_names_of_missing_things() -> None:
    trace = coverage.SuiteTrace({}, 1, {"t": "fixture 'mocker' not found", "u": "No module named 'yaml.x'"}, {}, "")
    assert trace.missing == (["yaml"], ["mocker"])
    assert [requirements.MISSING[name] for name in ("yaml", "mocker")] == ["pyyaml", "pytest-mock"]
