"""Feature deletion: functions that only the tests of one feature reach are removed together.

A slice is a function and, step by step, the helpers that it calls by name, as far as no other test needs them: every
test that calls a helper also calls the function. Without the slice, tests that do not call the function still pass.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence

from etude.code import Mutant, MutationCandidate, body_removal, merge_mutants
from etude.code.functions import Function

MAX_MEMBERS = 8
MAX_LINES = 80  # of all bodies


def slices(functions: Sequence[Function], callers: Mapping[str, set[str]]) -> Iterator[tuple[Function, ...]]:
    """(function, helpers that no other function needs...) for each function that makes a slice of 2 to MAX_MEMBERS
    functions."""
    reached = [f for f in functions if callers.get(f.id)]
    everything = {test for f in reached for test in callers[f.id]}
    for entry in reached:
        own = callers[entry.id]
        if own == everything:
            continue  # no test would show that the other code works
        inner = {}  # by the form of its calls: `name`, or `.name` through an object of its class
        for f in reached:
            if f is not entry and callers[f.id] <= own:
                _, dot, name = f.qualname.rpartition(".")
                inner[dot + name] = f
        members = [entry]
        for member in members:
            for name in _calls(member):
                helper = inner.pop(name, None)
                if helper is not None:
                    members.append(helper)
        if 1 < len(members) <= MAX_MEMBERS and sum(f.body_lines for f in members) <= MAX_LINES:
            yield tuple(members)


def _calls(function: Function) -> list[str]:
    nodes = [part for statement in function.body for part in ast.walk(statement)]
    own = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {a.arg for a in ast.walk(function.node) if isinstance(a, ast.arg)}
    methods = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    names = [n.id for n in nodes if isinstance(n, ast.Name) and n.id not in own]
    return [*names, *(f".{n.attr}" for n in methods if n.value.id in ("self", "cls"))]  # type: ignore[attr-defined]


def deletion(members: Sequence[Function], sources: Mapping[str, str]) -> MutationCandidate | None:
    """The repository without the bodies of `members`; None if one of them cannot be removed."""
    gone: dict[str, list[Mutant]] = {}
    for member in members:
        mutant = body_removal(sources[member.path], member)
        if mutant is None:
            return None
        gone.setdefault(member.path, []).append(mutant)
    files = {path: merge_mutants(parts, "slice") for path, parts in gone.items()}
    entry, *helpers = members
    listed = ", ".join(f"`{f.qualname}`" if f.path == entry.path else f"`{f.qualname}` in {f.path}" for f in helpers)
    return MutationCandidate(
        kind="feature",
        mutant=files.pop(entry.path),
        elsewhere=tuple(files.items()),
        instruction=f"Implement `{entry.qualname}` in {entry.path} and what it calls: {listed}",
        sites=len(members),
    )
