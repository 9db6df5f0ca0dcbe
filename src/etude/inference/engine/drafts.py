"""Drafts: tokens that may come next, copied from the sources of a request (the merged file, the original, the sketch)
or from a sequence's own text.

A `Drafter` follows one sequence. It holds a pointer into one source and moves it along with the emitted tokens. After a
divergence it looks for the longest run of recent tokens in every source. It learns how often a source is right after a
match of each length, also from drafts that were proposed and not fed. Nothing here can change the sampled tokens.

The sequence's own text is scanned, not indexed by a suffix automaton: docs/decisions/0007-speculative-edits.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numba
import numpy as np

MATCHES = (2, 3, 6, 12, 24, 96)  # match lengths that are distinguished
START, GUESS = len(MATCHES), len(MATCHES) + 1  # at a source's first token; after one replaced token
_TAIL = MATCHES[-1]
_NEAR = 64  # two equal tokens count as a match only up to this distance ahead of the sequence's last place
_GUESSED = 4  # tokens drafted on a guess
OWN = "own"  # the name of the sequence's own text as a source

# Initial hit rates by match length, with the weight of `_PRIOR` tokens.
_FIRST = np.array([0.6, 0.75, 0.88, 0.94, 0.97, 0.99, 0.95, 0.5])
_PRIOR = 4.0
_REMEMBERED = 2000.0  # the engine's rates fade over this many tokens
_SEQUENCE_REMEMBERED = 400.0


@dataclass(frozen=True)
class DraftSource:
    """Tokens that the answer may repeat. `name` labels figures: "merge", "prediction", "sketch"."""

    name: str
    ids: np.ndarray  # int32 [tokens]


def encode_after(encode: Callable[[str], list[int]], left: str, text: str) -> np.ndarray:
    """Ids of `text`, int32 [tokens], as encoded behind `left`: the first token may depend on it."""
    head, whole = encode(left), encode(left + text)
    ids = whole[len(head) :] if whole[: len(head)] == head else encode(text)
    return np.array(ids, dtype=np.int32)


class Rates:
    """Hits and misses of drafted tokens by match length; old ones fade."""

    def __init__(self, remembered: float) -> None:
        self._remembered = remembered
        self.hits = np.zeros(len(_FIRST))
        self.tries = np.zeros(len(_FIRST))

    def note(self, kind: int, hits: int, missed: bool) -> None:
        """Record that a draft of this kind was right for `hits` tokens, and wrong after them if `missed`."""
        self.hits[kind] += hits
        self.tries[kind] += hits + missed
        if self.tries[kind] > self._remembered:
            fade = self._remembered / self.tries[kind]
            self.hits[kind] *= fade
            self.tries[kind] *= fade

    def rate(self, kind: int, prior: float) -> float:
        """Share of right tokens, with `prior` as the initial value."""
        return float((self.hits[kind] + _PRIOR * prior) / (self.tries[kind] + _PRIOR))


class SharedRates:
    """Rates over all sequences of an engine, by the name of a source: the priors of a new sequence."""

    def __init__(self) -> None:
        self._rates: dict[str, Rates] = {}

    def rates(self, name: str) -> Rates:
        """The rates of all sources with this name."""
        return self._rates.setdefault(name, Rates(_REMEMBERED))


@dataclass(frozen=True)
class Proposal:
    """Tokens that may come next, and the chance of each, provided that those before it are right."""

    ids: np.ndarray  # int32, possibly empty
    rate: float


_NOTHING = Proposal(np.empty(0, np.int32), 0.0)


class Drafter:
    """The drafts of one sequence. `history_T` in the calls are the sequence's tokens so far, prompt and output."""

    def __init__(self, sources: Sequence[DraftSource], prompt_length: int, shared: SharedRates) -> None:
        self._sources = [source for source in sources if len(source.ids)]
        self._names = [*(source.name for source in self._sources), OWN]
        self._shared = [shared.rates(name) for name in self._names]
        self._rates = [Rates(_SEQUENCE_REMEMBERED) for _ in self._names]
        self._homes = [0] * len(self._sources)  # the sequence's present or last place in each source
        self._seen = prompt_length
        self._fed = 0  # tokens of the last proposal that were fed
        self._source, self._at, self._kind, self._length = 0, 0, START, 0
        self._lost = not self._sources  # no source is followed
        self._drafted = [np.zeros(len(source.ids), bool) for source in self._sources]
        self._accepted = [np.zeros(len(source.ids), bool) for source in self._sources]

    def propose(self, history_T: np.ndarray, limit: int) -> Proposal:
        """At most `limit` tokens that may follow `history_T`."""
        self.follow(history_T)
        self._fed = 0
        if self._lost:
            self._find(history_T)
        if self._lost:
            return _NOTHING
        text = self._text(history_T)
        limit = min(limit, _GUESSED) if self._kind == GUESS else limit
        ids = text[self._at : self._at + limit]
        shared = self._shared[self._source].rate(self._kind, _FIRST[self._kind])
        return Proposal(ids, self._rates[self._source].rate(self._kind, shared))

    def fed(self, count: int) -> None:
        """Record that the first `count` tokens of the last proposal are in the coming pass."""
        self._fed = count
        if self._source < len(self._sources):
            self._drafted[self._source][self._at : self._at + count] = True

    def follow(self, history_T: np.ndarray) -> None:
        """Record the tokens emitted since the last call."""
        new = history_T[self._seen :]
        if not len(new):
            return
        self._seen = len(history_T)
        if self._lost:
            return
        text = self._text(history_T)
        ahead = text[self._at : self._at + len(new)]
        same = _common(ahead, new)
        for rates in (self._shared[self._source], self._rates[self._source]):
            rates.note(self._kind, same, missed=same < len(ahead))
        if self._source < len(self._sources):
            hit = min(same, self._fed)
            self._accepted[self._source][self._at : self._at + hit] = True
            self._homes[self._source] = self._at + same
        self._fed = 0
        if same == len(new) and self._at + same < len(text):
            self._at += same
            self._length += same
            if self._kind < START or self._length >= MATCHES[0]:
                self._kind = _kind(self._length)
            return
        replaced = self._kind != GUESS and same + 1 == len(new) and self._at + len(new) < len(text)
        was, at = self._source, self._at + len(new)
        self._lost = True
        self._find(history_T)
        if self._lost and replaced and was < len(self._sources):
            self._lost, self._source, self._at, self._kind, self._length = False, was, at, GUESS, 0

    def counts(self) -> tuple[int, int]:
        """Numbers of drafted tokens from the request's sources that were emitted, and that were never emitted."""
        accepted = sum(int(a.sum()) for a in self._accepted)
        rejected = sum(int((d & ~a).sum()) for d, a in zip(self._drafted, self._accepted, strict=True))
        return accepted, rejected

    def _text(self, history_T: np.ndarray) -> np.ndarray:
        return self._sources[self._source].ids if self._source < len(self._sources) else history_T

    def _find(self, history_T: np.ndarray) -> None:
        """The longest run of recent tokens in any source; ties go to the first source, then to the place nearest its
        home."""
        tail = history_T[-_TAIL:]
        best = 0
        for index, source in enumerate(self._sources):
            length, at = longest_match(source.ids, tail, self._homes[index], _NEAR)
            if length > best:
                best, self._source, self._at = length, index, at
        if best < MATCHES[-1]:
            length, at = longest_match(history_T, tail, len(history_T), 0)
            if length > best:
                best, self._source, self._at = length, len(self._sources), at
        if best:
            self._lost, self._length, self._kind = False, best, _kind(best)
            if self._source < len(self._sources) and best >= MATCHES[2]:
                self._homes[self._source] = self._at


