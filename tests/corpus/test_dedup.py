from __future__ import annotations

import random

import numpy as np
import pytest

from etude.code.shingles import shingle_codes, text_shingles, token_runs
from etude.corpus.dedup import bands_of, contamination, exact, near, signature

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


def test_equal_rows_of_signatures_estimate_the_jaccard_similarity() -> None:
    """Against the similarity itself, over 400 pairs of all degrees: the estimates of 64 rows have its mean and its
    binomial spread. Tolerances: four standard errors of the mean, and a spread within 15 % (400 pairs give 3.5 %)."""
    rng, scores = random.Random(5), list[float]()
    for _ in range(400):
        words = [f"w{rng.randrange(10**6)}" for _ in range(200)]
        other = [word if rng.random() > rng.random() / 4 else f"v{rng.randrange(10**6)}" for word in words]
        one, two = (" ".join(text) for text in (words, other))
        first, second = (set(text_shingles(text, 5)) for text in (one, two))
        jaccard = len(first & second) / len(first | second)
        rows = len(bands_of(one, n=5, bands=64, rows=1) & bands_of(two, n=5, bands=64, rows=1)) / 64
        if 0 < jaccard < 1:
            scores.append((rows - jaccard) / (jaccard * (1 - jaccard) / 64) ** 0.5)
    assert len(scores) > 300
    assert abs(np.mean(scores)) < 4 / len(scores) ** 0.5
    assert abs(np.std(scores) - 1) < 0.15


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


@pytest.mark.parametrize(("share", "low", "high"), [(0.5, 0.0, 0.2), (0.7, 0.4, 0.75), (0.85, 0.93, 1.0)])
def test_bands_of_documents_follow_the_curve(share, low, high):
    """1 - (1 - s^8)^14 at Jaccard similarities .5, .7, .85: .05, .57, .99."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(150):
        size = 1000
        common = round(2 * size * share / (1 + share))
        codes = rng.integers(1, 1 << 63, 2 * size - common, dtype=np.uint64)
        first, second = (signature(part, 14, 8) for part in (codes[:size], codes[size - common :]))
        assert len({*codes[:size]} & {*codes[size - common :]}) == common
        hits += bool((first == second).all(axis=1).any())
    assert low <= hits / 150 <= high


def test_codes_of_runs_are_equal_for_equal_runs_alone():
    text = "a b c d a b c e a b d c"
    runs = [*token_runs(text.split(), 3)]
    codes = shingle_codes(text, 3).tolist()
    assert len(codes) == len(runs)
    assert all((codes[i] == codes[j]) == (runs[i] == runs[j]) for i in range(10) for j in range(10))
    assert shingle_codes("a b", 3).size == 0
    assert shingle_codes("wörter, in jedem Prozess", 2).tolist()[0] == shingle_codes("wörter ,", 2).tolist()[0]
