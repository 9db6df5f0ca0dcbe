"""Reads the pytest settings of a repository, as far as test runs in boxes can apply them.

The settings come from the first file that has some, in pytest's own order. Kept are the patterns for files, classes and
functions, the folders of tests and imports, markers, modes of plugins, and from `addopts` the import mode and
deselected tests. They are written to site/pytest.ini, which every run in a box reads in place of the repository's
files, since the agent may change those.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigError
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from etude.code import toml_table
from etude.sandbox import WORKSPACE
from etude.sandbox.egress import normal_project

FILE = "pytest.ini"  # in site/
PYTEST_FILES = ("test_*.py", "*_test.py")  # collected by default
UNITTEST_FILES = (*PYTEST_FILES, "tests.py")  # of a repository without files of the names above
START = "sitecustomize.py"  # in site/: folders to import from that a box does not search by itself
DJANGO = "DJANGO_SETTINGS_MODULE"
_DJANGO_FILES = ("manage.py", "runtests.py", "tests/manage.py", "tests/runtests.py", "tox.ini", "Makefile")
_KEPT = ("python_classes", "python_functions", "markers", "usefixtures", "asyncio_mode", "xfail_strict",
         "asyncio_default_fixture_loop_scope", "anyio_mode", "django_find_project", DJANGO)  # fmt: skip
_OPTIONS = ("-m", "-k", "--import-mode", "--ignore", "--ignore-glob", "--deselect")
# Distributions of plugins that work in a test run without a terminal and without processes of their own.
PLUGINS = frozenset((
    "anyio", "pyfakefs", "pytest-asyncio", "pytest-datadir", "pytest-django", "pytest-freezer", "pytest-httpx",
    "pytest-lazy-fixtures", "pytest-mock", "pytest-subtests", "requests-mock",
))  # fmt: skip


@dataclass(frozen=True)
class PytestSettings:
    """`kept` are options by name; an empty `testpaths` or `python_files` is pytest's default."""

    source: str = ""  # the file that they come from
    kept: tuple[tuple[str, tuple[str, ...]], ...] = ()
    options: tuple[str, ...] = ()  # of addopts
    testpaths: tuple[str, ...] = ()
    python_files: tuple[str, ...] = ()
    pythonpath: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()  # options of addopts that test runs ignore

    def is_module(self, path: str) -> bool:
        """Whether pytest collects the file when it is not named."""
        patterns = self.python_files or PYTEST_FILES
        pure = PurePosixPath(path)
        if path in self.testpaths and pure.suffix == ".py":  # pytest collects a file in testpaths under any name
            return True
        parents = [path, *(str(parent) for parent in pure.parents)]
        inside = not self.testpaths or any(p == "." or fnmatch(f, p) for p in self.testpaths for f in parents)
        return inside and any(fnmatch(pure.name, p) or ("/" in p and pure.match(p)) for p in patterns)

    def ini(self, plugins: Sequence[str]) -> str:
        """The text of site/pytest.ini; empty without settings and plugins."""
        lines = dict(self.kept)
        if self.pythonpath:
            lines["pythonpath"] = tuple(f"{WORKSPACE}/{path}".removesuffix("/.") for path in self.pythonpath)
        options = [*self.options, *(word for plugin in plugins for word in ("-p", plugin))]
        if options:
            lines["addopts"] = (shlex.join(options),)
        text = "".join(f"{name} =\n" + "".join(f"    {line}\n" for line in values) for name, values in lines.items())
        return f"[pytest]\n{text}" if text else ""


def read(repository: Path) -> PytestSettings:
    """The settings of a repository; files that cannot be read count as empty. Of a Django project whose settings do
    not name a module for Django, that of its own runner of tests."""
    tables = ((name, values) for name, values in _sources(repository) if isinstance(values, dict))
    settings = next((_settings(name, values) for name, values in tables), PytestSettings())
    if DJANGO in dict(settings.kept) or (named := _django_module(repository)) is None:
        return settings
    runner, module = named
    return replace(settings, source=settings.source or runner, kept=(*settings.kept, (DJANGO, (module,))))


