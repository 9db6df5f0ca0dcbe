"""Finds the places of a tree that hold a removed answer: files, bytecode, archives or git objects.

An answer is recognised by its rare parts: shingles, which are short runs of tokens, and long text constants.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import io
import json
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.code import clone_of_directory, is_git_directory, token_runs
from etude.errors import UserError

SHINGLE = 8  # tokens
MIN_CONSTANT = 8  # characters; shorter text constants are no evidence of an answer
LEAK_SHARE = 0.5  # of an answer's shingles that one place must hold
MAX_FILE = 64 << 20

_TOKEN = re.compile(r"[A-Za-z_]\w*|\d+(?:\.\d+)?|\"[^\"\n]*\"|'[^'\n]*'|[^\s\w]")
_INLINE_MAP = re.compile(rb"sourceMappingURL=data:application/json[^,\s]*;base64,([A-Za-z0-9+/=]+)")
_CONSTANT = re.compile(r"\"([^\"\n]*)\"|'([^'\n]*)'")


@dataclass(frozen=True)
class AnswerFingerprint:
    """The parts of an answer to search for: token sequences, and text constants (which survive compilation)."""

    shingles: frozenset[tuple[str, ...]]
    constants: frozenset[bytes]

    def in_data(self, data: bytes) -> bool:
        """Whether data holds the answer: source text of any encoding near UTF-8, or a format with text constants, such
        as bytecode."""
        if any(constant in data for constant in self.constants):
            return True
        if not self.shingles or b"\0" in data[:4096]:
            return False
        held = self.shingles.intersection(answer_runs(data.decode("utf-8", "replace")))
        return len(held) >= LEAK_SHARE * len(self.shingles)


def answer_fingerprint(solution: str, broken: str) -> AnswerFingerprint:
    """The parts of `solution` that `broken`, the text that the agent sees, does not hold."""
    tokens, counts, texts = _read(solution)
    others = _TOKEN.findall(broken)
    same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), len(tokens))
    rest = min(len(tokens), len(others)) - same
    tail = next((i for i in range(rest) if tokens[-1 - i] != others[-1 - i]), rest)
    first = max(0, same - SHINGLE + 1)  # start of the first run that holds a token between `same` and the tail
    own = Counter(token_runs(tokens[first : len(tokens) - tail + SHINGLE - 1], SHINGLE))
    new = set(token_runs(others[first : len(others) - tail + SHINGLE - 1], SHINGLE))
    lost = frozenset(run for run, count in own.items() if count == counts[run] and run not in new)
    return AnswerFingerprint(lost, frozenset(texts - _constants(broken)))


@functools.lru_cache(maxsize=8)
def _read(text: str) -> tuple[list[str], Counter[tuple[str, ...]], frozenset[bytes]]:
    """Tokens, runs and constants of a text; cached, since many tasks break the same text."""
    tokens = _TOKEN.findall(text)
    return tokens, Counter(token_runs(tokens, SHINGLE)), frozenset(_constants(text))


def answer_runs(text: str) -> Iterator[tuple[str, ...]]:
    """Every run of SHINGLE tokens in a text, in order."""
    return token_runs(_TOKEN.findall(text), SHINGLE)


def held_runs(wanted: frozenset[tuple[str, ...]], text: str) -> frozenset[tuple[str, ...]]:
    """The runs among `wanted` that a text holds."""
    tokens, firsts = _TOKEN.findall(text), {run[0] for run in wanted}
    runs = (tuple(tokens[i : i + SHINGLE]) for i, token in enumerate(tokens) if token in firsts)
    return wanted.intersection(runs)


def _constants(text: str) -> set[bytes]:
    constants = (double or single for double, single in _CONSTANT.findall(text))
    return {constant.encode() for constant in constants if len(constant) >= MIN_CONSTANT}


def scan(root: Path, wanted: AnswerFingerprint) -> Iterator[str]:
    """Places below `root` that hold the answer: `path`, `archive!member`, or `repository: object ID`."""
    yield from (place for place, data in folder_texts(root) if wanted.in_data(data))


def folder_texts(root: Path) -> Iterator[tuple[str, bytes]]:
    """All data below `root` that could hold an answer, by its place: files, members of archives, git objects. Raises
    UserError for a git directory that cannot be read."""
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            continue
        if path.is_dir():
            if is_git_directory(path):
                yield from ((f"{name}: object {object_id}", data) for object_id, data in _objects(name, path))
        elif path.is_file() and path.stat().st_size <= MAX_FILE:
            yield from file_texts(name, path.read_bytes())


def file_texts(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """The content of a file, then that of the archive or the source map that it is, by place."""
    yield name, data
    yield from ((f"{name}!{member}", content) for member, content in (*_members(data), *_mapped(data)))


def _objects(name: str, folder: Path) -> Iterable[tuple[str, bytes]]:
    try:
        return clone_of_directory(folder).every_object()
    except UserError as e:
        raise UserError(
            f"{name} is a git directory that cannot be searched for answers; leave it out with `--exclude {name}` ({e})"
        ) from None


def _members(data: bytes) -> Iterable[tuple[str, bytes]]:
    """Regular files of a zip or tar archive, or the content of a gzip or zlib stream."""
    try:
        if data[:2] == b"PK":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return [(i.filename, archive.read(i)) for i in archive.infolist() if i.file_size <= MAX_FILE]
        if data[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7") or data[257:262] == b"ustar":
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                members = (m for m in archive if m.isreg() and m.size <= MAX_FILE)
                return [(m.name, file.read()) for m in members if (file := archive.extractfile(m)) is not None]
        if data[:1] == b"\x78":
            return [("stream", zlib.decompressobj().decompress(data, MAX_FILE))]
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, tarfile.TarError, zlib.error):
        return []  # not an archive, or a broken one
    return []


def _mapped(data: bytes) -> Iterable[tuple[str, bytes]]:
    """The sources in a source map, which is a file or the end of a script; JSON escapes hide them from a search."""
    if b'"sourcesContent"' in data[:MAX_FILE] and data.lstrip()[:1] == b"{":
        maps = [data]
    else:
        maps = []
        for inline in _INLINE_MAP.finditer(data):
            with contextlib.suppress(binascii.Error):
                maps.append(base64.b64decode(inline[1], validate=True))
    for text in maps:
        try:
            held = json.loads(text)
            contents = held["sourcesContent"] if isinstance(held, dict) else ()
            yield from (
                (str(i), c.encode("utf-8", "surrogatepass")) for i, c in enumerate(contents) if isinstance(c, str)
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
