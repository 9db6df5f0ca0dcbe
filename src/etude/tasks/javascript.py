"""JavaScript and TypeScript: finds code, tests and functions to break by tree-sitter (the extra `apply`).

Every mutant parses, has another syntax tree, and differs from the original only in the edited spans.
"""

import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from etude.code import (
    FLIPPED_OPERATORS,
    SCRIPT_SUFFIXES,
    ByteEdit,
    Mutant,
    MutationCandidate,
    language_of,
    need,
    parses,
    same_syntax,
    syntax_tree,
)
from etude.code.functions import RepositoryLayout, Unit
from etude.config import BuildConfig
from etude.errors import UserError
from etude.grading import holds_tests, is_test_file, read_package

_FUNCTIONS = (
    "function_declaration",
    "function_expression",
    "arrow_function",
    "method_definition",
    "generator_function_declaration",
    "generator_function",
)
_CLASSES = ("class_declaration", "abstract_class_declaration", "class")
_NAMED = {  # statement that names a function -> its field with the name
    "variable_declarator": "name",
    "assignment_expression": "left",
    "pair": "key",
    "field_definition": "property",
    "public_field_definition": "name",
}
_BRANCHES = ("if_statement", "for_statement", "for_in_statement", "while_statement", "do_statement", "switch_case",
             "catch_clause", "ternary_expression")  # fmt: skip
_STATEMENTS = ("_statement", "_declaration")
_ASSIGNMENTS = ("assignment_expression", "augmented_assignment_expression", "update_expression")
_TEST_FOLDERS = frozenset(("test", "tests", "__tests__", "spec", "__mocks__", "__snapshots__", "__fixtures__"))
_NOT_CODE = frozenset(
    ("docs", "doc", "examples", "example", "benchmark", "benchmarks", "bench", "scripts", "tools", "types")
)
_NOT_FILES = re.compile(
    r"(\.config|\.conf|\.min|rollup.*|Gruntfile|gulpfile|example|bench(mark)?|\.d|-d)\.[cm]?[jt]sx?$|^\."
)
_CACHES = frozenset((".swc", ".turbo", ".parcel-cache", ".next", ".nyc_output", ".rollup.cache", ".vite", ".tsbuild"))
_FOREIGN = re.compile(
    r"(?:require\(|from\s+|import\s+)['\"](ava|tap|libtap|@tapjs/[\w-]+|uvu|qunit|jasmine|@hapi/lab|@japa/runner|zora|"
    r"brittle|bun:test|@playwright/test|cypress|lab)['\"/]"
)
_TYPED = re.compile(r"(?<!\.d)\.[cm]?tsx?$")
_FLIP = FLIPPED_OPERATORS | {"===": "!==", "!==": "===", "&&": "||", "||": "&&"}
_CHANGE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "*", "-": "+", "*": "+", "/": "%", "%": "*"}


# Of the language, and of Node: names that no repository defines.
BUILTINS = frozenset(
    re.findall(
        r"\w+",
        """Array ArrayBuffer BigInt Boolean Buffer DataView Date Error EvalError Function Infinity Intl JSON Map Math
    NaN Number Object Promise Proxy RangeError ReferenceError Reflect RegExp Set String Symbol SyntaxError TextDecoder
    TextEncoder TypeError URIError URL URLSearchParams Uint8Array WeakMap WeakSet abs add all alloc allocUnsafe and
    apply arguments async asyncIterator at await bind boolean break byteLength call case catch ceil charAt charCodeAt
    class clear clearInterval clearTimeout codePointAt concat console const constructor continue copyWithin create
    default defineProperties defineProperty delete do done else endsWith entries equals error every exec export exports
    extends false fill filter finally find findIndex findLast flags flat flatMap floor for forEach freeze from
    fromCharCode fromCodePoint fromEntries function get getOwnPropertyDescriptor getOwnPropertyNames
    getOwnPropertySymbols getPrototypeOf getTime global globalThis has hasOwn hasOwnProperty ignoreCase if import in
    includes index indexOf input instanceof isArray isBuffer isFinite isFrozen isInteger isNaN isPrototypeOf
    isSafeInteger iterator join keys lastIndex lastIndexOf length let localeCompare log map match matchAll max message
    min module multiline name new next normalize now null number object of ownKeys padEnd padStart parse parseFloat
    parseInt pop pow process propertyIsEnumerable prototype push race random reduce reduceRight repeat replace
    replaceAll require resolve reject return reverse round search set setInterval setPrototypeOf setTimeout shift sign
    size slice some sort source splice split sqrt stack startsWith static string stringify sub subarray substr
    substring super switch symbol test then this throw toFixed toISOString toJSON toLowerCase toPrecision toString
    toUpperCase trim trimEnd trimStart true trunc try typeof undefined unshift value valueOf values var void warn while
    with write yield""",
    )
)


