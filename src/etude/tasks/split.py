"""Two seeded splits: functions into training and held-out, tests into visible and hidden."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import blake3

from etude.code.functions import FunctionNode, Unit
from etude.grading.javascript import is_script
from etude.tasks import javascript


def heldout_functions(functions: Sequence[Unit], fraction: float, seed: int) -> set[str]:
    """Ids of about `fraction` of the functions. Functions with equal bodies stay together."""
    groups: dict[str, list[str]] = defaultdict(list)
    for function in functions:
        groups[function.statements_key].append(function.id)
    ordered = sorted(groups.values(), key=lambda ids: rank(seed, min(ids)))
    heldout: set[str] = set()
    wanted = max(1, round(fraction * len(functions))) if len(functions) > 1 else 0
    for ids in ordered:
        if len(heldout) + len(ids) <= wanted:
            heldout.update(ids)
    return heldout


def visible_half(callers: Mapping[str, Iterable[str]], seed: int) -> set[str]:
    """Test functions (node ids without parameters) to show: about half of those that call each function. `callers` maps
    a function to the tests that call it. A function's only test stays hidden."""
    tests = {function: sorted({base(t) for t in ids}, key=lambda t: rank(seed, t)) for function, ids in callers.items()}
    visible: set[str] = set()
    hidden: set[str] = set()
    for function in sorted(tests, key=lambda f: (len(tests[f]), f)):
        for test in tests[function]:
            if test not in visible | hidden:
                shown = sum(t in visible for t in tests[function])
                (visible if 2 * shown < sum(t in visible | hidden for t in tests[function]) else hidden).add(test)
    return visible


def base(test: str) -> str:
    """The node id of a test function, without its parameters; JavaScript's names have none."""
    if is_script(test):
        return test
    file, separator, name = test.partition("::")
    return file + separator + name.partition("[")[0]


def without_tests(path: str, text: str, hidden: set[str]) -> str:
    """A test module with the `hidden` test functions (node ids) taken out; all other lines stay as they are."""
    if is_script(path):
        gone = {test.partition("::")[2] for test in hidden if test.startswith(f"{path}::")}
        return javascript.without_tests(path, text, gone)
    lines: list[str | None] = list(text.split("\n"))

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, FunctionNode) and prefix + node.name in hidden:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                assert node.end_lineno is not None
                lines[first - 1 : node.end_lineno] = [None] * (node.end_lineno - first + 1)
                # A class must not be left empty; what else it holds does not matter.
                if node.col_offset:
                    lines[first - 1] = " " * node.col_offset + "pass"

    visit(ast.parse(text).body, path + "::")
    return "\n".join(line for line in lines if line is not None)


def rank(seed: int, name: str) -> bytes:
    """A place in an order that the seed decides."""
    return blake3.blake3(f"{seed} {name}".encode()).digest()
