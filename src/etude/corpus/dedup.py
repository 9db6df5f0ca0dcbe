"""Exact and near duplicates, and contamination by a held-out repository.

Near duplicates are found by MinHash over token shingles with banding (Broder 1997): 16 bands of 4 rows put the 50 %
detection point near a Jaccard similarity of 0.5, and pairs at 0.8 are found with probability above 0.99.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from etude.code import shingle_codes

Item = TypeVar("Item")
_TOGETHER = 1024  # shingles that are hashed at once: the products stay in the processor's cache


def exact(items: Sequence[Item], text: Callable[[Item], str]) -> list[Item]:
    """The first item of every class with equal text up to whitespace, in the given order."""
    seen: set[bytes] = set()
    kept: list[Item] = []
    for item in items:
        digest = hashlib.blake2b(" ".join(text(item).split()).encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            kept.append(item)
    return kept


def bands_of(text: str, *, n: int, bands: int, rows: int) -> set[tuple[int, bytes]]:
    """The MinHash bands of a text, by which similar texts are found; none for a text of fewer than `n` tokens."""
    made = signature(np.unique(shingle_codes(text, n)), bands, rows)
    return set() if made is None else {(band, row.tobytes()) for band, row in enumerate(made)}


def signature(shingles: np.ndarray, bands: int, rows: int) -> np.ndarray | None:
    """The MinHash signature [bands, rows] of a set of shingles' codes; None for the empty set."""
    if shingles.size == 0:
        return None
    least = np.full(bands * rows, np.iinfo(np.uint64).max, dtype=np.uint64)
    multiply, add = _hashes(bands * rows)
    for start in range(0, shingles.size, _TOGETHER):
        hashed = shingles[None, start : start + _TOGETHER] * multiply[:, None]
        hashed += add[:, None]
        np.minimum(least, hashed.min(axis=1), out=least)
    return (least >> np.uint64(32)).reshape(bands, rows)


@cache
def _hashes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors and summands of multiply-add-shift hashes, modulo 2**64 (Dietzfelbinger 1996): products must wrap, since
    an order of values that all functions keep gives all of them the same minimum."""
    multiply, add = np.random.default_rng(20).integers(0, 1 << 64, (2, count), dtype=np.uint64)
    return multiply | np.uint64(1), add


def near(
    items: Sequence[Item], text: Callable[[Item], str], *, n: int = 5, bands: int = 16, rows: int = 4
) -> list[Item]:
    """The first item of every cluster that shares a MinHash band, in the given order; `n` is the shingle length."""
    seen: set[tuple[int, bytes]] = set()
    kept: list[Item] = []
    for item in items:
        keys = bands_of(text(item), n=n, bands=bands, rows=rows)
        if not keys & seen:
            kept.append(item)
        seen |= keys
    return kept


@dataclass(frozen=True)
class Contamination:
    """The overlap of a corpus with a repository. `items` were compared, `overlapping` of them share any shingle.
    `worst` is the largest share of one item's shingles, `shared` counts distinct shared shingles over the whole corpus,
    `flagged` holds the indices of the items at or above the threshold."""

    items: int
    overlapping: int
    shared: int
    worst: float
    flagged: tuple[int, ...]


def contamination(
    corpus: Iterable[str], repository: Iterable[str], *, n: int = 12, threshold: float = 0.1
) -> Contamination:
    """Compare every corpus text with all texts of a repository by shingles of `n` tokens. An item is flagged when at
    least `threshold` of its own shingles occur anywhere in the repository. Idioms such as `if __name__ == "__main__":
    main()` are shared by unrelated projects, so a single common shingle does not flag."""
    known: set[int] = set()
    for text in repository:
        known.update(shingle_codes(text, n).tolist())
    items = overlapping = 0
    worst = 0.0
    shared: set[int] = set()
    flagged: list[int] = []
    for index, text in enumerate(corpus):
        items += 1
        own = set(shingle_codes(text, n).tolist())
        common = own & known
        if common:
            overlapping += 1
            shared |= common
            share = len(common) / len(own)
            worst = max(worst, share)
            if share >= threshold:
                flagged.append(index)
    return Contamination(items, overlapping, len(shared), worst, tuple(flagged))
