"""Shingles: the runs of n consecutive tokens in a text, by which copies and near copies are found (Broder 1997)."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

WORD = re.compile(r"\w+|[^\w\s]")
"""A token of any language: a word, or a character that is neither word nor whitespace."""

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no token's code is lost in the products
_KNOWN = 1 << 18  # words whose codes are remembered


def words_of(text: str) -> list[str]:
    """The tokens of a text."""
    return WORD.findall(text)


def token_runs(tokens: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    """Every run of `n` consecutive tokens, in order."""
    return (tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def text_shingles(text: str, n: int) -> Counter[tuple[str, ...]]:
    """Every run of `n` consecutive tokens of a text, counted."""
    return Counter(token_runs(words_of(text), n))


class _WordCodes(dict[str, int]):
    def __missing__(self, word: str) -> int:
        if len(self) >= _KNOWN:
            self.clear()
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        code = self[word] = int.from_bytes(digest, "little")
        return code


_codes = _WordCodes()


def word_codes(words: Iterable[str]) -> np.ndarray:
    """A 64-bit code of each word, the same in every process."""
    return np.fromiter(map(_codes.__getitem__, words), dtype=np.uint64)


def run_codes(codes: np.ndarray | Sequence[np.ndarray], n: int) -> np.ndarray:
    """A 64-bit code of each run of `n` tokens, in order: a polynomial of the tokens' codes modulo 2**64, mixed
    (SplitMix64). Instead of one array of codes, `n` arrays may be given: of the first to the last tokens of all
    runs."""
    length = len(codes) - n + 1 if isinstance(codes, np.ndarray) else len(codes[0])
    total: Any = np.zeros(max(0, length), dtype=np.uint64)
    for k in range(n if length > 0 else 0):
        total *= np.uint64(_FACTOR)
        total += codes[k : k + length] if isinstance(codes, np.ndarray) else codes[k]
    total = (total ^ (total >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    total = (total ^ (total >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return total ^ (total >> np.uint64(31))


def shingle_codes(text: str, n: int) -> np.ndarray:
    """A 64-bit code of each run of `n` tokens of a text, in order."""
    return run_codes(word_codes(words_of(text)), n)
