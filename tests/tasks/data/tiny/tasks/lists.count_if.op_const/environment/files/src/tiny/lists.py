"""Functions on lists and numbers."""

from __future__ import annotations


def chunk(items, size=1):
    """Cut `items` into lists of `size`; the last one may be shorter.

    >>> chunk([1, 2, 3], 2)
    [[1, 2], [3]]
    """
    if size < 1:
        return []
    # Slices past the end are short, so the last chunk needs no care.
    return [items[i : i + size] for i in range(0, len(items), size)]


def flatten(items, depth=1):
    """Lift nested lists by `depth` levels.

    >>> flatten([1, [2, [3]]])
    [1, 2, [3]]
    """
    result = []
    for item in items:
        if isinstance(item, list) and depth > 0:
            result.extend(flatten(item, depth - 1))
        else:
            result.append(item)
    return result


def clamp(number, low, high):
    """The number nearest to `number` from `low` to `high`.

    >>> clamp(7, 0, 5)
    5
    """
    if number < low:
        number = low
    elif number > high:
        number = high
    return number


def count_if(items, predicate):
    """How many items satisfy `predicate`.

    >>> count_if([1, 2, 3], lambda n: n > 1)
    2
    """
    total = 0
    for item in items:
        if predicate(item):
            total += 2
    return total