@dataclass(frozen=True, kw_only=True)
class JsFunction(Unit):
    """A named function. `start` and `end` are byte offsets in its module, `body` those of its block."""

    start: int
    end: int
    body: tuple[int, int]
    statements: str  # without layout

    @property
    def statements_key(self) -> str:
        """The statements without layout; equal for equal statements."""
        return self.statements


def is_repository(repository: Path) -> bool:
    """Whether there is a package.json without a Python project beside it."""
    python = ("pyproject.toml", "setup.py", "setup.cfg")
    return (repository / "package.json").is_file() and not any((repository / name).is_file() for name in python)


def layout(repository: Path, listed: Sequence[str]) -> RepositoryLayout:
    """Find the code and tests of an npm package among the files `listed`. Raises UserError if there is no code, or no
    parser for it."""
    need("JavaScript", "apply")
    files = _without_builds(repository, listed)
    tests, sources = tuple(filter(_belongs_to_tests, files)), tuple(filter(_is_source, files))
    if not sources:
        raise UserError(f"{repository} has no JavaScript sources; give the root of a package.")
    roots = tuple(sorted({f.partition("/")[0] for f in sources}))
    return RepositoryLayout(python_path=(), source_roots=roots, sources=sources, tests=tests, files=files)


def test_modules(repository: Path, tests: Sequence[str]) -> list[str]:
    """The files among `tests` that define tests of a supported framework. Raises UserError if there are none, with the
    name of an unsupported framework."""
    texts = {path: (repository / path).read_text("utf-8", "replace") for path in tests if is_test_file(path)}
    foreign = {path: match[1] for path, text in texts.items() if (match := _FOREIGN.search(text))}
    modules = [path for path, text in texts.items() if holds_tests(path, text) and path not in foreign]
    if modules:
        return modules
    runs = "etude runs tests of node:test, mocha, tape, jest and vitest"
    if foreign:
        names = " and ".join(sorted(set(foreign.values())))
        raise UserError(f"the tests of {repository} are written for {names}, which is not supported: {runs}.")
    raise UserError(f"{repository} has no test files that define tests (*.test.js, or files in test/): {runs}.")


def typed(path: str) -> bool:
    """Whether a file is TypeScript with code, not with types alone."""
    return _TYPED.search(path) is not None


def _without_builds(repository: Path, files: Sequence[str]) -> tuple[str, ...]:
    """The files without source maps, caches and compiled TypeScript, from which answers could be copied. A compiled
    file lies in a folder that package.json exports or a tsconfig compiles into, or has the name of a source file."""
    kept = [f for f in files if not f.endswith(".map") and _CACHES.isdisjoint(f.split("/"))]
    code = {f for f in kept if typed(f) and _is_source(f)}
    if not code:
        return tuple(kept)
    targets = [target for target in _targets(repository, kept) if not target.startswith("..")]
    folders = {t.partition("/")[0] for t in targets if "/" in t or "." not in t}
    folders -= {f.partition("/")[0] for f in kept if typed(f)}
    # Beside their sources; or in the root, where the tree of the sources is repeated.
    stems = {_stem(f) for f in code} | {_stem(f).partition("/")[2] for f in code}

    def built(path: str) -> bool:
        script = re.search(r"\.([cm]?jsx?|d\.[cm]?ts)$", path) is not None
        return path.partition("/")[0] in folders or (script and _stem(path) in stems)

    return tuple(f for f in kept if not built(f))


def _stem(path: str) -> str:
    return re.sub(r"(\.d)?\.[cm]?[jt]sx?$", "", path)


