import pytest

import lib
from lib import core


@pytest.mark.parametrize(
    "items,size,expected", [([1, 2, 3], 2, [[1, 2], [3]]), ([1], 1, [[1]]), (["velvet-anchor-2207"], 4, [["velvet-anchor-2207"]])]
)
def test_chunk(items, size, expected):
    assert lib.chunk(items, size) == expected


def test_label():
    assert core.label(3) == "3-th"


@pytest.fixture
def five():
    return [1, 2, 3, 4, 5]


def test_rest(five):
    assert lib.chunk(five, 2) == [[1, 2], [3, 4], [5]]
