"""JavaScript and TypeScript test files: finds the framework of a file, and makes copies of it for a guarded run.

`script_runner.py` runs the copies.
"""

from __future__ import annotations

import json
import posixpath
import re
import secrets
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from etude.code import SCRIPT_SUFFIXES, language_of, syntax_tree
from etude.grading.grade import is_test_file

_MODULE = re.compile(r"^\s*(?:import\b(?!\s*\()|export\b)", re.MULTILINE)
_EQUAL = frozenset({"equal", "equals", "strictEqual", "deepEqual", "deepStrictEqual", "eql", "is", "same", "be",
                    "toBe", "toEqual", "toStrictEqual", "toMatchObject", "toHaveLength", "toContain", "toBeCloseTo",
                    "toMatchInlineSnapshot"})  # fmt: skip
_LITERALS = frozenset({"number", "string"})
_TEST = re.compile(r"(?<![.\w])(?:describe|context|suite|it|test|specify|tape)(?:\.\w+)*\s*[(`]|\btap\.test\(")
_RELATIVE = re.compile(r"(?:require\(|from\s|import\b\s*\(?)\s*['\"](\.{1,2}/[^'\"\n]*)['\"]")
_RUNNERS = re.compile(r"\b(vitest|jest|mocha)\b")
_STANDARD = frozenset({"import", "require", "default", "types", "node", "browser", "module", "deno", "bun"})


def holds_tests(path: str, text: str) -> bool:
    """Whether a test file defines tests; the other files in test folders are helpers."""
    return is_test_file(path) and _TEST.search(text) is not None


def imports(path: str, text: str, files: Container[str]) -> set[str]:
    """The `files` that a script imports by a relative path."""
    hits: set[str] = set()
    for name in _RELATIVE.findall(text):
        place = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        stem = re.sub(r"\.[cm]?js$", "", place)  # TypeScript names the file that it is compiled to
        tried = [
            place,
            *(f"{stem}{end}" for end in SCRIPT_SUFFIXES),
            *(f"{place}/index{end}" for end in SCRIPT_SUFFIXES),
        ]
        hits |= {next((each for each in tried if each in files), "")} - {""}
    return hits


def is_module(path: str, text: str) -> bool:
    """Whether a script is an ES module, by its ending or its text."""
    ending = path.rpartition(".")[2]
    return ending.startswith("m") or (not ending.startswith("c") and _MODULE.search(text) is not None)


def test_framework(text: str, package: Mapping[str, Any]) -> str:
    """The framework that a test file imports, else the first that its package.json names."""
    imported = (("node", "node:test"), ("tape", "tape"), ("vitest", "vitest"), ("jest", "@jest/globals"))
    for name, module in imported:
        if re.search(rf"(?:require\(|from\s+|import\s+)['\"]{module}['\"]", text):
            return name
    commands = package.get("scripts", {})
    texts = [commands.get("test", ""), *commands.values(), *package.get("devDependencies", ())]
    match = _RUNNERS.search("\n".join(map(str, texts)))
    return match.group(1) if match else "mocha"


