"""Whether the text that a task took away can be copied from somewhere else in the tree the agent sees."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

SHINGLE = 8  # tokens; shorter runs are common phrases of the language
_MAX_BYTES = 1 << 20
_WORD = re.compile(r"\w+|[^\w\s]")  # also splits what is not Python: documentation quotes code


def shingles(text: str) -> Counter[tuple[str, ...]]:
    """Every run of SHINGLE consecutive tokens, counted."""
    words = _WORD.findall(text)
    return Counter(tuple(words[i : i + SHINGLE]) for i in range(max(0, len(words) - SHINGLE + 1)))


class LeakIndex:
    """The shingles of a tree, so that each task is checked against all of it at once."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self._counts: Counter[tuple[str, ...]] = Counter()
        for file in files:
            data = (root / file).read_bytes()
            if len(data) <= _MAX_BYTES and b"\0" not in data:
                self._counts.update(shingles(data.decode(errors="replace")))

    def share(self, original: str, broken: str) -> float:
        """Share of the shingles lost between two texts of a body that the rest of the tree still holds; 0..1.

        Bodies, not functions: what docstrings end with is alike in a whole library.
        """
        mine = shingles(original)
        lost = mine - shingles(broken)
        if not lost:
            return 0.0
        return sum(self._counts[shingle] > mine[shingle] for shingle in lost) / len(lost)
