import pytest
from tiny import chunk, clamp, count_if, flatten


@pytest.mark.parametrize(
    ("items", "size", "expected"),
    [([], 2, []), ([1, 2, 3, 4], 2, [[1, 2], [3, 4]]), ([1, 2, 3], 2, [[1, 2], [3]]), ([1, 2], 0, []), ([1], 1, [[1]])],
)
def test_chunk(items, size, expected):
    assert chunk(items, size) == expected


def test_chunk_default():
    assert chunk([1, 2]) == [[1], [2]]


@pytest.mark.parametrize(
    ("items", "depth", "expected"),
    [([], 1, []), ([1, [2]], 1, [1, 2]), ([1, [2, [3]]], 2, [1, 2, 3]), ([[1]], 0, [[1]])],
)
def test_flatten(items, depth, expected):
    assert flatten(items, depth) == expected


@pytest.mark.parametrize(("number", "expected"), [(-1, 0), (0, 0), (3, 3), (5, 5), (9, 5)])
def test_clamp(number, expected):
    assert clamp(number, 0, 5) == expected


def test_count_if():
    assert count_if([], bool) == 0
    assert count_if([0, 1, 2], bool) == 2
    assert count_if(["a", ""], lambda s: not s) == 1
