"""Tables of Java edits, of two releases of a small library: what is read, cut, invented and graded."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from etude.code.languages import parses, same_syntax
from etude.config import EditTableConfig
from etude.corpus.edits.build import build_edit_table
from etude.edits import examples as tables
from etude.edits.grades import EditGrade, grade_edit
from etude.edits.merge import merge
from etude.edits.sketch_blocks import NoPlace
from tests.helpers.libraries import LICENCE, WORDS

pytestmark = pytest.mark.skipif(find_spec("tree_sitter_java") is None, reason="needs the extra `apply`")


def java(i: int, new: bool) -> str:
    """A class in words of its own; in the new release a loop differs, and there is a method more."""
    a, b, c, d, e, f = random.Random(i).sample(WORDS, 6)
    step = f"{c} += {d} * {i + 2};" if new else f"{c} += {d};"
    text = (
        f"package org.{a}.{b};\n\nimport java.util.{c.title()};\n\n/** The {a} of the {b}: {c}, {d} and {e}. */\n"
        f"public class {f.title()}<{d.title()}> {{\n    private final {e.title()} {e} = new {e.title()}();\n\n"
        f"    public void {b}{a.title()}({c.title()} {a}) {{\n        if ({a}.{d}() >= {i}) {{\n"
        f'            throw new {b.title()}Exception("{c} of {d} {i}");\n        }}\n        {e}.{f}({a});\n    }}\n\n'
        f"    // {f.title()} before {a}.\n    int {e}{d.title()}(int[] {b}) {{\n        int {c} = {i * 7};\n"
        f"        for (int {d} : {b}) {{\n            {step}\n        }}\n        return {c} - {i};\n    }}\n"
    )
    more = f"\n    boolean {c}{e.title()}() {{\n        return {e}.{b}({i}) == null;\n    }}\n"
    return text + (more if new else "") + "}\n"


def release(folder: Path, new: bool, numbers: range) -> Path:
    folder.mkdir(parents=True)
    (folder / "LICENSE").write_text(LICENCE)
    for i in numbers:
        (folder / f"Part{i}.java").write_text(java(i, new))
    return folder


def test_a_table_of_java_edits(tmp_path: Path) -> None:
    old, new = release(tmp_path / "lib-1.0", False, range(6)), release(tmp_path / "lib-2.0", True, range(6))
    other = release(tmp_path / "other-1.0", False, range(100, 106))
    options = EditTableConfig(seed=2, max_lines=60, held_out_edits=6)
    train, held_out = build_edit_table([f"{old}..{new}"], [str(other)], tmp_path / "out", options)
    assert {e.language for e in train} == {"java"} == {e.language for e in held_out}
    reals = [e for e in train if e.kind == "real"]
    assert reals
    assert any(e.kind == "synthetic" for e in held_out)
    for example in [*train, *held_out]:
        assert parses(example.file, "java")
        assert parses(example.result, "java")
        try:
            merged = merge(example.file, example.sketch).text
        except NoPlace:
            merged = None
        assert example.merges == (merged == example.result)
        assert grade_edit(example.result, example.result.replace(";\n", " ;\n"), "java") == EditGrade.SYNTAX
        assert grade_edit(example.result, example.result.replace(";\n", "; // x\n"), "java") == EditGrade.FAIL
    assert any("// " in e.sketch for e in train), "markers are comments of Java"
    assert tables.load_examples(tmp_path / "out/train.parquet") == train


def test_statements_where_none_may_stand_are_no_java() -> None:
    """The grammar takes reserved words for names there: a field `ret` of type `return`."""
    assert parses("class A { int ret; }\n", "java")
    assert not parses("class A { return ret; }\n", "java")
    assert not same_syntax("class A { return ret; }\n", "class A { return  ret; }\n", "java")
    assert parses("class A { int f() { for (;;) { if (x) return y; else break; } } }\n", "java")
