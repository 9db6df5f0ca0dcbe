"""Rows: holes that join back and stand at nodes, windows in import order, pieces of long files."""

from __future__ import annotations

import json
import random

import pytest

from etude.code import syntax_nodes
from etude.corpus.documents.imports import import_order, imports_of
from etude.corpus.documents.rows import pieces
from tests.corpus.documents.sources import build, folder, module, repository, rows, whole

SCRIPT = """\
import {a} from './b';

export class K {
  m(x) {
    return a(x, 'ü') + 1;
  }
}

const f = (y) => {
  return y;
};
"""
GO = """\
package main

import "fmt"

func Add(a int, b int) int {
	return a + b
}

func main() {
	fmt.Println(Add(1, 2))
}
"""


@pytest.mark.parametrize(("text", "language"), [(module(1) + "\nw = 'ü' + str(1)\n", "python"), (SCRIPT, "javascript"),
                                                (SCRIPT, "typescript"), (GO, "go")])  # fmt: skip
def test_holes_stand_at_nodes(text, language):
    nodes = syntax_nodes(text, language)
    assert nodes is not None
    assert nodes.error_share == 0
    spans = [span for seed in range(20) for span in nodes.draw(random.Random(seed), 8, 200)]
    assert len({*spans}) > 8
    for start, end in spans:
        part = text[start:end]
        assert 0 < end - start <= 200
        assert part == part.strip(), part
        assert all(part.count(a) == part.count(b) for a, b in ("()", "[]", "{}")), part
    for start, end in nodes.definitions():
        assert start == 0 or text[start - 1] == "\n"
        assert text[end - 1] == "\n"
    starts = [text[start:].lstrip().split("(")[0].split("{")[0].strip() for start, _ in nodes.definitions()]
    if language in ("javascript", "typescript"):
        assert starts == ["export class K", "const f ="]


def test_a_hole_joins_back(tmp_path):
    files = {f"a{n}.py": module(n) + "\nname = 'é'\n" for n in range(30)} | {
        f"b{n}.js": SCRIPT * (n + 2) for n in range(1)
    }
    root = folder(tmp_path / "own", files)
    made = build(tmp_path / "corpus", own=[root], fim=1, windows=0)
    every = rows(tmp_path / "corpus")
    assert len(every) == 31 == made["sources"][0]["fill_in_the_middle"]
    assert all(row["middle"] and whole(row) == files[row["origin"]["path"]] for row in every)
    assert all(row.keys() == {"prefix", "suffix", "middle", "id", "source", "origin"} for row in every)
    nodes = [syntax_nodes(files[row["origin"]["path"]], "python") for row in every]
    at_nodes = sum(
        (len(row["prefix"]), len(row["prefix"]) + len(row["middle"])) in {*each.draw(random.Random(0), 10**6, 4000)}
        for row, each in zip(every, nodes, strict=True) if row["origin"]["path"].endswith(".py")
    )  # fmt: skip
    assert 8 <= at_nodes <= 22, "half of them"
    build(tmp_path / "none", own=[root], fim=0, windows=0)
    assert all(row["text"] == files[row["origin"]["path"]] for row in rows(tmp_path / "none"))


def test_windows_are_in_import_order(tmp_path):
    imports = {"base": "", "low": "from shop import base\n", "mid": "from . import low\nimport shop.base\n",
               "high": "from shop.mid import (\n    a,  # b\n    c,\n)\n", "alone": "import os, json\n"}  # fmt: skip
    order = ["high", "alone", "base", "mid", "low"]
    files = {f"src/shop/{chr(97 + n)}_{name}.py": "" for n, name in enumerate(order)}
    files = {"src/shop/__init__.py": ""}
    names = {"base": "z", "low": "y", "mid": "x", "high": "a", "alone": "m"}  # by path, the order is the reverse
    for number, (name, text) in enumerate(imports.items()):
        for old, new in names.items():
            text = text.replace(f" {old}", f" {new}").replace(f".{old}", f".{new}")
        files[f"src/shop/{names[name]}.py"] = module(number, imports=text)
    shop = repository(tmp_path / "shop", ("2026-01-01", files))
    build(tmp_path / "corpus", own=[shop], windows=1)
    (row,) = rows(tmp_path / "corpus")
    held = [part["path"].removeprefix("src/shop/") for part in row["origin"]["files"]]
    assert held == ["z.py", "y.py", "x.py", "a.py", "m.py"]
    for part in row["origin"]["files"]:
        assert row["text"][part["at"] :].startswith(files[part["path"]])
        assert row["text"][: part["at"]].endswith(f"# {part['path']}\n")


