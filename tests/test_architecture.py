"""The house, read from the source: rooms in an order, no circles, one meaning for a class name, sizes, docstrings.

Every import counts: at the top of a file, inside a function, and below `TYPE_CHECKING`.
"""

import ast
import importlib
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from benchmarks.code_size import tokens

import etude
from etude.cli.main import COMMANDS

ROOT = Path(etude.__file__).parent
# From top to bottom. A file imports its own room and rooms further to the right, never one to the left.
ROOMS = (
    "cli", "audit", "live", "run", "fleet", "dashboard", "evals", "trainer", "inference", "rollout", "harness",
    "tasks", "grading", "sandbox", "corpus", "edits", "ledger", "weights", "protocol", "renderers", "models", "code",
)  # fmt: skip
FOUNDATIONS = ("runfolder", "config", "records", "processes", "store", "failpoints", "errors")
ORDER = (*ROOMS, *FOUNDATIONS)
# Rooms and foundations that never name torch, not even inside a function: what `pip install etude` brings.
LIGHT = (
    "live", "fleet", "dashboard", "evals", "rollout", "harness", "tasks", "grading", "sandbox", "corpus", "edits",
    "protocol", "ledger", "renderers", "code", *FOUNDATIONS,
)  # fmt: skip
HEAVY = {"torch", "transformers", "numba"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FILE_LINES, FILE_TOKENS, FUNCTION_LINES, ROOT_FILES, PAGES_WORDS = 600, 4_500, 80, 8, 31_190
DOORS = 121  # modules that other rooms import
NAME_ROOMS = 2  # that have a file of the same name
UNFORMATTED = 60  # tables whose columns ruff would not keep
DATA = "audit/packs/"  # programs of attackers, and what they attack
PARTICIPLES = {"told", "said", "found", "given", "asked"}  # they name no thing: report, message, matches, options
FIELDS = {"given", "said"}  # of episodes in ledgers, and of the rows of `etude doctor model --json`


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Module name below the package, as in "harness.loop" -> its file."""
    paths = {path.relative_to(root).with_suffix("").as_posix(): path for path in root.rglob("*.py")}
    names = {name.replace("/", "."): path for name, path in paths.items() if not name.startswith(DATA)}
    return {name.removesuffix("__init__").removesuffix("."): path for name, path in sorted(names.items())}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(name: str, path: Path) -> Iterator[str]:
    """Every absolute name that a module imports; "etude.b.c" for `from etude.b import c`, relative imports resolved."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ["etude", *package][: len(package) + 2 - node.level]
                base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def edges(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports."""
    out: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for target in imports(name, path):
            if not target.startswith("etude."):
                continue
            inner = target.removeprefix("etude.")
            while inner and inner not in files:
                inner = inner.rpartition(".")[0]
            if inner and inner != name:
                out[name].add(inner)
    return out


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    out: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(component := stack[at:]) > 1:
                out.append(sorted(component))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return out


def doors(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Room -> its modules that other rooms import, without the room's name. The examiner's modules in boxes share the
    guest's: nothing else is there."""
    out: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            room, _, module = target.partition(".")
            in_boxes = name.startswith("grading.guest") and target.startswith("sandbox.guest")
            if room != name.partition(".")[0] and not in_boxes:
                out[room].add(module)
    return out


def upward(graph: Mapping[str, set[str]], order: Sequence[str] = ORDER) -> list[str]:
    """Imports that do not go down, as "a.b -> c.d"; a room or root file that the order does not name is one, too."""
    place = {name: i for i, name in enumerate(order)}
    out: list[str] = []
    for name, targets in graph.items():
        room = name.partition(".")[0]
        for target in sorted(targets):
            other = target.partition(".")[0]
            if room and room != other and not place.get(room, len(order)) < place.get(other, -1):
                out.append(f"{name} -> {target}")
    return out


def repeated_classes(files: Mapping[str, Path]) -> dict[str, list[str]]:
    """Class names, private and nested ones without their underscore, that more than one file or scope defines."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in files.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{name}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


def repeated_names(files: Mapping[str, Path], most: int = NAME_ROOMS) -> dict[str, set[str]]:
    """File names that more than `most` rooms have."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for name, path in files.items():
        if path.name != "__init__.py":
            rooms[path.stem].add(name.partition(".")[0])
    return {name: where for name, where in rooms.items() if len(where) > most}


def long_functions(files: Mapping[str, Path], most: int = FUNCTION_LINES) -> list[str]:
    out: list[str] = []
    for name, path in files.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if node.end_lineno - first + 1 > most:
                    out.append(f"{name}:{node.name} {node.end_lineno - first + 1}")
    return out


def undocumented(files: Mapping[str, Path]) -> list[str]:
    """Public modules, classes, functions and methods without a docstring; overrides and protocol bodies count."""
    out: list[str] = []

    def look(node: ast.AST, where: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if child.name.startswith("_"):
                    continue
                if ast.get_docstring(child) is None and not overrides(child):
                    out.append(f"{where}:{child.name}")
                if isinstance(child, ast.ClassDef):
                    look(child, f"{where}:{child.name}")

    for name, path in files.items():
        if not any(part.startswith("_") for part in name.split(".")):
            if ast.get_docstring(tree(path)) is None and tree(path).body:
                out.append(name)
            look(tree(path), name)
    return out


def folders(graph: Mapping[str, set[str]], files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Folder -> folders that its files import; a file of the root stands for itself."""

    def folder(name: str) -> str:
        return name if files[name].name == "__init__.py" or "." not in name else name.rpartition(".")[0]

    out: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        out[folder(name)] |= {folder(target) for target in targets} - {folder(name)}
    return out


def overrides(node: ast.AST) -> bool:
    """Whether a method says by `@override` or `@overload` that its text stands elsewhere."""
    decorators = getattr(node, "decorator_list", [])
    return any(isinstance(d, ast.Name) and d.id in {"override", "overload"} for d in decorators)


FILES = modules()
GRAPH = edges(FILES)


def test_rooms_have_an_order():
    assert upward(GRAPH) == []


def test_no_circle_of_files():
    assert circles(GRAPH) == []


def test_the_folders_of_the_sandbox_have_an_order():
    order = ("sandbox.backends", "sandbox.namespace", "sandbox.images", "sandbox", "sandbox.egress", "sandbox.guest")
    graph = folders(GRAPH, FILES)
    assert {name for name in graph if name.startswith("sandbox")} == {*order}
    for i, folder in enumerate(order):
        assert graph[folder].isdisjoint(order[:i]), folder


def test_no_two_folders_import_each_other():
    assert circles(folders(GRAPH, FILES)) == []


def test_the_root_holds_the_foundations_alone():
    files = {path.stem for path in ROOT.glob("*.py")}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert files | folders == {"__init__", *FOUNDATIONS, *ROOMS}
    assert len(files) <= ROOT_FILES


def test_every_room_says_what_it_is_for():
    for room in ROOMS:
        text = ast.get_docstring(tree(ROOT / room / "__init__.py")) or ""
        assert len(text.split()) >= 25, f"{room}/__init__.py: what it is for, what it may import, what is public"


def test_packages_list_files_that_exist():
    """A package's docstring may list its files, `name, name    what they do`, in indented lines."""
    for path in ROOT.rglob("__init__.py"):
        for line in (ast.get_docstring(tree(path)) or "").splitlines():
            listed = re.match(r" {4}(\w+(?:, \w+)*)(?: {2,}|$)", line)
            missing = {*listed[1].split(", ")} - {file.stem for file in path.parent.iterdir()} if listed else {}
            assert not missing, f"{path}: {line}"


def test_benchmarks_import_names_that_exist():
    """No fast test runs them, and pyright reports no attributes there, of which names in imports are some."""
    for path in (ROOT.parents[1] / "benchmarks").rglob("*.py"):
        for target in imports("", path):
            if target.startswith("etude.") and (inner := target.removeprefix("etude.")) not in FILES:
                module, _, name = inner.rpartition(".")
                assert re.search(rf"\b{name}\b", FILES[module].read_text()), f"{path}: {target}"


def test_rooms_have_doors():
    """`PUBLIC` of a room are its modules that other rooms import; "" is the room itself, with the names it imports."""
    used = doors(GRAPH)
    for room in ROOMS:
        public = importlib.import_module(f"etude.{room}").PUBLIC
        assert {*public} == used[room], room
    assert sum(len(used[room]) for room in ROOMS) <= DOORS


def idle(files: Mapping[str, Path]) -> list[str]:
    """Names, as in "code.functions.Function", that a package imports from below itself for other rooms, of which none
    takes it."""
    taken = {
        (name.partition(".")[0], f"{node.module}.{alias.name}".removeprefix("etude."))
        for name, path in files.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    out: list[str] = []
    for name, path in files.items():
        if path.name != "__init__.py" or not name:
            continue
        own = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
        names = [a.name for node in tree(path).body if isinstance(node, ast.ImportFrom)
                 and (node.module or "").startswith(f"etude.{name}.") for a in node.names]  # fmt: skip
        takers = {what for room, what in taken if room != name.partition(".")[0]}
        out += [f"{name}.{what}" for what in names if what not in own and f"{name}.{what}" not in takers]
    return out


def test_names_at_a_door_are_taken() -> None:
    assert idle(FILES) == []


def hidden(files: Mapping[str, Path]) -> list[str]:
    """Names that a package imports from below itself and that are called as one of its modules, which nobody can reach
    by `from package import module` then."""
    return [
        f"{name}.{alias.name}"
        for name, path in files.items()
        if path.name == "__init__.py" and name
        for node in tree(path).body
        if isinstance(node, ast.ImportFrom) and node.module != f"etude.{name}"
        for alias in node.names
        if f"{name}.{alias.asname or alias.name}" in files
    ]


def test_names_at_a_door_hide_no_module() -> None:
    assert hidden(FILES) == []


def test_public_names_are_said_once() -> None:
    """A room's `__init__` imports them: no list beside the imports, and none in words."""
    for name, path in FILES.items():
        names = [node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)]
        assert "__all__" not in names, name
    for room in ROOMS:
        assert "Public:" not in (ast.get_docstring(tree(ROOT / room / "__init__.py")) or ""), room


def test_pages_name_the_rooms_in_their_order() -> None:
    root = ROOT.parents[1]
    for page, before, after in (
        ("AGENTS.md", "Imports go down only: `", "`"),
        ("docs/decisions/0038-rooms.md", "imports go down only**: ", ", the seven"),
    ):
        named = (root / page).read_text().partition(before)[2].partition(after)[0]
        assert tuple(re.split(r",\s+", named)) == ROOMS, page
    pictures = {
        page: set(re.findall(r"\w+", next(block for block in (root / page).read_text().split("```") if "──" in block)))
        for page in ("README.md", "docs/overview.md")
    }
    drawn = {room for room in ROOMS if room in pictures["README.md"]}
    assert {"tasks", "live", "trainer", "inference"} <= drawn <= pictures["docs/overview.md"]
    overview = (root / "docs/overview.md").read_text()
    assert {room for room in ROOMS if f"`{room}/" in overview} | pictures["docs/overview.md"] >= {*ROOMS}


def test_pages_are_short() -> None:
    root = ROOT.parents[1]
    pages = [root / "README.md", *(page for page in (root / "docs").glob("*.md") if page.name != "results.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= PAGES_WORDS
    long = {p.name: n for p in (root / "docs/decisions").glob("*.md") if (n := len(p.read_text().splitlines())) > 15}
    assert long == {}


def test_trainer_and_inference_do_not_import_each_other():
    pairs = {(name.partition(".")[0], target.partition(".")[0]) for name in GRAPH for target in GRAPH[name]}
    assert not pairs & {("trainer", "inference"), ("inference", "trainer")}


def test_a_class_name_has_one_meaning():
    assert repeated_classes(FILES) == {}


def test_files_and_functions_are_short():
    assert {name: n for name, path in FILES.items() if (n := len(path.read_text().splitlines())) > FILE_LINES} == {}
    assert {name: n for name, path in FILES.items() if (n := tokens(path)) > FILE_TOKENS} == {}
    assert long_functions(FILES) == []


def test_a_file_name_has_at_most_two_rooms():
    assert repeated_names(FILES) == {}


def vague(files: Mapping[str, Path]) -> list[str]:
    """Docstrings that begin with "What": they name no thing."""
    return [
        f"{name}:{getattr(node, 'name', '')}"
        for name, path in files.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (ast.get_docstring(node) or "").startswith("What ")
    ]


def test_a_docstring_begins_with_what_the_thing_is():
    assert vague(FILES) == []


def participles(files: Mapping[str, Path]) -> list[str]:
    """Names with one of `PARTICIPLES` between their underscores: of variables, parameters, functions and attributes.
    Attributes, arguments by keyword and fields of classes may be called as `FIELDS` are."""
    out: list[str] = []
    for name, path in files.items():
        nodes = [*ast.walk(tree(path))]
        fields = {id(n.target) for c in nodes if isinstance(c, ast.ClassDef) for n in c.body
                  if isinstance(n, ast.AnnAssign)}  # fmt: skip
        for node in nodes:
            names = [getattr(node, of, None) for of in ("id", "arg", "attr", "name", "asname", "rest")]
            for text in [text for text in names if isinstance(text, str)]:
                free = isinstance(node, ast.Attribute | ast.keyword) or id(node) in fields
                if PARTICIPLES & {*text.lower().split("_")} and not (free and text in FIELDS):
                    out.append(f"{name}:{getattr(node, 'lineno', 0)} {text}")
    return out


def test_names_are_nouns():
    assert participles(FILES) == []


def test_ruff_lays_out_what_is_no_table():
    assert sum(path.read_text().count("# fmt: skip") for path in FILES.values()) < UNFORMATTED
    assert not any("# fmt: off" in path.read_text() for path in FILES.values())


def test_what_is_public_has_a_docstring():
    assert undocumented(FILES) == []


@pytest.mark.parametrize("room", LIGHT)
def test_torch_free_rooms_do_not_name_torch(room):
    for name, path in FILES.items():
        if name.partition(".")[0] == room:
            assert [i for i in imports(name, path) if i.partition(".")[0] in HEAVY] == [], name


def test_triton_is_imported_by_one_module_when_a_gpu_needs_it():
    kernels = "weights.ulpd.triton_kernels"
    importers = [n for n, path in FILES.items() if any(i.partition(".")[0] == "triton" for i in imports(n, path))]
    assert importers == [kernels]
    assert [name for name in GRAPH if kernels in GRAPH[name]] == ["weights.ulpd.kernels"]
    at_import = [n for n in tree(FILES["weights.ulpd.kernels"]).body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert "triton_kernels" not in [alias.name for node in at_import for alias in node.names]


def test_the_delta_codec_stands_alone():
    inside = {name for name in GRAPH if name.startswith("weights.ulpd")}
    assert {target for name in inside for target in GRAPH[name]} <= inside | {"weights"}


def test_no_pickle():
    for name, path in FILES.items():
        # Code objects have no other form; they go from one process of the sandbox to another, for one repository.
        allowed = {"marshal"} if name == "grading.guest.code" else set[str]()
        assert [i for i in imports(name, path) if i.partition(".")[0] in PICKLES - allowed] == [], name
        calls = [(n.value.id, n.attr) for n in ast.walk(tree(path))
                 if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]  # fmt: skip
        assert not {("torch", "load"), ("torch", "save")} & set(calls), name


def loaded_by(names: Sequence[str]) -> set[str]:
    """The heavy packages that a fresh interpreter holds after importing the modules."""
    code = (
        "import importlib, json, sys\n"
        f"for name in {list(names)!r}: importlib.import_module(name)\n"
        f"print(json.dumps(sorted({HEAVY!r} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_torch_free_rooms_loads_no_torch():
    light = [n for n in FILES if n.partition(".")[0] in LIGHT and ".guest." not in n]
    light += [f"cli.{name}" for name in ("main", *COMMANDS)]
    light += ["run.evaluate", "run.launch"]  # most mistakes of a user are said before torch is loaded
    assert loaded_by([f"etude.{name}" for name in light]) == set()


# Each rule fails where it is broken -----------------------------------------------------------------------------------


def broken(folder: Path, **texts: str) -> dict[str, Path]:
    """A small package with these files; "a__b" stands for a/b.py."""
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return modules(folder)


@pytest.mark.parametrize("text", [
    "from etude.run import loop",
    "def f():\n    from etude.run import loop",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import etude.run.loop",
    "from ..run import loop",
])  # fmt: skip
def test_an_import_that_goes_up_is_seen(tmp_path, text):
    files = broken(tmp_path, run__loop="", tasks__build=text)
    assert upward(edges(files)) == ["tasks.build -> run.loop"]


def test_a_room_without_a_place_is_seen(tmp_path):
    files = broken(tmp_path, attic__box="", tasks__build="import etude.attic.box")
    assert upward(edges(files)) == ["tasks.build -> attic.box"]


def test_a_circle_of_files_is_seen(tmp_path):
    files = broken(tmp_path, code__a="from etude.code import b", code__b="def f():\n    from etude.code.a import x")
    assert circles(edges(files)) == [["code.a", "code.b"]]


def test_folders_that_import_each_other_are_seen(tmp_path):
    texts = {"code__a": "from etude.code.low import b", "code__low__b": "", "code__low__c": "from etude.code import d"}
    files = broken(tmp_path, **texts, code__d="")
    assert circles(edges(files)) == []
    assert circles(folders(edges(files), files)) == [["code", "code.low"]]


def test_a_class_name_with_two_meanings_is_seen(tmp_path):
    files = broken(tmp_path, code__a="class Row: ...", code__b="class Other:\n    class _Row: ...")
    assert list(repeated_classes(files)) == ["Row"]


def test_a_door_is_seen(tmp_path):
    texts = {"code__a": "", "code__low__b": "", "code__c": "", "tasks__d": "import etude.code.a, etude.code.low.b"}
    files = broken(tmp_path, **texts, code__e="import etude.code.c")
    assert doors(edges(files)) == {"code": {"a", "low.b"}}


def test_a_name_that_nobody_takes_is_seen(tmp_path):
    broken(tmp_path, code__a="x = y = z = 1", code__b="from etude.code import x", tasks__c="from etude.code import z")
    (tmp_path / "code/__init__.py").write_text("from etude.code.a import x, y, z\nprint(y)")
    assert idle(modules(tmp_path)) == ["code.x"]


def test_a_name_that_hides_a_module_is_seen(tmp_path):
    broken(tmp_path, code__a="a = b = 1")
    (tmp_path / "code/__init__.py").write_text("from etude.code.a import a, b")
    assert hidden(modules(tmp_path)) == ["code.a"]


def test_a_vague_docstring_is_seen(tmp_path):
    assert vague(broken(tmp_path, code__a='"""Sizes."""\n\ndef f():\n    """What is read."""\n')) == ["code.a:f"]


def test_a_participle_is_seen(tmp_path):
    free = "class Row:\n    said: str = ''\nx = Row(said='').said\nfounder = 'found'\n"
    assert participles(broken(tmp_path, code__a=free)) == []
    texts = ["said = 1", "def f(given): ...", "def was_asked(): ...", "x.found_at = 1", "from a import b as _told"]
    files = broken(tmp_path, **{f"code__a{i}": text for i, text in enumerate(texts)})
    assert [line.partition(":")[0] for line in participles(files)] == [f"code.a{i}" for i in range(len(texts))]


def test_a_file_name_of_three_rooms_is_seen(tmp_path):
    files = broken(tmp_path, code__a="", edits__a="", tasks__a="", tasks__low__a="", tasks__b="", code__b="")
    assert repeated_names(files) == {"a": {"code", "edits", "tasks"}}


def test_tokens_are_counted_whatever_the_lines_are(tmp_path):
    files = broken(tmp_path, code__a="x = [1, 2]  # two\n", code__b="x = [\n    1, 2\n]\n")
    assert [tokens(path) for path in files.values()] == [7, 7]


def test_a_long_function_and_a_missing_docstring_are_seen(tmp_path):
    files = broken(tmp_path, code__a='"""A."""\ndef f():\n' + "    x = 1\n" * 80)
    assert long_functions(files) == ["code.a:f 81"]
    assert undocumented(files) == ["code.a:f"]
