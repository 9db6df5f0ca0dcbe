import pytest
from tiny import Counter, initials, shorten


def test_initials():
    assert initials("grace hopper") == "G.H."
    assert initials("") == ""
    assert initials("a b c", "") == "ABC"


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("abc", 3, "abc"), ("abcdef", 5, "ab..."), ("abcdef", 2, "..."), ("", 0, "")],
)
def test_shorten(text, width, expected):
    assert shorten(text, width) == expected


def test_counter():
    counter = Counter()
    assert counter.add("a B b") == {"a": 1, "b": 2}
    assert counter.add("A") == {"a": 2, "b": 2}
    assert counter.add("") == {"a": 2, "b": 2}
