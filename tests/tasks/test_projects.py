"""What is read from projects of several kinds before their code runs: Django's settings, addresses, own releases."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.config import BuildConfig
from etude.sandbox import TestReport
from etude.tasks import coverage, environment, gates, javascript, requirements, settings
from etude.tasks.coverage import SuiteTrace
from etude.tasks.settings import PytestSettings
from tests.tasks.test_strangers import write


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("runtests.py", 'os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")\n'),
        ("manage.py", "os.environ['DJANGO_SETTINGS_MODULE'] = 'tests.settings'\n".replace("'] =", "',")),
        ("Makefile", "test:\n\tDJANGO_SETTINGS_MODULE=tests.settings pytest\n"),
        ("tox.ini", "[testenv]\nsetenv =\n    DJANGO_SETTINGS_MODULE = tests.settings\n"),
        ("pyproject.toml", '[tool.pytest.ini_options]\nDJANGO_SETTINGS_MODULE = "tests.settings"\n'),
    ],
)
def test_the_settings_module_of_django(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, {name: text, "tests/settings.py": "DATABASES = {}\n"})
    known = settings.read(tmp_path)
    assert (known.source, known.kept) == (name, (("DJANGO_SETTINGS_MODULE", ("tests.settings",)),))
    assert "DJANGO_SETTINGS_MODULE =\n    tests.settings\n" in known.ini([])


def test_a_settings_module_that_is_no_file_of_the_repository_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path, {"manage.py": 'os.environ.setdefault("DJANGO_SETTINGS_MODULE", "elsewhere.settings")\n'})
    assert settings.read(tmp_path) == PytestSettings()


def test_a_suite_without_djangos_settings_asks_for_the_plugin() -> None:
    why = "django.core.exceptions.ImproperlyConfigured: Requested setting X, but settings are not configured."
    assert SuiteTrace({}, 0, {}, {"tests/test_a.py": why}, "").missing == (["pytest_django"], [])


def test_a_python_project_with_a_package_of_npm(tmp_path: Path) -> None:
    """Such as the scripts of its pages."""
    write(tmp_path, {"package.json": "{}"})
    assert javascript.is_repository(tmp_path)
    for name in ("setup.py", "setup.cfg", "pyproject.toml"):
        write(tmp_path / name, {"package.json": "{}", name: ""})
        assert not javascript.is_repository(tmp_path / name)


def test_requirements_by_address_are_named_together(tmp_path: Path) -> None:
    """The import of the first fails, and would hide the others."""
    lines = (
        "git+https://example.org/a/first",
        "git+https://example.org/a/second.git@v1#egg=second",
        "plain>=1",
        "./own",
    )
    write(tmp_path, {"requirements/testing.txt": "\n".join(lines) + "\n"})
    assert requirements.addressed(tmp_path) == ["first", "second"]
    trace = SuiteTrace({}, 0, {}, {"tests/test_a.py": "ModuleNotFoundError: No module named 'second'"}, "")
    assert "add `--requires second first` to the command" in str(environment.explained(tmp_path, trace, ""))


def test_a_release_of_the_repository_itself_is_removed(tmp_path: Path) -> None:
    """A plugin that the tests need may require it."""
    write(tmp_path / "site", {
        "my_lib/__init__.py": "", "other/__init__.py": "",
        "My.Lib-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: My.Lib\nVersion: 1\n",
        "My.Lib-1.dist-info/RECORD": "".join(
            f"{file},,\n"
            for file in ("my_lib/__init__.py", "My.Lib-1.dist-info/METADATA", "My.Lib-1.dist-info/RECORD")
        ),
        "other-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 1\n",
        "other-1.dist-info/RECORD": "other/__init__.py,,\n",
    })  # fmt: skip
    environment.finish(tmp_path / "site", tmp_path, "my-lib", "2", PytestSettings())
    left = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert "my_lib/__init__.py" not in left
    assert {"other/__init__.py", "my_lib-2.dist-info/METADATA"} <= left


def test_of_several_tries_one_folder_stays(tmp_path: Path) -> None:
    write(tmp_path / "tree", {"pyproject.toml": "[project]\nname='m'\n", "requirements-test.txt": "hypothesis\n"})
    work = tmp_path / "work"

    async def run(site: Path) -> SuiteTrace:
        lacking = {} if "1" in site.name else {"test_a.py": "ModuleNotFoundError: No module named 'hypothesis'"}
        return SuiteTrace({}, 2 - len(lacking), {}, lacking, "")

    def install(wanted: Sequence[str], site: Path) -> None:
        write(site, {"packages": " ".join(wanted)})

    best = asyncio.run(environment.find(tmp_path / "tree", work, (), install, run))
    assert (best.requirements, best.trace.passed) == (("hypothesis",), 2)
    assert [path.name for path in work.iterdir()] == ["site"]
    assert (work / "site/packages").read_text() == "hypothesis"


def test_a_batch_that_takes_too_long_is_divided() -> None:
    """Its last tests would count as unstable otherwise."""

    class Slow:
        async def run_tests(self, image: Any, changes: Any, tests: Sequence[str], *_: Any) -> TestReport:
            late = len(tests) > 3 or "t.py::hangs" in tests
            outcomes = {test: "failed" if test == "t.py::hangs" else "passed" for test in tests[: 2 if late else None]}
            return TestReport(outcomes, {}, 1.0, late, False)

    bench = SimpleNamespace(sandbox=Slow(), image=lambda _: None, options=BuildConfig(repeats=2))
    tests = [*(f"t.py::test_{i}" for i in range(9)), "t.py::hangs"]
    stable, dropped = asyncio.run(gates.stable_tests(bench, tests, None, {}))  # type: ignore[arg-type]
    assert (stable, dropped) == ({*tests[:-1]}, {"t.py::hangs"})


def test_frames_of_node_do_not_hide_the_message() -> None:
    text = "SyntaxError: no such export\n    at ModuleJob.run (node:internal/modules/job:325:25)\n"
    assert coverage.last_lines(text + "    at async file:///box/suite.mjs:187:27\n") == "SyntaxError: no such export"
    assert coverage.last_lines("at a (b.js:1:2)\n") == "at a (b.js:1:2)"
