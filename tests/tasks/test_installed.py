"""Answers and copies of the library in what boxes have besides their task."""

from __future__ import annotations

import compileall
import io
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from etude.errors import UserError
from etude.records import CodeTask
from etude.sandbox import Sandbox
from etude.tasks import installed, leaks, system_index
from etude.tasks.dataset import load_dataset
from etude.tasks.installed import Library, library_of
from etude.tasks.system_index import SystemIndex, index_of

TINY = Path(__file__).parent / "data/tiny"
CORE = '''"""Chunks."""

def chunked(iterable, size):
    """Break an iterable into lists of a length."""
    iterator = iter(iterable)
    return iter(lambda: list(take(size, iterator)), [])


def collapse(iterable, base_type=None, levels=None):
    return [walked for walked in walk(iterable, 0, base_type, levels)]


class Peekable:
    def __init__(self, iterable):
        self.iterator = iter(iterable)
'''
OTHER = CORE.replace("iterator", "source").replace("walked", "each")  # of another version: hardly a run is the same


@pytest.fixture
def library(tmp_path: Path) -> Library:
    root = tmp_path / "repository/src/more_chunks"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("from more_chunks.more import *\n")
    (root / "more.py").write_text(CORE)
    return library_of("more-chunks-1.2", tmp_path / "repository", ("src/more_chunks",))


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A system with other packages, and modules of the library's names that are others."""
    root = tmp_path / "usr"
    for path, text in {
        "lib/python3/other/more.py": CORE,  # the answers, but no copy by name
        "lib/python3/more_chunks/__init__.pyi": "def chunked(a, b): ...\n",
        "share/doc/more_chunks/README.md": "chunked, collapse and Peekable\n",
        "lib/python3/more_chunks_extra/more.py": "def unrelated(): ...\n",
        "lib/python3/namespace/more_chunks/__init__.py": "",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "lib/python3/other/more.py").unlink()
    return root


def put(root: Path, path: str, text: str) -> str:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    return path


def vendored(root: Path) -> str:
    return put(root, "lib/python3/setuptools/_vendor/more_chunks/more.py", OTHER)


def compiled(root: Path) -> str:
    path = vendored(root)
    folder = (root / path).parent
    compileall.compile_dir(folder, quiet=1)
    (root / path).unlink()
    return next((folder / "__pycache__").iterdir()).relative_to(root).as_posix()


def reorganised(root: Path) -> str:
    put(root, "lib/more_chunks/recipes.py", OTHER)
    return put(root, "lib/more_chunks/__init__.py", "from .recipes import *\n")


def distribution(root: Path) -> str:
    return put(root, "lib/python3/dist-packages/More_Chunks-9.0.dist-info/METADATA", "Name: more-chunks\n")


def wheel(root: Path) -> str:
    (root / "share/wheels").mkdir(parents=True)
    with zipfile.ZipFile(root / "share/wheels/tool-1-py3-none-any.whl", "w") as archive:
        archive.writestr("tool/_vendor/more_chunks/more.py", OTHER)
    return "share/wheels/tool-1-py3-none-any.whl!tool/_vendor/more_chunks/more.py"


def named_wheel(root: Path) -> str:
    return put(root, "share/more_chunks-2.0-py3-none-any.whl", "no archive")


COPIES: tuple[Callable[[Path], str], ...] = (vendored, compiled, reorganised, distribution, wheel, named_wheel)


@pytest.mark.parametrize("plant", COPIES)
def test_a_copy_is_found_in_any_version(plant: Callable[[Path], str], library: Library, system: Path) -> None:
    assert installed.copies(library, index_of("/usr", system)) == []
    path = plant(system)
    index = index_of("/usr", system)
    assert [index.shown(place) for place in installed.copies(library, index)] == [f"/usr/{path}"]
    site = system.parent / "site"
    site.mkdir()
    with pytest.raises(UserError, match=rf"boxes have a copy of more-chunks in /usr/{path}, .* with `exclude`"):
        installed.refuse_copies(library, [index], site)
    installed.refuse_copies(library, [], site)


