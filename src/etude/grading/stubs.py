"""Stubs for the modules of a package: the verifier of JavaScript tests holds them, and they load the modules in another
box.

A stub has the path of its module, so that every loader finds it like the module, and the names that the pristine module
exports. Its values are those of the tested process (`guest/membrane.cjs`).
"""

from __future__ import annotations

import functools
import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from etude.code import SCRIPT_SUFFIXES, language_of, syntax_tree
from etude.grading.grade import is_test_file
from etude.grading.javascript import is_module

_TEST_FOLDERS = frozenset({"test", "tests", "__tests__", "spec", "__mocks__", "__fixtures__", "__snapshots__"})
_SETTINGS = re.compile(
    r"(jest|vitest|vite|babel|mocha|ava|tsup|rollup|webpack)\.[\w.-]*\.[cm]?[jt]s|\.mocharc\.[cm]?js"
)
_DATA = (".json", ".txt", ".csv", ".md", ".html", ".css", ".xml", ".yml", ".yaml", ".svg")
_ENDINGS = ("", *SCRIPT_SUFFIXES, *(f"/index{suffix}" for suffix in SCRIPT_SUFFIXES))
_REMOTE = "globalThis[Symbol.for('etude.remote')]"


def is_replaced(path: str) -> bool:
    """Whether a file of a repository is a module of the package, not a test, a helper of one, or a settings file."""
    pure = PurePosixPath(path)
    if not path.endswith(SCRIPT_SUFFIXES) or re.search(r"\.d\.[cm]?ts$", path):
        return False
    of_tests = is_test_file(path) or _TEST_FOLDERS.intersection(pure.parts[:-1])
    return not of_tests and not _SETTINGS.fullmatch(pure.name)


def is_data(path: str) -> bool:
    """Whether a changed file is text that tests may read and no loader runs."""
    return path.endswith(_DATA)


@functools.lru_cache(maxsize=64)
def stubs(repository: Path) -> dict[str, bytes]:
    """A stub for every module of the pristine repository, by path."""
    modules: dict[str, str] = {}
    for folder, folders, names in os.walk(repository):
        folders[:] = [name for name in folders if name not in ("node_modules", ".git")]
        for name in names:
            path = (Path(folder) / name).relative_to(repository).as_posix()
            if is_replaced(path):
                modules[path] = (repository / path).read_text("utf-8", "replace")
    return {path: _stub(path, text, modules).encode() for path, text in modules.items()}


def _stub(path: str, text: str, modules: dict[str, str]) -> str:
    name = json.dumps(path)
    if not is_module(path, text):
        return f"module.exports = {_REMOTE}.load({name}, false)\n"
    names, others = _exports(path, text, modules, frozenset())
    lines = [f"const _ = {_REMOTE}.load({name}, true)"]
    for number, exported in enumerate(sorted(names)):
        lines.append(f"const _{number} = _[{json.dumps(exported)}]; export {{ _{number} as {exported} }}")
    lines += [f"export * from {json.dumps(other)}" for other in sorted(others)]
    return "\n".join(["// @ts-nocheck", *lines, ""])


def _exports(path: str, text: str, modules: dict[str, str], above: frozenset[str]) -> tuple[set[str], set[str]]:
    """(names that a module exports, packages from which it exports all names)."""
    tree = syntax_tree(text, language_of(path) or "javascript")
    names: set[str] = set()
    others: set[str] = set()
    for node in tree.root_node.children if tree is not None else ():
        if node.type != "export_statement":
            continue
        source = node.child_by_field_name("source")
        kinds = {child.type for child in node.children}
        if "*" in kinds and source is not None:
            target = source.text.decode()[1:-1]
            inner = _resolved(path, target, modules)
            if inner is None:
                others.add(target)
            elif inner not in above:
                more, beyond = _exports(inner, modules[inner], modules, above | {path})
                names |= more - {"default"}
                others |= beyond
        elif "type" not in kinds:
            names.update(_named(node))
    return names, others


def _resolved(path: str, target: str, modules: dict[str, str]) -> str | None:
    """The module of the repository that a relative import means; TypeScript may name the compiled file."""
    if not target.startswith("."):
        return None
    place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    stem = re.sub(r"\.([cm]?)jsx?$", r".\1ts", place)
    return next((p + end for p in (place, stem) for end in _ENDINGS if p + end in modules), None)


def _named(node: Any) -> Iterator[str]:
    if any(child.type == "default" for child in node.children):
        yield "default"
        return
    for child in node.children:
        match child.type:
            case "export_clause":
                for item in child.named_children:
                    if item.type == "export_specifier" and not item.text.startswith(b"type "):
                        yield (item.child_by_field_name("alias") or item.child_by_field_name("name")).text.decode()
            case "namespace_export":
                yield child.named_children[-1].text.decode()
            case "lexical_declaration" | "variable_declaration":
                for item in child.named_children:
                    if item.type == "variable_declarator":
                        yield from _bound(item.child_by_field_name("name"))
            case "interface_declaration" | "type_alias_declaration":
                pass
            case _:
                name = child.child_by_field_name("name")
                if name is not None:
                    yield name.text.decode()


def _bound(node: Any) -> Iterator[str]:
    """Names that a pattern binds."""
    if node.type in ("identifier", "shorthand_property_identifier_pattern"):
        yield node.text.decode()
        return
    for child in node.named_children:
        inner = child.child_by_field_name("value") if child.type == "pair_pattern" else None
        if child.type in ("assignment_pattern", "object_assignment_pattern"):
            inner = child.child_by_field_name("left")
        yield from _bound(inner if inner is not None else child)
