"""Finds the code, the tests and the functions of a Python repository, without running any of it."""

import ast
import tokenize
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

from etude.code.languages import first_line_of, parse
from etude.code.lines import counted_alike
from etude.errors import UserError

# Hidden from the agent: history, caches and builds may hold the answer.
_JUNK = frozenset((
    ".git", ".hg", ".svn", ".tox", ".nox", ".venv", "venv", "env", "node_modules", "__pycache__", ".pytest_cache",
    ".mypy_cache", ".ruff_cache", ".hypothesis", ".idea", ".vscode", "build", "dist", ".eggs", ".cache", "htmlcov",
    "_build",
))  # fmt: skip
_JUNK_SUFFIXES = (
    ".pyc", ".pyo", ".so", ".pyd", ".pth", ".whl", ".gz", ".zip", ".egg", ".egg-info", ".coverage",
    ".swp", ".swo", ".orig", ".rej", ".bak", "~", ".class", ".jar", ".tsbuildinfo",
)  # fmt: skip
_TEST_FOLDERS = frozenset(("test", "tests", "testing"))
_NOT_CODE = frozenset(("docs", "doc", "examples", "example", "benchmarks", "benchmark", "scripts", "tools"))
_NOT_MODULES = frozenset(("setup", "conftest", "noxfile", "tasks", "fabfile", "versioneer", "dodo"))
_BRANCHES = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.IfExp, ast.comprehension, ast.BoolOp, ast.ExceptHandler)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Unit(ABC):
    """A function, method or class that can be broken. Lines are 1-based and inclusive, decorators included."""

    path: str
    qualname: str
    first_line: int
    last_line: int
    body_lines: int  # docstring left out
    complexity: int  # 1 + branches, loops, handlers and boolean operators
    doctest: bool

    @property
    def id(self) -> str:
        """Path and qualified name, e.g. "src/tiny/lists.py::chunk"."""
        return f"{self.path}::{self.qualname}"

    @property
    @abstractmethod
    def statements_key(self) -> str:
        """A key that is equal for units with equal statements; such units must not be split between training and
        evaluation."""


@dataclass(frozen=True, kw_only=True)
class Function(Unit):
    """A function, method or class with its syntax tree."""

    node: FunctionNode | ast.ClassDef

    @property
    def statements_key(self) -> str:
        """The statements as `ast.dump` writes them, without the docstring."""
        return "\n".join(ast.dump(statement) for statement in self.body)

    @property
    def body(self) -> list[ast.stmt]:
        """The statements without the docstring."""
        return self.node.body[1:] if ast.get_docstring(self.node, clean=False) is not None else self.node.body


@dataclass(frozen=True)
class RepositoryLayout:
    """The folders and files of a repository by their use. Paths are posix and relative to its root."""

    python_path: tuple[str, ...]  # folders to import from: ("src",) or (".",)
    source_roots: tuple[str, ...]  # packages and modules
    sources: tuple[str, ...]  # .py files below the source roots, tests left out
    tests: tuple[str, ...]  # every file that belongs to the tests, helpers and data included
    files: tuple[str, ...]  # all files except junk
    modules: tuple[str, ...] = ()  # the tests that pytest collects


def layout(
    repository: Path,
    files: Sequence[str] | None = None,
    is_module: Callable[[str], bool] | None = None,
    search: Sequence[str] = (),
) -> RepositoryLayout:
    """Find the code and the tests of a repository among `files` (default: all but junk). `is_module` decides which
    files pytest collects, `search` are folders to import from, before src/ and the root. Raises UserError if there is
    no importable Python code."""
    files = clean_files(repository) if files is None else tuple(files)
    is_module = is_module or is_test_module
    tests = tuple(f for f in files if is_test(f) or (is_module(f) and f.endswith(".py")))
    known = frozenset(tests)
    named = [base for base in dict.fromkeys(search) if base != "." and not is_test(f"{base}/_")]
    for base in [*named, "src", ""]:
        roots = _source_roots(files, base)
        sources = tuple(f for f in files if f.endswith(".py") and _below(f, roots) and f not in known)
        if sources:
            modules = tuple(f for f in tests if is_module(f))
            python_path = (base,) if base else (".",)
            return RepositoryLayout(python_path, roots, sources, tests, files, modules)
    raise UserError(_no_code_message(repository, files))


def _no_code_message(repository: Path, files: Sequence[str]) -> str:
    """Describes a repository without a package at its root, and names the command that can use it."""
    marks = ("pyproject.toml", "setup.py", "setup.cfg", "package.json")
    folders = sorted({str(PurePosixPath(f).parent) for f in files if PurePosixPath(f).name in marks} - {"."})
    folders = [folder for folder in folders if not is_junk(folder) and not _NOT_CODE.intersection(folder.split("/"))]
    if folders:
        shown = ", ".join(folders[:8]) + (", ..." if len(folders) > 8 else "")
        command = f"`etude tasks build {repository / folders[0]} -o OUTPUT`"
        return f"{repository} holds several projects ({shown}); a dataset is made of one: {command}."
    packages = sorted({f.rpartition("/")[0] for f in files if f.endswith("/__init__.py") and not is_test(f)})
    if packages:
        top = min(packages, key=lambda folder: (folder.count("/"), folder))
        parent = str(PurePosixPath(top).parent)
        how = f"name {parent} in pytest's `pythonpath`, or give the folder {repository / parent}"
        return f"{repository} has no Python package or module at its root or in src/, but {top}; {how}."
    return f"{repository} has no Python package or module at its root or in src/; give the repository's root."


def clean_files(repository: Path) -> tuple[str, ...]:
    """All files except history, caches, builds, archives and links; sorted."""
    return tuple(sorted(_files(repository, repository)))


