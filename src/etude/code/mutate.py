"""Breaks functions by operators (`operators.py`) that edit the text in place, so untouched lines keep their layout.

Every mutant parses, has another AST, and leaves the docstring and all text outside the edited spans unchanged. Tasks
are made by `mutants`, `combined_mutants` and `body_removal`; training text is made by `draw_mutant`.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from etude.code.functions import Function, FunctionNode
from etude.code.operators import OPERATORS, ByteEdit, FunctionBytes, Operator


@dataclass(frozen=True)
class Mutant:
    """A module with one broken function: `snippet` in place of `original`, on lines first_line to last_line."""

    operator: str
    source: str
    edits: tuple[ByteEdit, ...]
    original: str  # the function's text before
    snippet: str
    first_line: int  # 1-based, decorators included
    last_line: int  # inclusive
    body_line: int  # lines before it hold the signature and the docstring, the same in both

    @property
    def body(self) -> str:
        """The broken statements, docstring left out."""
        return "\n".join(self.snippet.split("\n")[self.body_line - self.first_line :])

    @property
    def original_body(self) -> str:
        """The statements before the change, docstring left out."""
        return "\n".join(self.original.split("\n")[self.body_line - self.first_line :])

    @property
    def text(self) -> str:
        """The broken module. It is built on demand, since thousands of mutants share one long module."""
        data = self.source.encode()
        for edit in self.edits:
            data = data[: edit.start] + edit.text + data[edit.end :]
        return data.decode()


@dataclass(frozen=True)
class MutationCandidate:
    """One way to break a repository: `mutant` in the file of a function, and `elsewhere` (path, mutant) in other
    files."""

    kind: str
    mutant: Mutant
    elsewhere: tuple[tuple[str, Mutant], ...] = ()
    instruction: str = ""  # empty: a text from the kind and the function is used
    sites: int = 1


def mutants(
    source: str, function: Function, seed: int, operators: Mapping[str, Operator] | None = None
) -> list[Mutant]:
    """Every single-site mutant of `function`, in a seeded order in which operators take turns."""
    operators = OPERATORS if operators is None else operators
    rng = random.Random(f"{seed} {function.id}")
    place = FunctionBytes(source, function, rng)
    by_operator: dict[str, list[Mutant]] = {}
    seen = set()
    for name, operator in operators.items():
        fresh = []
        for edits in operator(place):
            mutant = _apply(place, name, edits)
            if mutant is not None and mutant.snippet not in seen:
                seen.add(mutant.snippet)
                fresh.append(mutant)
        rng.shuffle(fresh)
        by_operator[name] = fresh
    ordered: list[Mutant] = []
    while any(by_operator.values()):
        names = [name for name, left in by_operator.items() if left]
        rng.shuffle(names)
        ordered += [by_operator[name].pop() for name in names]
    return ordered


def combined_mutants(source: str, function: Function, seed: int, allowed: set[str], limit: int = 12) -> list[Mutant]:
    """At most `limit` mutants with two or three sites, each site broken by a different one of the `allowed`
    operators."""
    rng = random.Random(f"{seed} {function.id} combined")
    single = [mutant for mutant in mutants(source, function, seed) if mutant.operator in allowed][: 4 * limit]
    place = FunctionBytes(source, function, rng)
    by_snippet: dict[str, Mutant] = {}
    for size in (2, 3):
        groups = list(combinations(single[: 12 if size == 3 else None], size))
        rng.shuffle(groups)
        for group in groups[: 4 * limit]:
            spans = sorted((edit.start, edit.end) for mutant in group for edit in mutant.edits)
            names = [mutant.operator for mutant in group]
            apart = all(one[1] <= two[0] and one != two for one, two in pairwise(spans))
            if apart and len(set(names)) == size and len(by_snippet) < limit * (size - 1) // 2:
                both = _apply(place, "+".join(sorted(names)), tuple(e for mutant in group for e in mutant.edits))
                if both is not None:
                    by_snippet.setdefault(both.snippet, both)
    result = list(by_snippet.values())
    rng.shuffle(result)
    return result


def merge_mutants(parts: Sequence[Mutant], operator: str) -> Mutant:
    """Broken functions of one module as one mutant; its lines are those of the first part."""
    first = parts[0]
    data = first.source.encode()
    edits = tuple(sorted((edit for part in parts for edit in part.edits), key=lambda e: e.start, reverse=True))
    start = min(edit.start for edit in first.edits)
    above = [edit for edit in edits if edit.start < start]
    shift = sum(edit.text.count(b"\n") - data[edit.start : edit.end].count(b"\n") for edit in above)
    return Mutant(
        operator=operator,
        source=first.source,
        edits=edits,
        original="\n".join(part.original for part in parts),
        snippet="\n".join(part.snippet for part in parts),
        first_line=first.first_line + shift,
        last_line=first.last_line + shift,
        body_line=first.body_line + shift,
    )


def draw_mutant(
    source: str, function: Function, rng: random.Random, weights: Mapping[str, float], *, single_line: bool = False
) -> Mutant | None:
    """One random mutant: the operator drawn by `weights` among those that apply, then a site uniformly. None if no
    operator with a weight applies. `single_line` allows only changes inside one line."""
    place = FunctionBytes(source, function, rng)
    names = [name for name in OPERATORS if weights.get(name)]
    while names:
        name = rng.choices(names, [weights[name] for name in names])[0]
        sites = list(OPERATORS[name](place))
        rng.shuffle(sites)
        for edits in sites[:3]:
            mutant = None if single_line and _spans_lines(place, edits) else _apply(place, name, edits)
            if mutant is not None:
                return mutant
        names.remove(name)
    return None


def _spans_lines(place: FunctionBytes, edits: tuple[ByteEdit, ...]) -> bool:
    start, end = min(edit.start for edit in edits), max(edit.end for edit in edits)
    return b"\n" in place.data[start:end] or any(b"\n" in edit.text for edit in edits)


def body_removal(source: str, function: Function) -> Mutant | None:
    """The function with its body replaced by NotImplementedError; signature and docstring stay."""
    place = FunctionBytes(source, function, random.Random(0))
    first, last = function.body[0], function.body[-1]
    start, end = place.start(first), place.end(last)
    if first.lineno == function.node.lineno or not place.own_lines(start, end):
        return None
    decorators = getattr(first, "decorator_list", [])
    if decorators:
        start = place.line_start(decorators[0].lineno) + decorators[0].col_offset - 1
    return _apply(place, "removal", (ByteEdit(start, end, b"raise NotImplementedError"),))


def _apply(place: FunctionBytes, operator: str, edits: tuple[ByteEdit, ...]) -> Mutant | None:
    """The module after `edits`, or None if it does not parse or its function keeps its meaning."""
    # Only the function is edited and parsed: a module of thousands of lines would cost seconds over all its mutants.
    ordered = tuple(sorted(edits, key=lambda e: e.start, reverse=True))
    data = place.data[place.first : place.last]
    for edit in ordered:
        data = data[: edit.start - place.first] + edit.text + data[edit.end - place.first :]
    snippet = data.decode().removesuffix("\n")
    parsed = parse_snippet(snippet)
    if parsed is None or type(parsed) is not type(place.function.node) or ast.dump(parsed) == place.dump:
        return None
    if ast.get_docstring(parsed, clean=False) != ast.get_docstring(place.function.node, clean=False):
        return None
    first_line = place.function.first_line
    return Mutant(
        operator=operator,
        source=place.source,
        edits=ordered,
        original=place.original,
        snippet=snippet,
        first_line=first_line,
        last_line=first_line + snippet.count("\n"),
        body_line=place.function.body[0].lineno,
    )


def parse_snippet(snippet: str) -> FunctionNode | ast.ClassDef | None:
    """The one function or class in a (possibly indented) snippet; None for any other text."""
    indented = snippet[:1] in (" ", "\t")
    try:
        tree = ast.parse("if 1:\n" + snippet if indented else snippet)
    except (SyntaxError, ValueError):
        return None
    body = tree.body[0].body if indented and isinstance(tree.body[0], ast.If) else tree.body
    return body[0] if len(body) == 1 and isinstance(body[0], FunctionNode | ast.ClassDef) else None
