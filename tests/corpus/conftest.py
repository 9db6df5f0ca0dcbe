"""A tiny corpus shared by the tests of this folder."""

from __future__ import annotations

import pytest
from models.make_nano import tokenizer as bpe
from tokenizers import Tokenizer

from etude.corpus.filters import FunctionText, function_texts
from etude.corpus.sources import File
from tests.helpers.libraries import clone, releases

__all__ = ["clone", "releases"]

SOURCE = '''\
"""A module."""
import math


def chunk(array, size=1):
    """Split a list.

    Long explanation.
    """
    if size < 1:
        return []
    count = int(math.ceil(len(array) / size))
    return [array[i * size : (i + 1) * size] for i in range(count)]


def clamp(x, lower, upper=None):
    if upper is None:
        upper, lower = lower, 0
    if x < lower:
        x = lower
    elif x > upper:
        x = upper
    return x


def count_by(items, key):
    result = {}
    for item in items:
        group = key(item)
        if group not in result:
            result[group] = 0
        result[group] += 1
    return result


class Box:
    def first(self, items, default=None):
        for item in items:
            if item is not None and not isinstance(item, str):
                break
        else:
            item = default
        return item


def drop_while(items, predicate, strict=True):
    dropping = True
    kept = []
    for index, item in enumerate(items):
        if dropping and predicate(item):
            if not strict:
                continue
            else:
                dropping = False
        kept.append(item)
    return kept[1:] if strict else list(kept)
'''


@pytest.fixture(scope="session")
def corpus() -> list[FunctionText]:
    return list(function_texts(File("demo", "demo/lists.py", SOURCE)))


@pytest.fixture(scope="session")
def tokenizer(corpus: list[FunctionText]) -> Tokenizer:
    return bpe.train([f.source for f in corpus] * 3, 320)
