"""Writes the statement of a task: a request, and the symptom. Finds hidden tests that ask for a guess.

The symptom is the failure of visible tests or, where all of these pass, an example out of one of several hidden tests
(`examples.py`). A body that is gone is described by its signature and docstring. A program whose statement has none of
these is no task.

Some hidden tests need a name or a text that occurs only in the gold answer, in no file of the agent and not in the
statement. Such a test can only be passed by a guess, so it may not decide a task.
"""

import ast
import builtins
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from etude.code import is_script, parse
from etude.code.functions import Function, FunctionNode, Unit
from etude.sandbox import TestReport
from etude.tasks import javascript
from etude.tasks.examples import example
from etude.tasks.javascript import JsFunction
from etude.tasks.leaks import texts_below
from etude.tasks.split import functions_of
from etude.tasks.withheld import shortened

WORDS = 5  # of a description, at least
_WISH = 300  # characters of a docstring
_WORD = re.compile(r"[A-Za-z_]\w{2,}")
_DEFINED = re.compile(r"\b(?:def|class)\s+(\w+)|^\s*(?:self\.)?(\w+)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE)
_BUILTIN = {
    name for name, value in vars(builtins).items() if not (isinstance(value, type) and issubclass(value, Exception))
}
_TEXT = 12  # characters; a literal of this length or more is a text that must be guessed
_SHOWN = 3


class Determined:
    """The words and texts of a tree, and of its hidden tests."""

    def __init__(self, repository: Path, hidden: Path) -> None:
        """Read the files that the agent sees; a file of hidden tests is read when one of its tests is checked."""
        self._hidden = hidden
        self._texts = dict(texts_below(repository))
        # Word -> number of files.
        self._files = Counter(word for text in self._texts.values() for word in set(_WORD.findall(text)))
        # File of hidden tests -> its functions, and the names that it imports.
        self._wanted: dict[str, tuple[dict[str, FunctionNode], set[str]]] = {}
        self._scripts: dict[str, dict[str, tuple[set[str], list[str]]]] = {}  # file -> test -> its names, and its texts

    @cached_property
    def _defined(self) -> set[str]:
        """The names of functions, classes and variables in Python files of the agent."""
        texts = (text for path, text in self._texts.items() if path.endswith(".py"))
        return {name for text in texts for pair in _DEFINED.findall(text) for name in pair if name}

    def example(self, report: TestReport, tests: Sequence[str]) -> tuple[str, str]:
        """(test, example out of it), the shortest of the failing hidden `tests`. Empty for a single test, which the
        example would show."""
        made: list[tuple[str, str]] = []
        for test in tests if len(tests) > 1 else ():
            path = test.partition("::")[0]
            known = self._files.__contains__ if is_script(path) else self._defined.__contains__
            line, file = report.lines.get(test), self._hidden / path
            if line and file.is_file() and (cut := example(test, file.read_text("utf-8", "replace"), line, known)):
                made.append((test, cut))
        return min(made, key=lambda pair: (len(pair[1]), pair), default=("", ""))

    def guesses(
        self, tests: Iterable[str], changes: Mapping[str, str], solution: Mapping[str, str], statement: str
    ) -> set[str]:
        """The hidden `tests` that need a name or text that occurs only in the gold answer."""
        gold = "\n".join(solution.values())
        shown = "\n".join([statement, *changes.values()])
        own = Counter(word for path in solution for word in set(_WORD.findall(self._texts.get(path, ""))))
        new = {*_WORD.findall(gold)} - {*_WORD.findall(shown)}
        new -= javascript.BUILTINS if any(map(is_script, solution)) else _BUILTIN
        lost = {word for word in new if self._files[word] <= own[word]}
        return {test for test in tests if self._wants(test, lost, gold, shown, changes)}

    def _wants(self, test: str, lost: set[str], gold: str, shown: str, changes: Mapping[str, str]) -> bool:
        """Whether a hidden test needs a name that is `lost`, or a text of `gold` that occurs nowhere else."""
        path, _, name = test.partition("::")
        names, texts = self._script_words(path, name) if is_script(path) else self._python_words(path, name)
        if lost & names:
            return True
        for text in texts:
            there = len(text) >= _TEXT and text in gold and text not in shown
            if there and not any(text in other for path, other in self._texts.items() if path not in changes):
                return True
        return False

    def _script_words(self, path: str, name: str) -> tuple[set[str], list[str]]:
        """Names and texts of a JavaScript test."""
        if path not in self._scripts:
            file = self._hidden / path
            nodes = javascript.test_nodes(path, file.read_text("utf-8", "replace")) if file.is_file() else {}
            self._scripts[path] = {test: javascript.names_and_texts(node) for test, node in nodes.items()}
        return self._scripts[path].get(name, (set(), []))

    def _python_words(self, path: str, name: str) -> tuple[set[str], list[str]]:
        """Names and texts of a Python test; its names are also those that its file imports."""
        if path not in self._wanted:
            file = self._hidden / path
            tree = parse(file.read_text("utf-8", "replace")) if file.is_file() and path.endswith(".py") else None
            body = tree.body if tree is not None else []
            imports = {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
            self._wanted[path] = dict(functions_of(body, "")), imports
        functions, imports = self._wanted[path]
        node = functions.get(name.partition("[")[0])
        if node is None:
            return set(), []
        names, texts = set(imports), list[str]()
        for part in ast.walk(node):
            match part:
                case ast.Attribute(value=ast.Name(id=module)) if module in sys.stdlib_module_names:
                    pass  # as in `math.floor`
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    names.add(name)
                case ast.Constant(value=str(text)):
                    texts.append(text)
        return names, texts


def failing(report: TestReport, tests: Iterable[str]) -> list[str]:
    """The tests that did not pass, in their order."""
    return [test for test in tests if report.outcomes.get(test) != "passed"]


def description(unit: Unit, source: str) -> str:
    """The docstring of a function, or the comment above a JavaScript function, without its tags; empty if it has fewer
    than WORDS words."""
    if isinstance(unit, Function):
        text = ast.get_docstring(unit.node) or ""
    else:
        above = source.split("\n")[: unit.first_line - 1]
        text = _comment("\n".join(above))
    return text if len(re.findall(r"[^\W\d_]{2,}", text)) >= WORDS else ""


def _comment(text: str) -> str:
    """The words of the comment at the end of a JavaScript text, without its tags and code."""
    block = re.search(r"/\*((?:(?!\*/).)*)\*/\s*\Z|((?:^[ \t]*//[^\n]*\n?)+)\s*\Z", text, re.DOTALL | re.MULTILINE)
    lines = (
        [re.sub(r"^\s*(?:\*|//)+ ?", "", line) for line in (block[1] or block[2] or "").split("\n")] if block else []
    )
    return re.sub(
        r"```.*?```", "", "\n".join(line for line in lines if not line.startswith("@")), flags=re.DOTALL
    ).strip()


def wish(unit: Unit, source: str) -> str:
    """The signature of a function, and the first paragraph of its description."""
    if isinstance(unit, Function) and isinstance(unit.node, FunctionNode):
        returned = f" -> {ast.unparse(unit.node.returns)}" if unit.node.returns is not None else ""
        head = f"{unit.qualname}({ast.unparse(unit.node.args)}){returned}"
    elif isinstance(unit, JsFunction):
        head = source.encode()[unit.start : unit.body[0]].decode()
        head = head if unit.qualname.rpartition(".")[2] in head else f"{unit.qualname} = {head}"
    else:
        head = unit.qualname
    first = " ".join(re.split(r"\n\s*\n", description(unit, source))[0].split())
    first = first if len(first) <= _WISH else first[:_WISH].rpartition(" ")[0] + " ..."
    return f"`{' '.join(head.split())}`" + (f": {first}" if first else "")


def with_symptom(
    request: str,
    report: TestReport,
    visible: Sequence[str],
    hidden: Sequence[str],
    shown_of: tuple[str, str] = ("", ""),
) -> str:
    """The request with the symptom: failing visible tests by name with the message of the first, else the kinds of
    errors in which hidden tests end, and the example `shown_of` one of them (test, example). The statement tells
    nothing else about hidden tests."""
    request = request if request.endswith((".", "!", "?")) or "\n" in request else f"{request}."
    if shown := failing(report, visible):
        names = shortened([f"`{test}`" for test in shown], _SHOWN)
        message = " ".join(report.messages.get(shown[0], "").split())
        verb = "tests fail" if len(shown) > 1 else "test fails"
        return f"{request}\n\nThe {verb}: {names}." + (f" The first says: {message}" if message else "")
    kinds = Counter(_kind(report.messages.get(test, "")) for test in failing(report, hidden))
    listed = ", ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items()))
    symptom = f"{request}\n\nNo visible test fails. Of {len(hidden)} other tests, these fail: {listed}."
    test, code = shown_of
    if not code:
        return symptom
    message = " ".join(report.messages.get(test, "").split())
    indented = "\n".join(f"    {line}".rstrip() for line in code.split("\n"))
    return f"{symptom} For example, this fails" + (f" ({message})" if message else "") + f":\n\n{indented}"


def _kind(message: str) -> str:
    match = re.match(r"(?:\w+\.)*(\w*(?:Error|Exception|Exit|Warning|Interrupt|Iteration))\b", message)
    return match[1] if match else "AssertionError"
