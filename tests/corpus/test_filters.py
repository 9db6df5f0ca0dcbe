from __future__ import annotations

import ast
from pathlib import Path

import pytest

from etude.corpus.filters import FunctionText, function_texts, keep_file, keep_function, kept_files
from etude.corpus.sources import File, PackageSource


def test_files_with_secrets_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("TOKEN = 'ghp_" + "aB3dE5gH7" * 4 + "'\n")
    assert [file.path for file in kept_files(PackageSource("lib", "1", "MIT", tmp_path))] == ["a.py"]
    assert "a likely secret (github-pat): b.py of lib" in caplog.text


def test_functions_are_dedented_without_docstring_and_keep_their_layout(corpus: list[FunctionText]) -> None:
    assert [f.name for f in corpus] == ["chunk", "clamp", "count_by", "first", "drop_while"]
    chunk, first = corpus[0], corpus[3]
    assert chunk.source.startswith("def chunk(array, size=1):\n    if size < 1:\n")
    assert '"""Split a list."""' in chunk.document
    assert "Long explanation" not in chunk.document
    assert first.source.startswith("def first(self, items, default=None):\n    for item in items:\n")
    for function in corpus:
        ast.parse(function.source)
        ast.parse(function.document)


def test_overloads_stubs_and_broken_files_give_nothing() -> None:
    text = '@t.overload\ndef f(x: int) -> int: ...\n\n\ndef g():\n    """Only words."""\n'
    assert list(function_texts(File("p", "a.py", text))) == []
    assert list(function_texts(File("p", "a.py", "def f(:\n"))) == []


@pytest.mark.parametrize(
    ("path", "text", "kept"),
    [
        ("pkg/a.py", "x = 1\n", True),
        ("pkg/tests/a.py", "x = 1\n", False),
        ("pkg/test_a.py", "x = 1\n", False),
        ("pkg/_vendor/a.py", "x = 1\n", False),
        ("pkg/a.py", "# This file is auto-generated\nx = 1\n", False),
        ("pkg/a.py", "x = '" + "\u00e9" * 10 + "'\n", False),
        ("pkg/a.py", "", False),
    ],
)
def test_file_rules(path: str, text: str, kept: bool) -> None:
    assert keep_file(File("p", path, text)) is kept


def test_function_rules(corpus: list[FunctionText]) -> None:
    assert all(keep_function(f) for f in corpus)

    def with_source(source: str) -> FunctionText:
        return FunctionText("p", "a.py", "f", source, source)

    assert not keep_function(with_source("def f():\n    return 1"))
    assert not keep_function(with_source("def f():\n    x = '<|end|>'\n    return x"))
    assert not keep_function(with_source("def f():\n\tx = 1\n\treturn x"))
    assert not keep_function(with_source("def f():\n" + "    x = 1\n" * 40 + "    return x"))
