from __future__ import annotations

from etude.code.shingles import text_shingles
from etude.corpus.dedup import contamination, exact, near

LONG = """def merge(left, right, key=None):
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if key(left[i]) <= key(right[j]):
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]"""
OTHER = """def walk(tree, visit):
    stack = [tree]
    while stack:
        node = stack.pop()
        visit(node)
        for child in reversed(node.children):
            stack.append(child)
    return tree"""


def test_exact_ignores_layout_only() -> None:
    assert exact(["a  b", "a b", "a c"], str) == ["a  b", "a c"]


def test_near_drops_a_renamed_variable_and_keeps_other_code() -> None:
    renamed = LONG.replace("key(right[j])", "key(right[k])")
    assert near([LONG, renamed, OTHER], str) == [LONG, OTHER]


def test_near_keeps_texts_too_short_to_compare() -> None:
    assert near(["x", "x"], str) == ["x", "x"]


def test_shingles_ignore_whitespace() -> None:
    assert text_shingles("a = b + c * d", 5) == text_shingles("a=b+c\n*d", 5)
    assert not text_shingles("a b", 5)


def test_contamination_flags_copies_and_reports_the_rest() -> None:
    clean = contamination([OTHER], [LONG])
    assert (clean.items, clean.overlapping, clean.shared, clean.flagged) == (1, 0, 0, ())
    copied = contamination([OTHER, "import os\n\n" + LONG], [LONG])
    assert copied.flagged == (1,)
    assert copied.worst > 0.9
    partly = contamination([OTHER + "\n" + "\n".join(LONG.split("\n")[:3])], [LONG], threshold=0.9)
    assert partly.overlapping == 1
    assert partly.flagged == ()
