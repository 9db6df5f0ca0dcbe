"""Tests become questions without answers; answers are compared outside."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, namedtuple

import pytest

from etude.grading.questions import Question, decoded, questions, verdict_of
from etude.sandbox.guest import answers
from tests.helpers.boxlibrary import CHUNKS, CORE, DOCTEST, OTHERS, PATH, Place

HEAD = "import math\nimport pytest\nimport lib\nfrom . import helpers\nfrom .shared import parametrize\n\nSIZE = 3\n"
ASKED = {
    "plain": "def test_a():\n    assert lib.f(1) == 5\n",
    "parameters": "@parametrize('x,expected', [(1, 5)])\ndef test_a(x, expected):\n    assert lib.f(x) == expected\n",
    "swapped": "def test_a():\n    assert 5 == lib.f(1)\n",
    "several": "def test_a():\n    y = SIZE\n    assert lib.f(y) == 5\n    assert lib.f(y) is not None\n",
    "truth": "def test_a():\n    assert not lib.f(math.pi)\n",
}
REFUSED = {
    "fixture": "def test_a(thing):\n    assert lib.f(thing) == 5\n",
    "helper": "def test_a():\n    assert lib.f(helpers.x) == 5\n",
    "loop": "def test_a():\n    for i in range(3):\n        assert lib.f(i) == 5\n",
    "raises": "def test_a():\n    with pytest.raises(ValueError):\n        lib.f(1)\n",
    "computed": "def test_a():\n    assert lib.f(1) == lib.g(2)\n",
    "method": "class TestA:\n    def test_a(self):\n        assert lib.f(1) == 5\n",
    "marked": "@pytest.mark.skip\ndef test_a():\n    assert lib.f(1) == 5\n",
    "table": "CASES = [(1, 5)]\n@parametrize('x,y', CASES)\ndef test_a(x, y):\n    assert lib.f(x) == y\n",
    "identity": "def test_a():\n    x = []\n    assert lib.f(x) is x\n",
    "unknown": "def test_a():\n    assert undefined(1) == 5\n",
}


def asked(text: str) -> list[Question]:
    return list(questions(HEAD + text, frozenset({"tests"})))


@pytest.mark.parametrize("text", ASKED.values(), ids=ASKED)
def test_what_can_be_asked(text: str) -> None:
    (question,) = asked(text)
    compile(question.source, "question", "exec")
    assert "5" not in question.source or "5" in str(question.decoys)
    assert "helpers" not in question.source
    assert "parametrize" not in question.source


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_asked(text: str) -> None:
    assert asked(text) == []


def test_expected_values_stay_outside() -> None:
    rows = "[([1, 2], [['quartz']]), ([3], {'basalt': 987654321}), ([4], 'gneiss')]"
    text = f"@parametrize('x,expected', {rows})\ndef test_a(x, expected):\n    assert lib.f(x) == expected\n"
    (question,) = asked(text)
    assert not [word for word in ("quartz", "basalt", "987654321", "gneiss") if word in question.source]
    assert [check.expected for (check,) in question.checks] == [[["quartz"]], {"basalt": 987654321}, "gneiss"]
    kinds = [type(decoy) for (decoy,) in question.decoys]
    assert kinds == [list, dict, str]
    assert verdict_of(question, 2, ["gneiss"]) == ("passed", "", False)
    assert verdict_of(question, 2, ["slate"])[0::2] == ("failed", False)
    assert verdict_of(question, 2, list(question.decoys[2])) == ("failed", "a decoy was returned", True)
    assert verdict_of(question, 2, []) == ("failed", "an answer is missing", False)
    assert verdict_of(question, 2, ["gneiss", "gneiss"])[0::2] == ("failed", True)
    assert verdict_of(question, 2, ["x" * 10_000])[:2] == ("failed", "the value is too long")
    for malformed in ({"set": [[]]}, {"dict": 3}, {"bytes": "x"}, {"a": 1, "b": 2}, {}, {"opaque": "int"}):
        assert verdict_of(question, 2, [malformed])[0::2] == ("failed", False)


class Sly(list):
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return True

    def __iter__(self):
        return iter(["a lie"])


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ([1, 2.5, "x", b"y", True], [1, 2.5, "x", b"y", True]),
        ({(1, 2): {3}, "k": frozenset({4})}, {(1, 2): {3}, "k": frozenset({4})}),
        (complex(1, 2), complex(1, 2)),
        (10**50, 10**50),
        (float("inf"), float("inf")),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (OrderedDict(a=1), {"a": 1}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (Pair(1, 2), (1, 2)),
        (Sly(["x"]), ["x"]),
        ("\udcff", "\udcff"),
    ],
)
def test_plain_values_cross(value: object, expected: object) -> None:
    """Of a subclass the content of the built-in type, not what its methods claim."""
    crossed = decoded(json.loads(json.dumps(answers.plain(value))))
    assert crossed == expected
    assert type(crossed) is type(expected)


def test_other_values_do_not_cross() -> None:
    deep: list[object] = []
    deep.append(deep)
    assert "opaque" in json.dumps(answers.plain(1 << 50_000))
    assert answers.plain(object()) == {"opaque": "builtins.object"}
    assert "opaque" in json.dumps(answers.plain(deep))


def test_most_tests_are_asked_and_the_share_is_reported(place: Place) -> None:
    report = place.test({PATH: CORE}, (*CHUNKS, *OTHERS, DOCTEST))
    assert set(report.outcomes.values()) == {"passed"}
    assert report.asked == len(CHUNKS) + 3  # not the counter, whose module is hidden, nor the fixture
    assert report.covered == pytest.approx((report.asked + report.controlled) / 9)


def test_a_huge_value_is_a_wrong_answer_and_holds_nobody_up(place: Place) -> None:
    """More than the pipe of a run takes."""
    huge = CORE.replace("return items[-1]", "return 'x' * 3_000_000")
    report = place.test({PATH: huge}, (*CHUNKS, OTHERS[1]))
    assert report.messages == {OTHERS[1]: "the value is too long"}
    assert (report.timed_out, report.crashed, report.tampered) == (False, False, False)
