"""Feature deletion: functions that only the tests of one feature reach are removed together.

A slice is a function and, step by step, what it calls by name, as far as no other test needs it: every test that calls
a helper also calls the function. Without the slice, the tests that do not call the function pass as before.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from etude.tasks import mutate
from etude.tasks.discover import Function
from etude.tasks.mutate import Broken, Mutant

MAX_MEMBERS = 8


def slices(functions: Sequence[Function], callers: Mapping[str, set[str]]) -> Iterator[tuple[Function, ...]]:
    """(function, what only it needs...) for each function whose removal takes two to MAX_MEMBERS functions along."""
    reached = [f for f in functions if callers.get(f.id)]
    everything = {test for f in reached for test in callers[f.id]}
    for entry in reached:
        own = callers[entry.id]
        if own == everything:
            continue  # nothing would show that the rest works
        inner = {f.qualname.rsplit(".", 1)[-1]: f for f in reached if f is not entry and callers[f.id] <= own}
        members = [entry]
        for member in members:
            for name in _names(member):
                helper = inner.pop(name, None)
                if helper is not None:
                    members.append(helper)
        if 2 <= len(members) <= MAX_MEMBERS:
            yield tuple(members)


def _names(function: Function) -> list[str]:
    nodes = [part for statement in function.body for part in ast.walk(statement)]
    return [n.id if isinstance(n, ast.Name) else n.attr for n in nodes if isinstance(n, ast.Name | ast.Attribute)]


def deletion(members: Sequence[Function], sources: Mapping[str, str]) -> Broken | None:
    """The repository without the bodies of `members`; None if one of them cannot be taken out."""
    gone: dict[str, list[Mutant]] = {}
    for member in members:
        mutant = mutate.removal(sources[member.path], member)
        if mutant is None:
            return None
        gone.setdefault(member.path, []).append(mutant)
    files = {path: mutate.merged(parts, "slice") for path, parts in gone.items()}
    entry, *helpers = members
    listed = ", ".join(f"`{f.qualname}`" if f.path == entry.path else f"`{f.qualname}` in {f.path}" for f in helpers)
    return Broken(
        kind="feature",
        mutant=files.pop(entry.path),
        elsewhere=tuple(files.items()),
        instruction=f"Implement `{entry.qualname}` in {entry.path} and what it calls: {listed}",
        sites=len(members),
    )
