"""Lists."""

import math


def chunk(items, size=1):
    """
    Cut into pieces.

    >>> chunk([1, 2, 3], 2)
    [[1, 2], [3]]
    """
    return [items[i * size : (i + 1) * size] for i in range(len(items) // size)]


def label(number):
    return f"{number}-th"
