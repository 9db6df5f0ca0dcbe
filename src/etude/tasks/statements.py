"""Writes the statement of a task: a request, and the symptom that visible tests show. Finds hidden tests that ask for a
guess.

Some hidden tests need a name or a text that occurs only in the gold answer, in no file of the agent and not in the
statement. Such a test can only be passed by a guess, so it may not decide a task.
"""

import ast
import builtins
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from etude.code import parse
from etude.code.functions import FunctionNode
from etude.sandbox import TestReport
from etude.tasks.leaks import texts_below
from etude.tasks.split import functions_of
from etude.tasks.withheld import shortened

_WORD = re.compile(r"[A-Za-z_]\w{2,}")
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

    def guesses(
        self, tests: Iterable[str], changes: Mapping[str, str], solution: Mapping[str, str], statement: str
    ) -> set[str]:
        """The hidden `tests` that need a name or text that occurs only in the gold answer."""
        gold = "\n".join(solution.values())
        shown = "\n".join([statement, *changes.values()])
        own = Counter(word for path in solution for word in set(_WORD.findall(self._texts.get(path, ""))))
        new = {*_WORD.findall(gold)} - {*_WORD.findall(shown)} - _BUILTIN
        lost = {word for word in new if self._files[word] <= own[word]}
        return {test for test in tests if self._wants(test, lost, gold, shown, changes)}

    def _wants(self, test: str, lost: set[str], gold: str, shown: str, changes: Mapping[str, str]) -> bool:
        """Whether a hidden test needs a name that is `lost`, or a text of `gold` that occurs nowhere else."""
        path, _, name = test.partition("::")
        if path not in self._wanted:
            file = self._hidden / path
            tree = parse(file.read_text("utf-8", "replace")) if file.is_file() and path.endswith(".py") else None
            body = tree.body if tree is not None else []
            imports = {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
            self._wanted[path] = dict(functions_of(body, "")), imports
        functions, imports = self._wanted[path]
        node = functions.get(name.partition("[")[0])
        if node is None:
            return False
        names, texts = set(imports), list[str]()
        for part in ast.walk(node):
            match part:
                case ast.Attribute(value=ast.Name(id=module)) if module in sys.stdlib_module_names:
                    pass  # as in `math.floor`
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    names.add(name)
                case ast.Constant(value=str(text)):
                    texts.append(text)
        if lost & names:
            return True
        for text in texts:
            there = len(text) >= _TEXT and text in gold and text not in shown
            if there and not any(text in other for path, other in self._texts.items() if path not in changes):
                return True
        return False


def failing(report: TestReport, tests: Iterable[str]) -> list[str]:
    """The tests that did not pass, in their order."""
    return [test for test in tests if report.outcomes.get(test) != "passed"]


def with_symptom(request: str, report: TestReport, visible: Sequence[str], hidden: Sequence[str]) -> str:
    """The request with the symptom: failing visible tests by name with the message of the first, else the kinds of
    errors in which hidden tests end. The statement tells nothing else about hidden tests."""
    request = request if request.endswith((".", "!", "?")) or "\n" in request else f"{request}."
    if shown := failing(report, visible):
        names = shortened([f"`{test}`" for test in shown], _SHOWN)
        message = " ".join(report.messages.get(shown[0], "").split())
        verb = "tests fail" if len(shown) > 1 else "test fails"
        return f"{request}\n\nThe {verb}: {names}." + (f" The first says: {message}" if message else "")
    kinds = Counter(_kind(report.messages.get(test, "")) for test in failing(report, hidden))
    listed = ", ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items()))
    return f"{request}\n\nNo visible test fails. Of {len(hidden)} other tests, these fail: {listed}."


def _kind(message: str) -> str:
    match = re.match(r"(?:\w+\.)*(\w*(?:Error|Exception|Exit|Warning|Interrupt|Iteration))\b", message)
    return match[1] if match else "AssertionError"