def _kind(length: int) -> int:
    """Index of the largest length in `MATCHES` that `length` reaches."""
    return max(sum(length >= step for step in MATCHES) - 1, 0)


@numba.njit(nogil=True, cache=True)
def _common(a, b):  # type: ignore[no-untyped-def]
    n = min(len(a), len(b))
    for i in range(n):
        if a[i] != b[i]:
            return i
    return n


@numba.njit(nogil=True, cache=True)
def longest_match(text, tail, home, near):  # type: ignore[no-untyped-def]
    """The longest suffix of `tail` that `text` contains with a token after it: its length in `MATCHES`, or 0, and the
    place of the token after it. Ties go to the nearest place at or after `home`, else to the last before it. Two tokens
    count only if they end within `near` tokens after `home`."""
    best, where = 0, -1
    last = tail[len(tail) - 1]
    for end in range(1, len(text)):
        if text[end - 1] != last:
            continue
        n = 1
        while n < len(tail) and n < end and text[end - 1 - n] == tail[len(tail) - 1 - n]:
            n += 1
        length = 0
        for step in MATCHES:
            if n >= step:
                length = step
        if length == MATCHES[0] and not home <= end < home + near:
            continue
        if length > best or (length == best and length > 0 and where < home):
            best, where = length, end
    return best, where