def _targets(repository: Path, files: Sequence[str]) -> Iterator[str]:
    """Paths that package.json exports to users of the package, and output folders of tsconfigs."""
    about = read_package(repository)
    pending: list[object] = [
        about.get(key) for key in ("main", "module", "browser", "types", "typings", "bin", "exports")
    ]
    while pending:
        match pending.pop():
            case dict(values):
                pending += values.values()
            case list(values):
                pending += values
            case str(path) if "*" not in path and path != "./package.json":
                yield posixpath.normpath(path)
    for path in files:
        if re.fullmatch(r"tsconfig[\w.-]*\.json", path):
            text = (repository / path).read_text("utf-8", "replace")
            for value in re.findall(r'"(?:outDir|declarationDir)"\s*:\s*"([^"]+)"', text):
                yield posixpath.normpath(value) + "/_"


def _belongs_to_tests(path: str) -> bool:
    return is_test_file(path) or not _TEST_FOLDERS.isdisjoint(path.split("/")[:-1])


def _is_source(path: str) -> bool:
    *folders, name = path.split("/")
    code = name.endswith(SCRIPT_SUFFIXES) and _NOT_CODE.isdisjoint(folders) and not _NOT_FILES.search(name)
    return code and not _belongs_to_tests(path)


def tree(path: str, text: str) -> Any:
    """The syntax tree of a script, by the ending of its path; None if the script does not parse."""
    return syntax_tree(text, language_of(path) or "javascript")


def functions(path: str, text: str) -> list[JsFunction]:
    """Named functions and methods whose name is unique in the module; none for a file that does not parse."""
    whole = tree(path, text)
    if whole is None:
        return []
    units: list[JsFunction] = []

    def visit(node: Any, prefix: str) -> None:
        body = node.child_by_field_name("body") if node.type in _FUNCTIONS else None
        if body is not None and body.type == "statement_block" and (name := _name(node)):
            units.append(_function(path, node, body, prefix + name))
            return  # nested functions belong to it
        if node.type in _CLASSES and (label := node.child_by_field_name("name")) is not None:
            prefix = f"{prefix}{label.text.decode()}."
        for child in node.children:
            visit(child, prefix)

    visit(whole.root_node, "")
    names = [function.qualname for function in units]
    return [function for function in units if names.count(function.qualname) == 1]


def _name(node: Any) -> str:
    """The name of a function: its own, or that of the variable, field or property to which it is assigned."""
    if node.type not in ("function_expression", "arrow_function", "generator_function"):
        own = node.child_by_field_name("name")
        return own.text.decode() if own is not None else ""
    field = _NAMED.get(node.parent.type)
    if field is None:
        return ""
    text = node.parent.child_by_field_name(field).text.decode()
    text = text.removeprefix("module.exports.").removeprefix("exports.").replace(".prototype.", ".")
    return text if re.fullmatch(r"[\w$.]+", text) and text != "module.exports" else ""


def _function(path: str, node: Any, body: Any, qualname: str) -> JsFunction:
    statements = body.named_children
    lines = body.end_point[0] - body.start_point[0] - 1 if statements else 0
    return JsFunction(
        path=path,
        qualname=qualname,
        first_line=node.start_point[0] + 1,
        last_line=node.end_point[0] + 1,
        body_lines=max(lines, 0),
        complexity=1 + sum(inner.type in _BRANCHES or _is_logic(inner) for inner in walk(node)),
        doctest=False,
        start=node.start_byte,
        end=node.end_byte,
        body=(body.start_byte, body.end_byte),
        statements=" ".join(leaf.text.decode() for leaf in walk(body) if leaf.child_count == 0),
    )


def _is_logic(node: Any) -> bool:
    operator = node.child_by_field_name("operator") if node.type == "binary_expression" else None
    return operator is not None and operator.type in ("&&", "||", "??")