def test_a_copy_among_the_dependencies_is_found_and_the_name_of_the_library_is_not(
    library: Library, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    put(site, "more_chunks-1.2.dist-info/METADATA", "Name: more-chunks\n")
    installed.refuse_copies(library, [], site)
    put(site, "tool/vendor/more_chunks/more.py", OTHER)
    with pytest.raises(UserError, match=r"/site/tool/vendor/more_chunks/more\.py, .*do without the package"):
        installed.refuse_copies(library, [], site)


def test_a_package_of_node_is_found_by_its_name(tmp_path: Path) -> None:
    put(tmp_path / "repository", "package.json", '{"name": "@us/chunks"}')
    put(tmp_path / "repository", "index.js", "export function chunked() {}\n")
    library = library_of("chunks", tmp_path / "repository", ("index.js",))
    put(tmp_path / "usr", "share/nodejs/@us/chunks-extra/index.js", "")
    assert installed.copies(library, index_of("/usr", tmp_path / "usr")) == []
    put(tmp_path / "usr", "lib/node_modules/npm/node_modules/@us/chunks/old.js", "")
    index = index_of("/usr", tmp_path / "usr")
    assert [index.shown(place) for place in installed.copies(library, index)] == [
        "/usr/lib/node_modules/npm/node_modules/@us/chunks/old.js"
    ]


@pytest.fixture(scope="module")
def tasks() -> tuple[CodeTask, ...]:
    return load_dataset(TINY).tasks


def held(root: Path, tasks: tuple[CodeTask, ...]) -> dict[str, str]:
    return installed.held([index_of("/usr", root)], tasks)


def test_an_answer_is_found_wherever_it_lies(tmp_path: Path, tasks: tuple[CodeTask, ...]) -> None:
    """In other layout, within other text, and in archives; not the broken file, nor half a file."""
    root, task = tmp_path / "usr", tasks[0]
    path, answer = next(iter(task.solution.items()))
    put(root, "broken.py", task.changes[path])
    put(root, "words.txt", " ".join(sorted(set(answer.split()))))
    assert held(root, (task,)) == {}
    spread = answer.replace("(", "( ").replace(",", " ,")
    put(root, "share/notes.md", f"# Notes\n\n{spread}\nMore.\n")
    assert held(root, (task,)) == {task.id: "/usr/share/notes.md"}
    (root / "share/notes.md").unlink()
    with zipfile.ZipFile(root / "a.zip", "w") as archive:
        archive.writestr("x/renamed.py", answer)
    assert held(root, (task,)) == {task.id: "/usr/a.zip!x/renamed.py"}
    assert installed.held([], (task,)) == {}


def test_all_tasks_with_the_same_file_are_found_in_it(tmp_path: Path, tasks: tuple[CodeTask, ...]) -> None:
    """As `leaks.stored` finds them, which reads every text for every task."""
    for number, text in enumerate({text for task in tasks for text in task.solution.values()}):
        put(tmp_path / "usr", f"{number}.py", text)
    assert held(tmp_path / "usr", tasks).keys() == leaks.stored({"usr": tmp_path / "usr"}, tasks).keys() != set()


def test_compiled_code_needs_constants_and_names(tmp_path: Path) -> None:
    """One long constant alone is in many programs."""
    source = (
        "def explain(reason, colour):\n    prefix = reason.strip()\n"
        "    return prefix.replace('unexpected colour', colour)\n"
    )
    task = load_dataset(TINY).tasks[0]
    broken = "def explain(reason, colour):\n    return None\n"
    task = msgspec.structs.replace(task, solution={"a.py": source}, changes={"a.py": broken})
    root = tmp_path / "usr"
    put(root, "cache/a.py", source)
    compileall.compile_dir(root / "cache", quiet=1)
    (root / "cache/a.py").unlink()
    (place,) = held(root, (task,)).values()
    assert place.endswith(".pyc")
    shutil.rmtree(root)
    root.mkdir()
    (root / "program.bin").write_bytes(b"\0\1unexpected colour\0reason\0")
    assert held(root, (task,)) == {}


class System:
    """A sandbox of which no more is asked."""

    image_name = "image sha256-1"

    def __init__(self, label: str, root: Path) -> None:
        self.label, self.root = label, root

    def system_folders(self) -> dict[str, Path]:
        return {self.label: self.root}


def test_an_index_is_kept_and_that_of_no_image_made_anew_when_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    put(tmp_path / "usr", "a.py", "def something(): ...\n")
    made: list[str] = []

    def counted(label: str, root: Path) -> SystemIndex:
        made.append(label)
        return index_of(label, root)

    monkeypatch.setattr(system_index, "index_of", counted)

    def read(label: str) -> SystemIndex:
        system_index._index.cache_clear()  # as another process
        return system_index.indexes(cast(Sandbox, System(label, tmp_path / "usr")))[0]

    first, again = read("/opt"), read("/opt")
    assert first.shown(0) == "/opt/a.py"
    assert len(made) == 1
    assert again.places == first.places == ("a.py",)
    assert again.having(b"something").tolist() == first.having(b"something").tolist() == [0]
    assert list(again.contents([0])) == [(0, b"def something(): ...\n")]
    put(tmp_path / "usr", "a.py", "def another(): ...\n")
    assert read("/opt").having(b"another").tolist() == [0]
    assert len(made) == 2
    for _ in range(2):
        assert read("/").having(b"another").tolist() == [0]
    assert len(made) == 3, "an image's files never change"
    assert read("/").shown(0) == "/a.py"


def test_programs_links_and_files_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "usr"
    put(root, "a.py", "something = 1\n")
    (root / "program").write_bytes(b"\x7fELF" + b"something")
    (root / "module.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF\0something\0")
    (root / "link.py").symlink_to(root / "a.py")
    buffer = io.BytesIO(b"!<arch>\nsomething")
    (root / "lib.a").write_bytes(buffer.getvalue())
    index = index_of("/usr", root)
    assert index.places == ("a.py", "module.cpython-311-x86_64-linux-gnu.so")
    assert index.having(b"something").tolist() == [0, 1]
    alone = index_of("/opt/a.py", root / "a.py")
    assert (alone.shown(0), *alone.contents([0])) == ("/opt/a.py", (0, b"something = 1\n"))
