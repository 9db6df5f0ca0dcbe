"""The ranking of chunks for a question: by words and structure, or by vectors of a model if there is one.

A scorer is any callable from a question and chunks to a score of each. The default needs no model: BM25 over fields
(Robertson, Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", section 3.6: frequencies are weighted
sums over fields, before saturation), whose words are the parts of identifiers. One field holds the names of functions
that mention the chunk's own name. `docs/results.md` compares it with plain BM25 and grep.
"""

import math
import re
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from etude.harness.chunks import CodeChunk, chunks

Scorer = Callable[[str, Sequence[CodeChunk]], Sequence[float]]
Embed = Callable[[Sequence[str]], np.ndarray]  # texts -> float [texts, D]; the first text of a search is the question

RESULTS = 10
SHOWN = 8  # lines of a result
KEPT = 100_000  # chunks whose words or vectors are remembered
INDICES = 8  # trees that are remembered
K1, B = 1.2, 0.6
WEIGHTS = {"name": 6.0, "parameters": 1.0, "path": 1.0, "callers": 0.8, "body": 1.0}

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_A-Za-z]+")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_HEADER = re.compile(r"(?:async\s+)?def\s+\w+\s*\((.*?)\)\s*(?:->[^\n]*)?:", re.DOTALL)
_ENDINGS = (
    ("ization", "iz"), ("ations", "at"), ("ation", "at"), ("ments", "ment"), ("ings", ""), ("ions", ""), ("ies", "y"),
    ("sses", "ss"), ("ing", ""), ("ers", ""), ("ors", ""), ("ion", ""), ("ed", ""), ("er", ""), ("or", ""), ("es", ""),
    ("ly", ""), ("ss", "ss"), ("us", "us"), ("is", "is"), ("s", ""),
)  # fmt: skip


def words(text: str) -> list[str]:
    """The words of code or prose, in order: parts of identifiers, in lower case, without inflection."""
    return [stem(part.lower()) for part in _PARTS.findall(text)]


def stem(word: str) -> str:
    """The word without an English ending, as far as four letters are left: `parsing`, `parsed`, `parser` meet."""
    for ending, instead in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: len(word) - len(ending)] + instead
            break
    return word[:-1] if len(word) > 4 and word.endswith("e") else word


_STOP = frozenset(
    words(
        "a an and are as at be been but by can do does for from given has have how i if in into is it its not of on or "
        "return returns so such that the their then there these this to used using was we what when where which will "
        "with you def self cls none true false import class"
    )
)


@dataclass(frozen=True)
class _Words:
    """The words of one chunk."""

    fields: dict[str, Counter[str]]
    mentions: frozenset[str]  # identifiers
    name: str  # the last part of the chunk's name