def walk(node: Any) -> Iterator[Any]:
    """A node and all nodes below it, in the order of the text."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(node.children)


Edits = tuple[ByteEdit, ...]
Operator = Callable[[Any, Random], Edits]  # node of one of the operator's types -> edits; none: not applicable


def _edit(node: Any, text: bytes) -> ByteEdit:
    return ByteEdit(node.start_byte, node.end_byte, text)


def _swap(one: Any, two: Any) -> Edits:
    return _edit(one, two.text), _edit(two, one.text)


def _binary(table: dict[str, str]) -> Operator:
    def operator(node: Any, rng: Random) -> Edits:
        sign = node.child_by_field_name("operator")
        return (_edit(sign, table[sign.type].encode()),) if sign.type in table else ()

    return operator


def _op_swap(node: Any, rng: Random) -> Edits:
    return _swap(node.child_by_field_name("left"), node.child_by_field_name("right"))


def _op_break_chain(node: Any, rng: Random) -> Edits:
    return (_edit(node, node.child_by_field_name(rng.choice(("left", "right"))).text),) if _is_logic(node) else ()


def _op_const(node: Any, rng: Random) -> Edits:
    if not re.fullmatch(rb"0|[1-9]\d*", node.text):
        return ()
    value = int(node.text)
    return (_edit(node, b"%d" % (value + rng.choice((1, -1)) if value else 1)),)


def _bool_flip(node: Any, rng: Random) -> Edits:
    return (_edit(node, b"false" if node.type == "true" else b"true"),)


def _negate_cond(node: Any, rng: Random) -> Edits:
    test = node.child_by_field_name("condition")
    negation = b"(!%b)" if test.type == "parenthesized_expression" else b"!(%b)"
    return (_edit(test, negation % test.text),)


def _invert_if(node: Any, rng: Random) -> Edits:
    one, two = node.child_by_field_name("consequence"), node.child_by_field_name("alternative")
    if two is not None and two.type == "else_clause":
        two = two.named_children[-1]
        if one.type != "statement_block" or two.type != "statement_block":
            return ()
    return _swap(one, two) if two is not None else ()


def _remove(node: Any, rng: Random) -> Edits:
    plain = node.type == "expression_statement" and node.named_children[0].type not in _ASSIGNMENTS
    return () if plain or node.parent.type != "statement_block" else (_edit(node, b""),)


def _shuffle_lines(node: Any, rng: Random) -> Edits:
    after = node.next_named_sibling if node.parent.type == "statement_block" else None
    if after is None or not after.type.endswith(_STATEMENTS) or node.type == "return_statement":
        return ()
    return _swap(node, after)


# An operator, and the endings of the types of nodes that it can change.
OPERATORS: dict[str, tuple[Operator, tuple[str, ...]]] = {
    "remove_loop": (_remove, ("for_statement", "for_in_statement", "while_statement", "do_statement")),
    "remove_cond": (_remove, ("if_statement", "switch_statement")),
    "remove_assign": (_remove, ("expression_statement",)),
    "remove_wrapper": (_remove, ("try_statement",)),
    "remove_return": (_remove, ("return_statement",)),
    "invert_if": (_invert_if, ("if_statement", "ternary_expression")),
    "shuffle_lines": (_shuffle_lines, _STATEMENTS),
    "op_change": (_binary(_CHANGE), ("binary_expression",)),
    "op_flip": (_binary(_FLIP), ("binary_expression",)),
    "op_swap": (_op_swap, ("binary_expression",)),
    "op_break_chain": (_op_break_chain, ("binary_expression",)),
    "op_const": (_op_const, ("number",)),
    "negate_cond": (_negate_cond, ("if_statement", "while_statement", "ternary_expression")),
    "bool_flip": (_bool_flip, ("true", "false")),
}


def broken(source: str, function: JsFunction, options: BuildConfig) -> list[MutationCandidate]:
    """Broken versions of a function in a seeded order in which operators take turns, its removal among them."""
    rng = Random(f"{options.seed} {function.id}")
    whole = tree(function.path, source)
    assert whole is not None
    inside = [n for n in walk(whole.root_node) if function.body[0] < n.start_byte and n.end_byte < function.body[1]]
    tables: list[list[MutationCandidate]] = []
    seen: set[str] = set()
    for name, (operator, types) in OPERATORS.items():
        made: list[MutationCandidate] = []
        for node in inside if "mutation" in options.kinds and name in (options.operators or OPERATORS) else ():
            edits = operator(node, rng) if node.type.endswith(types) else ()
            mutant = _apply(source, function, name, edits) if edits else None
            if mutant is not None and mutant.snippet not in seen:
                seen.add(mutant.snippet)
                made.append(MutationCandidate("mutation", mutant))
        rng.shuffle(made)
        tables.append(made)
    programs: list[MutationCandidate] = []
    while any(tables):
        rng.shuffle(tables)
        programs += [made.pop() for made in tables if made]
    before = source.encode()[: function.start].rpartition(b"\n")[2]
    space = before.removesuffix(before.lstrip(b" \t"))
    empty = ByteEdit(*function.body, b"{\n%b  throw new Error('not implemented')\n%b}" % (space, space))
    removed = _apply(source, function, "removal", (empty,)) if "removal" in options.kinds else None
    if removed is not None:
        programs.insert(rng.randrange(options.wanted), MutationCandidate("removal", removed))
    return programs


def _apply(source: str, function: JsFunction, operator: str, edits: Edits) -> Mutant | None:
    """The module after `edits`, or None if it does not parse or has the same syntax tree."""
    data = source.encode()
    whole_lines = (_with_its_lines(data, edit) for edit in edits)
    ordered = tuple(sorted(whole_lines, key=lambda e: e.start, reverse=True))
    start, end = data.rfind(b"\n", 0, function.start) + 1, data.find(b"\n", function.end)
    end = len(data) if end < 0 else end
    whole, original = data, data[start:end].decode()
    for edit in ordered:
        whole = whole[: edit.start] + edit.text + whole[edit.end :]
    snippet = whole[start : end + len(whole) - len(data)].decode()
    language = language_of(function.path) or "javascript"
    if not parses(whole.decode(), language) or same_syntax(whole.decode(), source, language):
        return None
    return Mutant(
        operator=operator,
        source=source,
        edits=ordered,
        original=original,
        snippet=snippet,
        first_line=function.first_line,
        last_line=function.first_line + snippet.count("\n"),
        body_line=function.first_line + 1,
    )


def _with_its_lines(data: bytes, edit: ByteEdit) -> ByteEdit:
    """Extend a deletion over the lines that it would leave empty, since a blank line would mark the place."""
    line, stop = data.rfind(b"\n", 0, edit.start) + 1, data.find(b"\n", edit.end)
    alone = not edit.text and stop >= 0 and not data[line : edit.start].strip() and not data[edit.end : stop].strip()
    return ByteEdit(line, stop + 1, b"") if alone else edit


def without_tests(path: str, text: str, hidden: set[str]) -> str:
    """The text of a test file without the calls that define the `hidden` tests ("outer > inner")."""
    whole = tree(path, text)
    if whole is None:
        return ""  # a file that cannot be cut is not shown
    gone: list[ByteEdit] = []
    for name, node in _tests(whole.root_node):
        if name in hidden and not (gone and node.start_byte < gone[-1].end):  # nested tests go with the outer one
            gone.append(_edit(node, b""))
    data = text.encode()
    for edit in reversed(gone):
        lines = _with_its_lines(data, edit)
        data = data[: lines.start] + data[lines.end :]
    return data.decode()


def titles(path: str, text: str) -> set[str]:
    """Names ("outer > inner") of the tests that `without_tests` can remove."""
    return set(test_nodes(path, text))


def test_nodes(path: str, text: str) -> dict[str, Any]:
    """The statements of the tests and groups that `titles` names."""
    whole = tree(path, text)
    return dict(_tests(whole.root_node)) if whole is not None else {}


def names_and_texts(node: Any) -> tuple[set[str], list[str]]:
    """The identifiers at and below a node, and the contents of its texts and regular expressions."""
    names: set[str] = set()
    texts: list[str] = []
    for part in walk(node):
        if part.type in ("identifier", "property_identifier", "shorthand_property_identifier"):
            names.add(part.text.decode())
        elif part.type in ("string_fragment", "regex_pattern"):
            texts.append(re.sub(r"\\(\W)", r"\1", part.text.decode()))
    return names, texts


def _tests(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, statement) of the tests and their groups at and below a node, in the order of the text."""
    title = _title(node.named_children[0]) if node.type == "expression_statement" else None
    if title is not None:
        yield prefix + title, node
        prefix = f"{prefix}{title} > "
    for child in node.children:
        yield from _tests(child, prefix)


def _title(node: Any) -> str | None:
    """The title in `test('name', ...)`, `it`, `describe`, `t.test` and similar calls."""
    if node.type == "await_expression":
        node = node.named_children[0]
    if node.type != "call_expression":
        return None
    callee = node.child_by_field_name("function").text.decode()
    arguments = node.child_by_field_name("arguments").named_children
    known = re.fullmatch(r"(?:\w+\.)?(test|it|describe|context|suite|specify|tape)(?:\.\w+)?", callee)
    if known is None or len(arguments) < 2 or arguments[0].type not in ("string", "template_string"):
        return None
    return re.sub(r"\\(.)", r"\1", arguments[0].text.decode()[1:-1])
