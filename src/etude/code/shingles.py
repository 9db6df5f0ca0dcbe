"""Shingles: the runs of n consecutive tokens in a text, by which copies and near copies are found (Broder 1997)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

WORD = re.compile(r"\w+|[^\w\s]")
"""A token of any language: a word, or a character that is neither word nor whitespace."""


def token_runs(tokens: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    """Every run of `n` consecutive tokens, in order."""
    return (tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def text_shingles(text: str, n: int) -> Counter[tuple[str, ...]]:
    """Every run of `n` consecutive tokens of a text, counted."""
    return Counter(token_runs(WORD.findall(text), n))