def test_imports_of_languages():
    assert imports_of("import a.b, c\nfrom .d import e as f, g\nfrom .. import h\nfrom x import *\n", "python") == (
        "a.b", "c", ".d.e", ".d.g", ".d", "..h", "..", "x")  # fmt: skip
    script = "import x from './x.js'\nconst y = require('../y')\nimport z from 'z'\nimport './s'\n"
    assert imports_of(script, "typescript") == ("./x.js", "../y", "./s")
    assert imports_of('import "fmt"\nimport (\n\tx "a.com/m/x"\n\t"a.com/m/y"\n)\n', "go") == (
        "fmt",
        "a.com/m/x",
        "a.com/m/y",
    )
    assert imports_of("import a.b.C;\nimport static a.D.e;\n", "java") == ("a.b.C", "a.D.e")
    assert imports_of('#include <a.h>\n  #include "b/c.h"\n', "c") == ("b/c.h",)


@pytest.mark.parametrize(
    ("files", "order"),
    [
        (
            [("a.ts", "typescript", ["./b.js"]), ("b.ts", "typescript", ["./c"]), ("c/index.ts", "typescript", ["."])],
            "cba",
        ),
        ([("a.go", "go", ["x.com/m/z"]), ("z/q.go", "go", []), ("z/q_test.go", "go", [])], "zaq"),
        ([("p/A.java", "java", ["p.q.B"]), ("p/q/B.java", "java", ["p.A"])], "BA"),
        ([("a.c", "c", ["z.h"]), ("lib/z.h", "c", ["y.h"]), ("lib/y.h", "c", [])], "yza"),
        ([("a.py", "python", ["b"]), ("b.py", "python", ["a"]), ("c.md", "markdown", [])], "bac"),
    ],
)
def test_import_order(files, order):
    made = [files[place][0] for place in import_order(files)]
    assert sorted(made) == sorted(path for path, _, _ in files)
    first = [path.rpartition("/")[2][0] if "index" not in path else "c" for path in made]
    assert "".join(first) == order or (order == "zaq" and made == ["z/q.go", "a.go", "z/q_test.go"])


def test_import_order_of_a_long_chain():
    files = [(f"m{n:05}.py", "python", [f"m{n + 1:05}"]) for n in range(5000)]
    assert import_order(files) == [*reversed(range(5000))]


def test_long_files_are_cut_at_definitions(tmp_path):
    text = module(3, 60)
    nodes = syntax_nodes(text, "python")
    cut = [*pieces(text, 2000, nodes)]
    assert "".join(part for _, part in cut) == text
    assert all(len(part) <= 2000 for _, part in cut)
    assert sum(part.startswith("def ") for _, part in cut) >= 0.7 * len(cut)
    assert [*pieces("x" * 50, 20, None)] == [(0, "x" * 20), (20, "x" * 20), (40, "x" * 10)]
    build(tmp_path / "corpus", own=[folder(tmp_path / "own", {"a.py": text})], window_characters=2000)
    made = sorted(rows(tmp_path / "corpus"), key=lambda row: row["origin"]["lines"])
    assert "".join(map(whole, made)) == text
    assert json.dumps([row["origin"]["lines"] for row in made])[2] == "1"


def test_texts_to_be_filled_in_are_short_pieces_at_definitions(tmp_path):
    text = "".join(module(n, 1) for n in range(40))
    build(tmp_path / "corpus", own=[folder(tmp_path / "own", {"long.py": text})], fim=1, fim_characters=4000)
    every = sorted(rows(tmp_path / "corpus"), key=lambda row: row["origin"]["lines"])
    assert len(every) > 5
    assert "".join(map(whole, every)) == text
    assert all(len(whole(row)) <= 4000 for row in every)
    starts = {whole(row).lstrip().split()[0] for row in every}
    assert starts == {"#", "def"}, starts
    lines = text.splitlines(keepends=True)
    for row in every:
        first, last = row["origin"]["lines"]
        assert whole(row) == "".join(lines[first - 1 : last])
