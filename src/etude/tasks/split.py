"""Two seeded splits: functions into training and held-out, tests into visible and hidden."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

import blake3

from etude.code import first_line_of, is_script, lines_of, parse, parsed_lines
from etude.code.functions import FunctionNode, Unit
from etude.records import CodeTask
from etude.tasks import javascript

Callers = Mapping[str, set[str]]  # function -> tests that call it, all by their ids
_MIN_CHANGES = 3  # changes of a kind that are held out, if as many are left


def heldout_functions(
    functions: Sequence[Unit], fraction: float, seed: int, changes: Mapping[str, Sequence[frozenset[str]]]
) -> set[str]:
    """Ids of about `fraction` of the functions, and of those that must be held out with them. Functions with equal
    bodies stay together. `changes` are the sets of functions that changes of several functions touch, by kind: about
    `fraction` of each kind is held out as a whole, and other functions of such changes are the last to be held out. A
    fraction of 0 holds out no function."""
    if not fraction:
        return set()
    groups: dict[str, list[str]] = defaultdict(list)
    for function in functions:
        groups[function.statements_key].append(function.id)
    twins = {id: ids for ids in groups.values() for id in ids}
    heldout: set[str] = set()
    wanted = max(1, round(fraction * len(functions))) if len(functions) > 1 else 0
    room = max(1, wanted // max(1, len(changes)))  # eligible functions that one kind may take

    def added(members: Iterable[str]) -> set[str]:
        return {id for member in members for id in twins.get(member, [member])} - heldout

    def cost(ids: Iterable[str]) -> int:
        return sum(id in twins for id in ids)

    for kind in sorted(changes):
        sets = sorted({*changes[kind]} - {frozenset()}, key=lambda members: rank(seed, f"{kind} {min(members)}"))
        # Some changes will not pass the gates, so a larger share of a small kind is held out.
        goal, taken = min(len(sets) // 2, max(_MIN_CHANGES, round(fraction * len(sets)))), 0
        for members in sets:
            new = added(members)
            if goal > 0 and taken + cost(new) <= room:
                heldout |= new
                taken, goal = taken + cost(new), goal - 1
        if goal > 0 and not any(members <= heldout for members in sets):
            new = min(map(added, sets), key=cost)
            heldout |= new if 3 * cost(heldout | new) <= len(functions) else set()
    several = {id for sets in changes.values() for members in sets for id in members}
    ordered = sorted(groups.values(), key=lambda ids: (not several.isdisjoint(ids), rank(seed, min(ids))))
    count = cost(heldout)
    for ids in ordered:
        new = {*ids} - heldout
        if count + len(new) <= wanted:
            heldout |= new
            count += len(new)
    return heldout


def side(members: Iterable[str], heldout: set[str]) -> str | None:
    """The split of a change that touches `members`: "train", "heldout", or None if they are in both splits."""
    inside = {member in heldout for member in members}
    return None if len(inside) > 1 else "heldout" if True in inside else "train"


def touched(path: str, right: str, wrong: str) -> frozenset[str]:
    """Ids of the functions in the text `right` that a change to `wrong` touches, compared by lines. A line of a class
    outside of its methods touches the class. A line outside of functions and classes touches no id."""
    cut = lines_of if is_script(path) else parsed_lines
    old, new = cut(right), cut(wrong)
    spans = _spans(path, right)
    ids: set[str] = set()
    for kind, first, last, _, _ in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for line in () if kind == "equal" else range(first + 1, max(last, first + 1) + 1):
            inner = [(start, id) for id, start, end in spans if start <= line <= end]
            ids |= {max(inner)[1]} if inner else set()
    return frozenset(ids)


def touched_by(task: CodeTask) -> frozenset[str]:
    """Ids of all functions that a task breaks, computed from its texts."""
    return frozenset(id for path, text in task.changes.items() for id in touched(path, task.solution[path], text))


def touched_by_all(tasks: Iterable[CodeTask]) -> set[str]:
    """Ids of all functions that some tasks break."""
    return {id for task in tasks for id in touched_by(task)}


def _spans(path: str, text: str) -> list[tuple[str, int, int]]:
    """(id, first line, last line) of functions and classes; nested definitions belong to the function around them."""
    if is_script(path):
        return [(f.id, f.first_line, f.last_line) for f in javascript.functions(path, text)]
    spans: list[tuple[str, int, int]] = []

    def visit(body: Sequence[ast.AST], prefix: str) -> None:
        for node in body:
            if isinstance(node, FunctionNode | ast.ClassDef):
                spans.append((f"{path}::{prefix}{node.name}", first_line_of(node), node.end_lineno or node.lineno))
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif not isinstance(node, FunctionNode):
                visit([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)], prefix)

    tree = parse(text)
    visit(tree.body if tree is not None else [], "")
    return spans


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
    """The node id of a test function without its parameters; JavaScript ids have none."""
    if is_script(test):
        return test
    file, separator, name = test.partition("::")
    return file + separator + name.partition("[")[0]


def without_tests(path: str, text: str, hidden: set[str]) -> str:
    """The text of a test module without the `hidden` test functions (node ids); all other lines stay as they are."""
    if is_script(path):
        gone = {test.partition("::")[2] for test in hidden if test.startswith(f"{path}::")}
        return javascript.without_tests(path, text, gone)
    lines: list[str | None] = list(text.split("\n"))
    for test, node in functions_of(ast.parse(text).body, f"{path}::"):
        if test in hidden:
            first = first_line_of(node)
            assert node.end_lineno is not None
            lines[first - 1 : node.end_lineno] = [None] * (node.end_lineno - first + 1)
            # A class must not be left empty; any other statement in it will do.
            if node.col_offset:
                lines[first - 1] = " " * node.col_offset + "pass"
    return "\n".join(line for line in lines if line is not None)


def functions_of(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, FunctionNode]]:
    """(id, node) of the functions of a test module and of its classes, as pytest writes them after `prefix`."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, FunctionNode):
            yield prefix + node.name, node


def rank(seed: int, name: str) -> bytes:
    """The seeded rank of a name: sorting by it gives a random order that the seed decides."""
    return blake3.blake3(f"{seed} {name}".encode()).digest()