def read_package(repository: Path) -> dict[str, Any]:
    """The content of a repository's package.json; empty if it cannot be read."""
    try:
        content = json.loads((repository / "package.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def conditions(exports: object) -> list[str]:
    """Names under which a package.json exports its TypeScript sources, for tests that import the package by name."""
    names: list[str] = []
    for key, value in exports.items() if isinstance(exports, dict) else ():
        if isinstance(value, str):
            source = re.search(r"\.[cm]?tsx?$", value) and not re.search(r"\.d\.[cm]?ts$", value)
            names += [key] if source and not key.startswith(".") and key not in _STANDARD else []
        names += conditions(value)
    return list(dict.fromkeys(names))


def guarded(text: str, kind: str) -> tuple[str, dict[str, str]]:
    """A test file of the framework `kind` with sentinels at its end, and their outcomes by name."""
    wrong, right = secrets.token_hex(8), secrets.token_hex(8)
    one, two = secrets.SystemRandom().sample(range(10_000), 2)
    module = kind == "vitest" or _MODULE.search(text) is not None
    check, test = (f"s{secrets.token_hex(4)}" for _ in range(2))

    def imported(names: str, source: str) -> str:
        if module:
            return f"import {names} from '{source}';\n"
        return f"const {names.replace(' as ', ': ').removeprefix('*: ')} = require('{source}');\n"

    header = {
        "node": imported(f"{{ test as {test} }}", "node:test"),
        "tape": imported(test, "tape"),
        "jest": imported(f"{{ it as {test} }}", "@jest/globals"),
        "vitest": imported(f"{{ it as {test} }}", "vitest"),
        "mocha": f"const {test} = globalThis.it ?? globalThis.test;\n",
    }[kind] + imported(f"* as {check}", "node:assert")
    checks = ((wrong, one, two), (right, one, one))
    if kind == "tape":
        calls = [f"{test}('{name}', (t) => {{ t.equal({a}, {b}); t.end() }});" for name, a, b in checks]
    else:
        calls = [f"{test}('{name}', () => {{ {check}.strictEqual({a}, {b}) }});" for name, a, b in checks]
    added = header + "\n".join(calls)
    added = added if module else f"{{\n{added}\n}}"  # a block of its own, so that no name of the file is redefined
    return f"{text}\n;{added}\n", {wrong: "failed", right: "passed"}


def contradicted(path: str, text: str, objects: bool = False) -> str | None:
    """A test file in which the first literal of every expected value is wrong; None if there is none to change.
    `objects`: of expected objects that the test constructs, and of no others.

    The wrong literals are drawn from the others of the file, so that only the result of the tested code tells a wrong
    expectation from a right one.
    """
    tree = syntax_tree(text, language_of(path) or "javascript")
    if tree is None:
        return None
    data = text.encode()
    edits: dict[tuple[int, int], bytes] = {}
    literals: dict[str, set[bytes]] = {}
    expected: list[Any] = []
    pending = [tree.root_node]
    while pending:
        node = pending.pop()
        pending += node.children
        if node.type in _LITERALS and len(node.text) < 100:
            literals.setdefault(_sort(node), set()).add(node.text)
        callee = node.child_by_field_name("function") if node.type == "call_expression" else None
        name = callee.child_by_field_name("property") if callee is not None else None
        if name is None or name.text.decode() not in _EQUAL:
            continue
        arguments = [child for child in node.child_by_field_name("arguments").named_children if child.type != "comment"]
        find = _constructed if objects else _literal
        literal = find(arguments[min(1, len(arguments) - 1)]) if arguments else None
        if literal is not None:
            expected.append(literal)
    for literal in expected:
        edits[literal.start_byte, literal.end_byte] = _wrong(literal, literals.get(_sort(literal), set()))
    for (start, end), new in sorted(edits.items(), reverse=True):
        data = data[:start] + new + data[end:]
    return data.decode() if edits else None


def _literal(node: Any) -> Any:
    """The first number, text or truth value in a literal expected value."""
    if node.type in ("number", "string", "true", "false"):
        return node
    if node.type == "template_string" and all(child.type in ("`", "string_fragment") for child in node.children):
        return node
    if node.type not in ("array", "object", "pair", "unary_expression"):
        return None
    children = [node.child_by_field_name("value")] if node.type == "pair" else node.named_children
    return next((literal for child in children if child is not None and (literal := _literal(child)) is not None), None)


def _constructed(node: Any) -> Any:
    """The first literal among the arguments of a constructor in an expected value."""
    if node.type == "new_expression":
        arguments = node.child_by_field_name("arguments")
        children = () if arguments is None else arguments.named_children
        return next((literal for child in children if (literal := _literal(child)) is not None), None)
    return next((literal for child in node.named_children if (literal := _constructed(child)) is not None), None)


def _sort(node: Any) -> str:
    """The sort of a literal; literals of one sort can replace one another."""
    return node.type if node.type != "string" else node.text[:1].decode()


def _wrong(node: Any, others: set[bytes]) -> bytes:
    """Another literal of the same sort, one of `others` if possible."""
    if node.type in ("true", "false"):
        return b"false" if node.type == "true" else b"true"
    choices = sorted(others - {node.text})
    if node.type == "number":
        choices = [text for text in choices if _value(text) != _value(node.text)]
        near = [b"%d" % value for value in range(10) if b"%d" % value != node.text]
        return secrets.choice(choices or near)
    if choices:
        return secrets.choice(choices)
    inner = node.text[1:-1]
    changed = (
        inner[::-1] if inner.isalnum() and inner != inner[::-1] else inner + (inner[-1:] if inner.isalnum() else b"a")
    )
    return node.text[:1] + changed + node.text[-1:]


def _value(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