def is_junk(path: str) -> bool:
    """Whether a file is, or lies in, a history, cache, build or archive."""
    return any(part in _JUNK or part.endswith(_JUNK_SUFFIXES) for part in PurePosixPath(path).parts)


def copy(source: Path, target: Path, files: Iterable[str]) -> None:
    """Copy `files` below `source` to the same paths below `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).write_bytes((source / file).read_bytes())


def is_test(path: str) -> bool:
    """Whether a file belongs to the tests: by its folder or its name."""
    *folders, name = PurePosixPath(path).parts
    if any(folder in _TEST_FOLDERS for folder in folders) or name == "conftest.py":
        return True
    return is_test_module(path)


def is_test_module(path: str) -> bool:
    """Whether pytest collects the file."""
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def is_beside(path: str) -> bool:
    """Whether a file lies in a folder beside the library: documentation, examples, tools."""
    return not _NOT_CODE.isdisjoint(PurePosixPath(path).parts[:-1])


def encoding_of(data: bytes) -> str:
    """The encoding that Python reads a source in: "utf-8", "utf-8-sig" with a byte-order mark, or another. A source
    that Python cannot read counts as UTF-8."""
    try:
        return tokenize.detect_encoding(BytesIO(data).readline)[0]
    except SyntaxError:
        return "utf-8"


def decoded(data: bytes) -> str:
    """The text of a source as Python reads it: in its encoding, with "\\n" at the end of every line. It cannot be
    written back. Raises ValueError."""
    text = data.decode(encoding_of(data))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_source(repository: Path, path: str) -> str:
    """Text of a source file, byte for byte. Raises UserError if it is not in UTF-8 or does not parse."""
    data = (repository / path).read_bytes()
    if (encoding := encoding_of(data)) != "utf-8":
        raise UserError(f"{path} is in {encoding}, and etude writes UTF-8; leave it out with `--exclude {path}`.")
    try:
        ast.parse(data)
        text = data.decode()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        line = getattr(e, "lineno", None)
        where = f"{path}, line {line}" if line else path
        reason = getattr(e, "msg", e) if isinstance(e, SyntaxError | ValueError) else "too deep for its parser"
        raise UserError(
            f"{where} is not valid Python ({reason}); fix it or leave it out with `--exclude {path}`."
        ) from None
    return text


def functions(path: str, text: str) -> list[Function]:
    """Functions and methods of a module in their order; empty for text that is not Python, and for one whose lines
    Python counts otherwise than git. Stubs, functions nested in functions and names that are defined twice are left
    out."""
    tree = parse(text) if counted_alike(text) else None
    units: list[Function] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, FunctionNode) and not _is_stub(node):
                units.append(_function(path, text, node, prefix + node.name))
            elif isinstance(node, ast.If | ast.Try):
                for part in ("body", "orelse", "finalbody"):
                    visit(getattr(node, part, []), prefix)

    try:
        visit(tree.body if tree is not None else [], "")
    except RecursionError:  # a chain of a thousand elif
        return []
    names = Counter(function.qualname for function in units)
    # Properties and their setters, or a fallback definition, share a name: tests could not tell them apart.
    return [function for function in units if names[function.qualname] == 1]


def classes(path: str, text: str) -> list[Function]:
    """The classes at the top of a module that hold methods; none where `functions` finds none."""
    tree = parse(text) if counted_alike(text) else None
    nodes = [node for node in (tree.body if tree is not None else ()) if isinstance(node, ast.ClassDef)]
    return [
        _function(path, text, node, node.name)
        for node in nodes
        if any(isinstance(statement, FunctionNode) for statement in node.body)
    ]


def _function(path: str, text: str, node: FunctionNode | ast.ClassDef, qualname: str) -> Function:
    assert node.end_lineno is not None
    docstring = ast.get_docstring(node, clean=False)
    first = node.body[1] if docstring is not None and len(node.body) > 1 else node.body[0]
    return Function(
        path=path,
        qualname=qualname,
        node=node,
        first_line=first_line_of(node),
        last_line=node.end_lineno,
        body_lines=0 if docstring is not None and len(node.body) == 1 else node.end_lineno - first.lineno + 1,
        complexity=1 + sum(isinstance(child, _BRANCHES) for child in ast.walk(node)),
        doctest=docstring is not None and ">>>" in docstring,
    )


def _is_stub(node: FunctionNode) -> bool:
    """Whether a function is an overload, a protocol's or an abstract method, whose body cannot be broken."""
    for decorator in node.decorator_list:
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        label = name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")
        if label in ("overload", "abstractmethod"):
            return True
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return all(isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in body)


def _files(folder: Path, root: Path) -> Iterator[str]:
    for entry in folder.iterdir():
        if is_junk(entry.name) or entry.is_symlink():
            continue
        if entry.is_dir():
            yield from _files(entry, root)
        elif entry.is_file():
            yield entry.relative_to(root).as_posix()


def _source_roots(files: Sequence[str], base: str) -> tuple[str, ...]:
    """Modules and packages directly below the folder `base`; in a folder other than the root, packages need no
    __init__."""
    prefix = f"{base}/" if base else ""
    known = set(files)
    below = {f[len(prefix) :] for f in files if f.startswith(prefix) and f.endswith(".py")}
    roots = []
    for name in sorted({path.partition("/")[0] for path in below}):
        if name in _JUNK | _TEST_FOLDERS | (_NOT_CODE if not base else frozenset()):
            continue
        module = name.endswith(".py") and name.removesuffix(".py") not in _NOT_MODULES and not is_test(name)
        package = not name.endswith(".py") and (bool(base) or f"{name}/__init__.py" in known)
        if module or package:
            roots.append(prefix + name)
    return tuple(roots)


def _below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in roots)
