"""One notion of a line."""

import ast
import random
from pathlib import Path

import pytest

import etude
from etude.code import counted_alike, functions, lines_of, mutants, occurrences, parsed_lines, shown_lines

ODD = ("\f", "\v", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\r")
ALPHABET = [*ODD, "\n", "\r\n", "a", " ", "é"]


def test_a_newline_alone_ends_a_line():
    for odd in ODD:
        assert lines_of(f"a{odd}b\nc") == [f"a{odd}b", "c"]
    assert [lines_of(text) for text in ("", "\n", "a", "a\n", "a\n\n")] == [[], [""], ["a"], ["a"], ["a", ""]]
    assert shown_lines("a\r\nb\rc\r\n") == ["a", "b\rc"]
    assert lines_of(b"a\x0cb\r\nc\n") == [b"a\x0cb\r", b"c"]


@pytest.mark.parametrize("seed", range(50))
def test_lines_with_ends_are_the_text(seed):
    text = "".join(random.Random(seed).choices(ALPHABET, k=40))
    for lines in (lines_of(text, ends=True), parsed_lines(text)):
        assert "".join(lines) == text
        assert all(lines)
    assert b"".join(lines_of(text.encode(), ends=True)).decode() == text
    assert [line.removesuffix("\n") for line in lines_of(text, ends=True)] == lines_of(text)


@pytest.mark.parametrize("odd", [*ODD, "\r\n", "\n"])
def test_the_lines_of_the_parser(odd):
    text = f'"""{odd}"""\nx = 1  #{odd}\ny = """{odd}{odd}"""\nz = 2\n'
    lines = parsed_lines(text)
    assert [lines[node.lineno - 1][0] for node in ast.parse(text).body] == ['"', "x", "y", "z"]


def test_occurrences_may_overlap():
    assert [occurrences("aaaa", part) for part in ("", "a", "aa", "aaa", "b")] == [0, 4, 3, 2, 0]
    assert occurrences(" )\n )\n )\n", " )\n )") == 2


ROOT = Path(etude.__file__).parent
# Places that cut at other characters than "\n", and may.
KEPT = {
    "audit/packs/": "programs of attackers, which run in boxes",
    "audit/parity/fingerprint.py": "a script without packages, which reads lists of the kernel and of git",
}


def test_no_room_cuts_lines_otherwise():
    places = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "splitlines"
    }
    assert {place for place in places if not place.startswith(tuple(KEPT))} == set()
    assert all(any(place.startswith(kept) for place in places) for kept in KEPT)


SOURCE = '''"""Pages of{odd} text."""
\f

def first(x):
    """One{odd}line."""
    return x + 1


def second(x):  # {odd}
    value = "{odd}" if x > 2 else x + 2
    return value
'''


@pytest.mark.parametrize("odd", ["\f", "\v", "\x1c", "\x85", "\u2028"])
def test_functions_and_their_mutants_are_where_git_counts_them(odd):
    text = SOURCE.format(odd=odd)
    lines = lines_of(text)
    found = functions.functions("m.py", text)
    assert [lines[f.first_line - 1].split("(")[0] for f in found] == ["def first", "def second"]
    made = [mutant for function in found for mutant in mutants(text, function, 1)]
    assert len(made) > 4
    for mutant in made:
        assert lines_of(mutant.text)[: mutant.first_line - 1] == lines[: mutant.first_line - 1]
        assert "\n".join(lines_of(mutant.text)[mutant.first_line - 1 : mutant.last_line]) == mutant.snippet


def test_windows_line_ends_stay_in_mutants():
    text = SOURCE.format(odd="").replace("\n", "\r\n")
    (first, _) = functions.functions("m.py", text)
    for mutant in mutants(text, first, 1):
        assert mutant.text.count("\r\n") >= text.count("\r\n") - 2
        assert mutant.text.count("\r") == mutant.text.count("\r\n")


def test_a_module_whose_lines_python_counts_otherwise_is_not_broken():
    text = SOURCE.format(odd="").replace("text", "te\rxt")
    assert functions.functions("m.py", text) == []
    assert not counted_alike(text)
    assert counted_alike(text.replace("\r", "\r\n"))
