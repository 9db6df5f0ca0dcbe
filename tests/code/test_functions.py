"""Where code, tests and functions of a repository are found, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.code import functions
from etude.errors import UserError

TINY = Path(__file__).parents[1] / "tasks/repositories/tiny-1.0"


def test_src_layout() -> None:
    layout = functions.layout(TINY)
    assert (layout.python_path, layout.source_roots) == (("src",), ("src/tiny",))
    assert layout.sources == ("src/tiny/__init__.py", "src/tiny/lists.py", "src/tiny/words.py")
    assert layout.tests == ("tests/test_lists.py", "tests/test_words.py")


def test_flat_layout_without_junk(tmp_path: Path) -> None:
    for path in ("pkg/__init__.py", "pkg/tests/test_a.py", "pkg/tests/data.txt", "pkg/conftest.py", "setup.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    for path in (".git/config", "pkg/__pycache__/a.pyc", "pkg.egg-info/PKG-INFO", "build/lib/pkg/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "link").symlink_to("/etc")
    layout = functions.layout(tmp_path)
    assert (layout.python_path, layout.source_roots, layout.sources) == ((".",), ("pkg",), ("pkg/__init__.py",))
    assert layout.tests == ("pkg/conftest.py", "pkg/tests/data.txt", "pkg/tests/test_a.py")
    assert set(layout.files) == {"pkg/__init__.py", "setup.py", *layout.tests}


def test_functions() -> None:
    source = (
        "from typing import overload\n"
        "@overload\ndef f(x: int) -> int: ...\n"
        "@overload\ndef f(x: str) -> str: ...\n"
        'def f(x):\n    """One.\n\n    >>> f(1)\n    """\n    if x and x:\n        return 1\n    return x\n'
        "class A:\n    def g(self):\n        def inner():\n            return 1\n        return inner\n"
        "    @property\n    def h(self):\n        return 1\n    @h.setter\n    def h(self, x):\n        self.x = x\n"
    )
    found = {f.qualname: f for f in functions.functions("m.py", source)}
    assert set(found) == {"f", "A.g"}  # no stubs, nothing nested, nothing defined twice
    assert (found["f"].first_line, found["f"].last_line, found["f"].body_lines) == (6, 13, 3)
    assert (found["f"].complexity, found["f"].doctest, found["A.g"].doctest) == (3, True, False)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Python package"):
        functions.layout(tmp_path)
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(UserError, match=r"bad\.py, line 1 is not valid Python"):
        functions.read_source(tmp_path, "bad.py")
    for data, reason in (
        (b"x = '\xe9'\n", r"latin\.py.* is not valid Python .*utf-8"),
        (b"# coding: latin-1\nx = '\xe9'\n", r"latin\.py is in iso-8859-1, and etude writes UTF-8"),
        (b"\xef\xbb\xbfx = 1\n", r"latin\.py is in utf-8-sig"),
        (b"# coding: none-such\n", r"latin\.py.* is not valid Python .*none-such"),
    ):
        (tmp_path / "latin.py").write_bytes(data)
        with pytest.raises(UserError, match=reason):
            functions.read_source(tmp_path, "latin.py")


def test_sources_are_decoded_as_they_declare() -> None:
    assert functions.decoded("# coding: latin-1\r\nx = 'é'\r".encode("latin-1")) == "# coding: latin-1\nx = 'é'\n"
    assert functions.decoded("\ufeffx = 'é'\n".encode()) == "x = 'é'\n"
    with pytest.raises(ValueError, match="utf-8"):
        functions.decoded(b"x = '\xe9'\n")
