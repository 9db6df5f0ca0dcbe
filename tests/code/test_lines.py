"""One notion of a line."""

import ast
import random

import pytest

from etude.code import lines_of, occurrences, parsed_lines, shown_lines

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