def _django_module(repository: Path) -> tuple[str, str] | None:
    """A Django project's runner of tests, and the settings module that it names, a file of the repository."""
    for name in _DJANGO_FILES:
        text = (repository / name).read_text("utf-8", "replace") if (repository / name).is_file() else ""
        for module in re.findall(rf"{DJANGO}['\"]?\s*[,=]\s*['\"]?([\w.]+)", text):
            place = module.replace(".", "/")
            if any((repository / f"{place}{rest}").is_file() for rest in (".py", "/__init__.py")):
                return name, module
    return None


def write(settings: PytestSettings, site: Path) -> None:
    """Write the kept settings and the plugins to pytest.ini in the folder `site`. Plugins have the names of their entry
    points: under another name, a pytest that loads installed plugins by itself would load them a second time."""
    known = [each for each in distributions(path=[str(site)]) if normal_project(each.name) in PLUGINS]
    plugins = {entry.name for each in known for entry in each.entry_points.select(group="pytest11")}
    if text := settings.ini(sorted(plugins)):
        (site / FILE).write_text(text, encoding="utf-8")
    folders = [f"{WORKSPACE}/{path}" for path in settings.pythonpath if path not in (".", "src")]
    if folders:
        (site / START).write_text(f"import sys\n\nsys.path[1:1] = {folders!r}\n", encoding="utf-8")


def _sources(repository: Path) -> Iterator[tuple[str, Any]]:
    """(file, its settings), in the order of pytest; no table for a file without settings."""
    for name in ("pytest.toml", ".pytest.toml"):
        yield name, _toml(repository / name).get("pytest")
    for name in ("pytest.ini", ".pytest.ini"):
        yield name, _ini(repository / name, "pytest")
    tool = toml_table(_toml(repository / "pyproject.toml"), "tool", "pytest")
    yield "pyproject.toml", tool.get("ini_options", tool or None)
    yield "tox.ini", _ini(repository / "tox.ini", "pytest")
    yield "setup.cfg", _ini(repository / "setup.cfg", "tool:pytest")


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}


def _ini(path: Path, section: str) -> dict[str, Any] | None:
    config = ConfigParser(interpolation=None)
    try:
        config.read(path, encoding="utf-8")
    except (ConfigError, UnicodeDecodeError):
        return None
    return dict(config[section]) if config.has_section(section) else None


def _settings(source: str, values: dict[str, Any]) -> PytestSettings:
    def listed(name: str) -> tuple[str, ...]:
        value = values.get(name)
        if isinstance(value, list):
            return tuple(str(part).strip() for part in value)
        text = str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
        parts = text.split("\n") if name == "markers" else _words(text)
        return tuple(part.strip() for part in parts if part.strip())

    options, dropped = _filtered(listed("addopts"))
    return PytestSettings(
        source=source,
        kept=tuple((name, listed(name)) for name in _KEPT if listed(name)),
        options=options,
        testpaths=_folders(listed("testpaths")),
        python_files=listed("python_files"),
        pythonpath=_folders(listed("pythonpath")),
        dropped=dropped,
    )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _folders(paths: Sequence[str]) -> tuple[str, ...]:
    """The folders that lie below the repository; a dataset holds no others."""
    plain = (str(PurePosixPath(path)) for path in paths)
    return tuple(path for path in plain if not path.startswith("/") and ".." not in PurePosixPath(path).parts)


def _filtered(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(options that test runs apply, options that they ignore)"""
    kept: list[str] = []
    dropped: list[str] = []
    pending = iter(words)
    for word in pending:
        name, equals, _ = word.partition("=")
        if name in _OPTIONS or re.match(r"-[mk].", word):
            kept.append(word)
            if name in _OPTIONS and not equals:
                kept += islice(pending, 1)
        else:
            dropped.append(word)
    return tuple(kept), tuple(dropped)
