"""Every way of answering means the result, and what means nothing is refused."""

import random

import pytest

from etude.corpus.edits.synthetic import edit
from etude.edits.formats import FORMATS, edit_answer, edit_prompt, read_edit_answer
from tests.helpers.libraries import module

PAIRS = [
    (module(3, False), module(3, True)),
    ("a\nb\n", "b\n"),
    ("a\nb\n", "a\nb\nc\n"),
    ("x\n" * 9, "x\n" * 4 + "y\n" + "x\n" * 5),
    ("a\nb\nc", "a\nB\nc"),
    ("a\r\nb\r\n", "a\r\nc\r\n"),
    ("a\n", "a\n"),
]


@pytest.mark.parametrize("way", list(FORMATS))
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_right_answer_means_the_result(way, before, after):
    assert read_edit_answer(before, edit_answer(before, after, way), way) == after


@pytest.mark.parametrize("way", ["search-replace", "udiff"])
def test_many_edits_come_back(way):
    lines = module(9, True).splitlines()
    for seed in range(60):
        rng = random.Random(seed)
        before = module(seed, False) + module(seed + 1, False)
        after = edit(before, lines, rng.randint(1, 5), rng)
        if after is not None:
            assert read_edit_answer(before, edit_answer(before, after, way), way) == after
            assert len(edit_answer(before, after, way)) < len(before) + len(after)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("search-replace", "some words"),
        ("search-replace", "<<<<<<< SEARCH\nnot there\n=======\nb\n>>>>>>> REPLACE\n"),
        ("search-replace", "<<<<<<< SEARCH\nx\n=======\nb\n>>>>>>> REPLACE\n"),  # stands twice
        ("udiff", "some words"),
        ("udiff", "@@ -9,1 +9,1 @@\n-x\n+y\n"),  # stands twice, and not at line 9
        ("udiff", "@@ -1,1 +1,1 @@\n-z\n+y\n"),
    ],
)
def test_an_answer_without_one_meaning_is_refused(way, text):
    assert read_edit_answer("x\nx\n", text, way) is None


def test_a_diff_with_wrong_line_numbers_is_laid_where_its_lines_stand():
    assert read_edit_answer("a\nb\nc\n", "@@ -7,2 +7,2 @@\n b\n-c\n+d\n", "udiff") == "a\nb\nd\n"


def test_tags_take_a_suffix_if_the_texts_hold_one():
    plain, tagged = edit_prompt("a\n", "b\n"), edit_prompt("x = '</code>'\n", "b\n")
    assert plain.opening == "<updated-code>\n"
    assert plain.content.startswith("<instruction></instruction>\n<code>\na\n</code>\n<update>\nb\n</update>\n")
    assert tagged.close.startswith("</updated-code-")
    assert f"<code{tagged.close.removeprefix('</updated-code')}" in tagged.content
    assert edit_prompt("a\n", "b\n", way="udiff").opening == "<diff>\n"
