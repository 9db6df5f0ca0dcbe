"""The benchmark of `search`: its questions are honest, and its baselines are what they are called."""

from __future__ import annotations

import ast

from benchmarks.experiments import search

from etude.harness.chunks import chunk
from etude.harness.ranking import Lexical


def test_what_a_question_was_made_from_is_not_searched() -> None:
    """jinja2: no chunk holds a question, each answer is there, and `search` beats both baselines by a tenth."""
    searched, questions = search.load("jinja2", 60, 1)
    asked = questions["docstring"]
    assert len(asked) == 60
    text = " ".join(" ".join(c.text.split()) for c in searched)
    places = {(c.path, c.name) for c in searched}
    for question in asked:
        assert question.text not in text
        assert question.answers <= places
    ours, bm25, grep = (search.recall(asked, searched, s) for s in (Lexical(), search.Bm25(search.plain), search.grep))
    assert ours > max(bm25, grep) + 0.1


def test_docstrings_are_cut_and_lines_keep_their_places() -> None:
    text = '"""M."""\nclass C:\n    """D.\n\n    E."""\n    def f(self):\n        "G."\n        return "kept"\n'
    cut = search.without_docstrings(text, ast.parse(text))
    assert cut.split("\n") == ["", "class C:", "", "", "", "    def f(self):", "", '        return "kept"', ""]


def test_questions_do_not_name_their_function() -> None:
    body = ast.parse(
        'def join(a):\n    """Join all of the given strings together. More."""\n'
        'def glue(a):\n    """Join all of the given strings together. More."""\n'
        'def short(a):\n    """Too few."""\n'
    ).body
    assert [search.sentence(node) for _, node in search.functions(body, "")] == [
        "", "Join all of the given strings together.", "",
    ]  # fmt: skip
    tests = ast.parse(
        "def test_ends_of_open_paths():\n    x = walk(1)\n"
        "def test_walk_ends_of_paths():\n    x = walk(1)\n"
        "def test_two_calls_at_once():\n    walk(jump(1))\n"
    )
    defined = {"walk": {("a.py", "walk")}, "jump": {("a.py", "jump")}}
    (question,) = search.of_tests(tests, defined)
    assert (question.text, question.answers) == ("ends of open paths", {("a.py", "walk")})


def test_plain_bm25_is_the_formula() -> None:
    """Two chunks of 4 and 2 words besides the path: idf of a word in one of two is ln(1 + 1.5 / 1.5) = ln 2."""
    found = [chunk("a", 1, 1, "", "red red blue green"), chunk("a", 2, 2, "", "blue grey")]
    scores = search.Bm25(search.plain)("red", found)
    assert scores[1] == 0
    assert abs(scores[0] - 0.6931471805599453 * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 5 / 4))) < 1e-12
    assert list(search.grep("red of blue", found)) == [2.0, 1.0]
