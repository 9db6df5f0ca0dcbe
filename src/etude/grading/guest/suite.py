"""Runs chosen tests in this process with pytest's own collectors, fixtures and run protocol, and reports their
outcomes.

`prepare` runs in the template: one configured session without terminal, cache, conftest or ini file. `Suite` runs in a
forked child: it builds only the nodes of the wanted tests. Node ids: `tests/test_a.py::TestB::test_c[1-2]` and, for the
examples in a docstring, `src/pkg/mod.py::doctest:function`.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

import pytest
from _pytest._io import TerminalWriter
from _pytest.assertion.rewrite import rewrite_asserts
from _pytest.config import Config, _prepareconfig
from _pytest.reports import TestReport
from iniconfig import IniConfig
from pluggy import PluginValidationError

from . import code, negative_controls

SETTINGS = "/site/pytest.ini"
MESSAGE = 160  # characters
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
# "debugging" stays: the unittest plugin asks for its options
_BLOCKED = ("cacheprovider", "junitxml", "pastebin", "stepwise", "faulthandler", "setuponly", "setupplan")
Report = Callable[[str, str, str, int], None]  # (node id, outcome, message, line of the test that failed or 0)


class _Reporter:
    """Keeps the outcome of each phase. It replaces pytest's reporter, which formats a traceback with source for every
    failure."""

    def __init__(self) -> None:
        with open(os.devnull, "w") as null:
            self._tw = TerminalWriter(null)  # comparisons ask for its markup
        self.reports: list[tuple[str, str, str, int]] = []  # phase, outcome, message, line

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> TestReport:
        # A unittest case catches what its test raises; pytest's own hook, which would hand it on, does not run.
        caught = getattr(item, "_excinfo", None)
        error = caught.pop(0) if caught else call.excinfo
        outcome, message, line = "passed", "", 0
        if error is not None:
            import unittest  # here, since few suites need it

            skipped = isinstance(error.value, (pytest.skip.Exception, unittest.SkipTest))
            outcome = "skipped" if skipped else "failed"
            message = describe(error.value)
            line = _line(error.tb, item.nodeid.partition("::")[0]) if call.when == "call" else 0
        self.reports.append((call.when, outcome, message, line))
        return TestReport(item.nodeid, item.location, {}, outcome, None, call.when)  # type: ignore[arg-type]


# An object's address, whole or as pytest has cut it: long values lose their middle.
_ADDRESS = re.compile(
    r"(?:0x|\.\.\.x?)[0-9a-fA-F]{6,}(?=\W|$)"
    r"|(?<=at )0(?:x[0-9a-fA-F]*)?\.\.\.(?:[0-9a-fA-F]*(?=>))?"
    r"|(?<!0x)\.\.\.(?:x[0-9a-fA-F]*|[0-9a-fA-F]+)(?=>)"
)


def _line(trace: TracebackType | None, path: str) -> int:
    """The line at which an error left the test, the outermost frame of its file; 0 if there is none."""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(f"/{path}"):
            return trace.tb_lineno
        trace = trace.tb_next
    return 0


def describe(error: BaseException) -> str:
    """`Type: first line` of an error, without addresses, so that it is the same on every run."""
    try:
        lines = str(error).strip().split("\n")
    except BaseException:  # the tested code's own __str__
        lines = [""]
    name = type(error).__name__
    return one_line(f"{name}: {lines[0]}" if lines[0] else name)


def one_line(text: str) -> str:
    """A message on one line, cut to MESSAGE characters."""
    return " ".join(_ADDRESS.sub("0x...", text[:4000]).split())[:MESSAGE]


def search_path() -> list[str]:
    """Folders to import from that the settings of the image name."""
    if not os.path.isfile(SETTINGS):
        return []
    return IniConfig(SETTINGS).get("pytest", "pythonpath", default="").split()


def prepare(root: str) -> tuple[Config, _Reporter]:
    """A configured pytest below `root`, with the settings that the image holds (`tasks/settings.py`)."""
    settings = SETTINGS if os.path.isfile(SETTINGS) else os.devnull
    options = ["--rootdir", root, "-c", settings, "--noconftest", "--assert=plain", "--capture=no"]
    blocked = [part for name in _BLOCKED for part in ("-p", f"no:{name}")]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    config = _prepareconfig([*options, *blocked, root], None)
    config._do_configure()
    manager = config.pluginmanager
    reporter = _Reporter()
    manager.unregister(name="terminalreporter")
    manager.register(reporter, "terminalreporter")
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    config.stash[_session] = session
    return config, reporter


_session = pytest.StashKey[pytest.Session]()


class _Module(pytest.Module):
    """A test module that is already imported. Only `wanted` names are collected from it."""

    wanted: frozenset[str] | None
    imported: ModuleType

    def _getobj(self) -> ModuleType:
        return self.imported

    def funcnamefilter(self, name: str) -> bool:
        return super().funcnamefilter(name) if self.wanted is None else name in self.wanted

    def classnamefilter(self, name: str) -> bool:
        return super().classnamefilter(name) if self.wanted is None else name in self.wanted


class Suite:
    """The tests of one run. Ids are relative to the folders `hidden` and `workspace`; the first wins."""

    fatal: tuple[type[BaseException], ...] = (KeyboardInterrupt, MemoryError)  # at an import: they end the run

    def __init__(
        self, config: Config, reporter: _Reporter, cache: code.Cache, hidden: str | None, workspace: str
    ) -> None:
        self.config, self.reporter, self.cache = config, reporter, cache
        self.session = config.stash[_session]
        self.trees = [tree for tree in (hidden, workspace) if tree is not None]
        self.hidden, self.workspace = hidden, workspace
        self.folders: dict[str, Any] = {}
        self.items: dict[str, dict[str, Any]] = {}  # path -> node id -> item, of files collected ahead
        self.virtual: dict[str, str] = {}  # path -> text of test modules that have no file

    def locate(self, path: str) -> str | None:
        """The file for the path of a node id."""
        for tree in self.trees:
            if os.path.isfile(f"{tree}/{path}"):
                return f"{tree}/{path}"
        return None

    def load(self, path: str) -> ModuleType:
        """Import a test module, with the packages and conftest files above it."""
        if path in self.virtual:
            assert self.cache.rewrite is not None
            module = ModuleType(path.removesuffix(".py").replace("/", "."))
            exec(self.cache.rewrite(path, self.virtual[path]), vars(module))
            return module
        file = self.locate(path)
        if file is None:
            raise FileNotFoundError(f"no test file {path}")
        name = self._package(path, file)
        self.cache.tests.add(file)
        return code.from_file(self.cache, name, file)

    def warm(self, entry: str) -> None:
        """Import and collect a test file, or (`path::doctest:`) import a source file."""
        path, mark, _ = entry.partition("::doctest:")
        if mark:
            _importable(self.cache, f"{self.workspace}/{path}", path)
        else:
            self.items[path] = {item.nodeid: item for item in _items(self._module(path, None))}

    def _package(self, path: str, file: str) -> str:
        """The module name of a test file. Its packages are imported, from every tree that has them."""
        parts = path.removesuffix(".py").split("/")
        tree = file.removesuffix("/" + path)
        first = len(parts) - 1
        while first and os.path.isfile("/".join([tree, *parts[:first], "__init__.py"])):
            first -= 1
        for i in range(first + 1, len(parts)):
            name = ".".join(parts[first:i])
            if name in sys.modules and not hasattr(sys.modules[name], "__path__"):
                del sys.modules[name]
            folder = "/".join(parts[:i])
            places = [f"{t}/{folder}" for t in self.trees if os.path.isdir(f"{t}/{folder}")]
            if name not in sys.modules:
                code.from_file(self.cache, name, f"{tree}/{folder}/__init__.py").__path__ = places
        return ".".join(parts[first:])

    def _folder(self, path: str) -> Any:
        """The collector of a folder. Registers its conftest."""
        if path in self.folders:
            return self.folders[path]
        parent = self._folder(path.rpartition("/")[0]) if path else self.session
        node: Any = parent
        if path:
            node = pytest.Dir.from_parent(parent, path=Path(self.trees[0], path))
            node._nodeid = path
        self.folders[path] = node
        file = self.locate(f"{path}/conftest.py".lstrip("/"))
        # Where hidden tests run, a conftest that the agent has touched is no part of the suite.
        if file is not None and not (self.hidden and file in self.cache.changed):
            name = self._package(f"{path}/conftest.py".lstrip("/"), file)
            self.cache.tests.add(file)
            module = code.from_file(self.cache, name, file)
            with contextlib.suppress(PluginValidationError):  # hooks of another version of pytest
                self.config.pluginmanager.register(module, os.path.join(self.trees[0], path, "conftest.py"))
            self.session._fixturemanager.parsefactories(holder=module, node=node)
        return node

    def run(self, tests: Sequence[str], report: Report) -> None:
        """Run and report every test, in order; tests of one file that follow each other share its fixtures."""
        items: list[Any] = []
        entries: dict[str, Any] = {}
        by_path: dict[str, list[str]] = {}
        for test in tests:
            by_path.setdefault(test.partition("::")[0], []).append(test)
        for path, ids in by_path.items():
            try:
                entries |= self._collect(path, ids)
            except BaseException as e:
                if isinstance(e, self.fatal):
                    raise
                entries |= dict.fromkeys(ids, describe(e))
        for test in tests:
            entry = entries.get(test, f"no such test {test}")
            if isinstance(entry, str):
                report(test, "error", one_line(entry), 0)
            else:
                items.append((test, entry))
        for i, (test, entry) in enumerate(items):
            if isinstance(entry, pytest.Item):
                following = items[i + 1][1] if i + 1 < len(items) else None
                self._run_item(test, entry, following if isinstance(following, pytest.Item) else None, report)
            else:
                outcome, message = entry()
                report(test, outcome, message, 0)

    def _collect(self, path: str, ids: Sequence[str]) -> dict[str, Any]:
        """Node id -> item, callable, or the text of an error."""
        entries: dict[str, Any] = {}
        names = set()
        for test in ids:
            rest = test[len(path) + 2 :]
            if rest.startswith("doctest:"):
                entries[test] = self._doctest(path, rest.removeprefix("doctest:"))
            else:
                names.add(re.split(r"::|\[", rest, maxsplit=1)[0])
        if names:
            items = self.items.get(path)
            if items is None:
                items = {item.nodeid: item for item in _items(self._module(path, frozenset(names)))}
            entries |= {test: items[test] for test in ids if test in items}
        return entries

    def _module(self, path: str, wanted: frozenset[str] | None) -> _Module:
        """The collector of a test file, restricted to the `wanted` functions and classes unless None."""
        folder = self._folder(path.rpartition("/")[0])
        module = self.load(path)
        node: Any = _Module.from_parent(folder, path=Path(self.trees[0], path))
        node._nodeid = path
        node.wanted, node.imported = wanted, module
        return node

    def _run_item(self, test: str, item: pytest.Item, following: pytest.Item | None, report: Report) -> None:
        self.reporter.reports = []
        try:
            self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        except BaseException as e:
            if isinstance(e, self.fatal) and not isinstance(e, KeyboardInterrupt):
                raise
            report(test, "error", describe(e), 0)
            return
        outcome, message, line = "missing", "", 0
        for phase, result, text, place in self.reporter.reports:
            if result != "passed":
                outcome = "failed" if phase == "call" or result == "skipped" else "error"
                message, line = text, place
                break
            if phase == "call":
                outcome = "passed"
        report(test, outcome, message, line)

    def _doctest(self, path: str, name: str) -> Callable[[], tuple[str, str]]:
        file = f"{self.workspace}/{path}"
        module = _importable(self.cache, file, path)

        def run() -> tuple[str, str]:
            target: Any = module
            for part in filter(None, name.split(".")):
                target = getattr(target, part, None)
            examples = doctest.DocTestParser().get_doctest(
                getattr(target, "__doc__", None) or "", dict(vars(module)), name, file, 0
            )
            if not examples.examples:
                return "error", f"{name} has no doctest"
            runner = _DocRunner(optionflags=_OPTIONS)
            runner.run(examples, out=lambda _: None)
            return ("failed", one_line(runner.message)) if runner.message is not None else ("passed", "")

        return run


class _DocRunner(doctest.DocTestRunner):
    """Keeps one line about the first doctest example that fails."""

    message: str | None = None

    def report_failure(self, out: Any, test: Any, example: doctest.Example, got: str) -> None:
        if self.message is None:
            wanted = example.want.strip() or "nothing"
            self.message = f"expected {wanted} got {got.strip() or 'nothing'}"

    def report_unexpected_exception(self, out: Any, test: Any, example: doctest.Example, exc_info: Any) -> None:
        if self.message is None:
            self.message = describe(exc_info[1])


def _importable(cache: code.Cache, file: str, path: str) -> ModuleType:
    """Import a file below an import root by its dotted name."""
    import importlib

    for root in sys.path:
        if root and file.startswith(root + "/"):
            name = file[len(root) + 1 :].removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            return importlib.import_module(name)
    return code.from_file(cache, path.removesuffix(".py").replace("/", "."), file)


def _items(node: Any) -> Iterator[pytest.Item]:
    for child in node.collect():
        if isinstance(child, pytest.Item):
            yield child
        else:
            yield from _items(child)


def rewriter(config: Config, token: str | None) -> Callable[[str, str], CodeType]:
    """Compiles test modules with pytest's assertion rewriting; a `token` adds negative controls of their tests."""

    def rewrite(path: str, text: str) -> CodeType:
        tree = ast.parse(text, path)
        if token is not None:
            negative_controls.add(tree, token)
        rewrite_asserts(tree, text.encode(), path, config)
        return compile(tree, path, "exec", dont_inherit=True)

    return rewrite