class Lexical:
    """The default scorer; threads may share it. Chunks are known by their content, so a search after an edit reads only
    the edited chunks, and episodes of a repository read the rest once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: OrderedDict[bytes, _Words] = OrderedDict()
        self._indices: OrderedDict[tuple[bytes, ...], _Postings] = OrderedDict()

    def __call__(self, question: str, chunks: Sequence[CodeChunk]) -> Sequence[float]:
        keys = tuple(chunk.key for chunk in chunks)
        with self._lock:
            if keys not in self._indices:
                for chunk in chunks:
                    if chunk.key not in self._read:
                        self._read[chunk.key] = _words(chunk)
                self._indices[keys] = _Postings([self._read[key] for key in keys])
                while len(self._read) > KEPT:
                    self._read.popitem(last=False)
            self._indices.move_to_end(keys)
            if len(self._indices) > INDICES:
                self._indices.popitem(last=False)
            return self._indices[keys].scores(question).tolist()


def _words(chunk: CodeChunk) -> _Words:
    header = _HEADER.search(chunk.text)
    fields = {
        "name": Counter(words(chunk.name)),
        "parameters": Counter(words(header.group(1)) if header else ()),
        "path": Counter(words(chunk.path.removesuffix(".py"))),
        "body": Counter(words(chunk.text)),
    }
    return _Words(fields, frozenset(_IDENTIFIER.findall(chunk.text)), chunk.name.rpartition(".")[2])


class _Postings:
    """Postings of a set of chunks."""

    def __init__(self, read: Sequence[_Words]) -> None:
        self._count = len(read)
        every = [one.fields | {"callers": callers} for one, callers in zip(read, _callers(read), strict=True)]
        mean = {name: max(1.0, sum(fields[name].total() for fields in every) / max(1, len(every))) for name in WEIGHTS}
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, fields in enumerate(every):
            frequency: dict[str, float] = defaultdict(float)
            for name, weight in WEIGHTS.items():
                scale = weight / (1 - B + B * fields[name].total() / mean[name])
                for word, count in fields[name].items():
                    frequency[word] += scale * count
            for word, value in frequency.items():
                self._postings[word].append((number, value))

    def scores(self, question: str) -> np.ndarray:
        """Float [chunks]."""
        total = np.zeros(self._count)
        query = Counter(words(question))
        content = {word: n for word, n in query.items() if word not in _STOP} or query
        for word, count in content.items():
            postings = self._postings.get(word, ())
            idf = math.log(1 + (self._count - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, value in postings:
                total[number] += count * idf * value * (K1 + 1) / (value + K1)
        return total


def _callers(read: Sequence[_Words]) -> list[Counter[str]]:
    """For each chunk the words in the names of the chunks that mention its name, unless many chunks have that name."""
    defined: dict[str, list[int]] = defaultdict(list)
    for number, one in enumerate(read):
        if len(one.name) > 3:
            defined[one.name].append(number)
    names: list[Counter[str]] = [Counter() for _ in read]
    for number, one in enumerate(read):
        for name in one.mentions & defined.keys():
            if name != one.name and len(defined[name]) <= 3:
                for target in defined[name]:
                    names[target].update(read[number].fields["name"])
    return names


def cosine(embed: Embed) -> Scorer:
    """A scorer by an embedding model: exact cosine similarity, and each chunk embedded once."""
    vectors: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def score(question: str, chunks: Sequence[CodeChunk]) -> Sequence[float]:
        new = [chunk for chunk in chunks if chunk.key not in vectors]
        texts = [question, *(f"{chunk.path} {chunk.name}\n{chunk.text}" for chunk in new)]
        rows = np.asarray(embed(texts), np.float64)
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        vectors.update((chunk.key, row) for chunk, row in zip(new, rows[1:], strict=True))
        scores = [float(vectors[chunk.key] @ rows[0]) for chunk in chunks]
        while len(vectors) > KEPT:
            vectors.popitem(last=False)
        return scores

    return score


def best(question: str, chunks: Sequence[CodeChunk], scorer: Scorer, limit: int) -> list[tuple[CodeChunk, float]]:
    """The `limit` best chunks with their scores, those of score 0 left out; ties by path and line."""
    scored = [(c, float(s)) for c, s in zip(chunks, scorer(question, chunks), strict=True) if s > 0]
    return sorted(scored, key=lambda pair: (-pair[1], pair[0].path, pair[0].first))[:limit]


def search(question: str, files: Sequence[tuple[str, str]], scorer: Scorer) -> str:
    """The best chunks of these files (path, text) as the model reads them; "" if none is related to the question."""
    places: list[str] = []
    every = [chunk for path, text in files for chunk in chunks(path, text)]
    for chunk, score in best(question, every, scorer, RESULTS):
        lines = [line for line in chunk.text.split("\n") if line.strip()]
        shown = lines if len(lines) <= SHOWN else [*lines[:SHOWN], "..."]
        name = f" {chunk.name}" if chunk.name else ""
        head = f"{chunk.path}:{chunk.first}-{chunk.last}{name} (score {score:.2f})"
        places.append("\n".join([head, *shown]))
    return "\n\n".join(places)
