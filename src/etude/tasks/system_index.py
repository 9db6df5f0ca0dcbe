"""Indexes of what boxes have besides their task: the words in every file of a system, by which answers are found fast.

A system has tens of thousands of files, and a dataset hundreds of answers. So each file is read once: the index keeps
the words of each place, which is a file or a member of an archive, as hashes. A place can hold an answer only if it has
the answer's words; the few places that do are read again (`leaks.py`). The index of an image is kept in the user's
cache under the image's name, which has its digest; that of another folder until a file changes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import numpy as np

from etude.config import cache
from etude.grading import MAX_FILE, file_texts
from etude.sandbox import Sandbox

MIN_WORD = 4  # letters; shorter words are everywhere
WORD = re.compile(rb"[A-Za-z_]\w{%d,}" % (MIN_WORD - 1))
_FORMAT = 1  # of the files in the cache
_COMPILED = (".pyc", ".pyo", ".so", ".pyd")
_EXTENSION = re.compile(r"\.(cpython-[^/]*|abi3|pypy[^/]*)\.so$")
_NO_CODE = (  # of kinds of files that hold no source or bytecode
    *(".h", ".hh", ".hpp", ".jar", ".jmod", ".jsa", ".class", ".bc", ".sym", ".mo", ".gmo", ".qm", ".ttf", ".otf"),
    *(".pfb", ".afm", ".woff", ".woff2", ".png", ".gif", ".jpg", ".jpeg", ".webp", ".svg", ".ico", ".icns", ".xpm"),
    *(".wav", ".mp3", ".ogg", ".mp4", ".pdf", ".ps", ".eps", ".exe", ".dll", ".a", ".o", ".ko", ".pem", ".crt"),
)
_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class SystemIndex:
    """The places of one folder. `keys` are sorted: the hash of a word in the upper half, the place's number in the
    lower; `text_P` says which places hold text, and no compiled code."""

    label: str  # path in a box
    root: Path
    places: tuple[str, ...]
    text_P: _Array
    keys: _Array

    def having(self, word: bytes) -> _Array:
        """The numbers of the places that hold a word."""
        start = zlib.crc32(word) << 32
        first, last = np.searchsorted(self.keys, np.array([start, start + (1 << 32)], np.uint64))
        return (self.keys[first:last] & np.uint64(0xFFFFFFFF)).astype(np.int64)

    def shown(self, place: int) -> str:
        """The place as a path in a box."""
        return f"{self.label.rstrip('/')}/{self.places[place]}".rstrip("/")

    def contents(self, places: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """The places that are still there, in order, with their content; an archive is read once."""
        wanted = {self.places[place]: place for place in places}
        for name in sorted({place.partition("!")[0] for place in wanted}):
            data = _read(self.root / name if name else self.root)
            yield from ((wanted[place], text) for place, text in file_texts(name, data or b"") if place in wanted)


def indexes(sandbox: Sandbox) -> list[SystemIndex]:
    """The indexes of all that boxes have besides their task."""
    return [_index(label, folder, sandbox.image_name) for label, folder in sandbox.system_folders().items()]


@functools.lru_cache(maxsize=64)
def _index(label: str, root: Path, image: str) -> SystemIndex:
    """An index, from the cache if it is there. Folders of the system do not change while a process runs."""
    state = image if label == "/" else _state(root)
    folder = cache() / "systems" / blake3.blake3(f"{_FORMAT}\0{image}\0{label}\0{root}".encode()).hexdigest()[:32]
    if (known := _load(label, root, folder, state)) is not None:
        return known
    made = index_of(label, root)
    _save(made, folder, state)
    return made


def index_of(label: str, root: Path) -> SystemIndex:
    """The index of a folder or file, made anew."""
    places, text, keys = [], [], []
    for place, data in texts(root):
        is_text = b"\0" not in data[:4096] and not place.endswith(_COMPILED)
        words = set(WORD.findall(data))
        if not is_text:  # a name there may be followed by a byte that says what comes next
            words |= {word[:-1] for word in words if len(word) > MIN_WORD}
        hashes = np.fromiter(map(zlib.crc32, words), np.uint64, len(words))
        keys.append(np.unique(hashes) << np.uint64(32) | np.uint64(len(places)))
        places.append(place)
        text.append(is_text)
    joined = np.concatenate(keys) if keys else np.empty(0, np.uint64)
    joined.sort()
    return SystemIndex(label, root, tuple(places), np.array(text, bool), joined)


def texts(root: Path) -> Iterator[tuple[str, bytes]]:
    """(place, content) of the files below `root`, and of the members of archives. Left out are the machine's code,
    unless it is a module of Python, other kinds of files that hold no source, bytecode beside its source, and files
    that this user cannot read."""
    for name, path in _files(root):
        data = _read(Path(path))
        if data is not None:
            yield from file_texts(name, data)


def _files(root: Path) -> Iterator[tuple[str, str]]:
    """(path below `root`, path) of all files that may hold code; ("", path) if `root` is a file."""
    if root.is_file():
        yield "", str(root)
    start = len(str(root)) + 1
    for folder, folders, files in os.walk(root):
        folders.sort()
        sources = {*os.listdir(os.path.dirname(folder))} if os.path.basename(folder) == "__pycache__" else set[str]()
        for name in sorted(files):
            if not name.endswith(_NO_CODE) and f"{name.partition('.')[0]}.py" not in sources:
                path = f"{folder}/{name}"
                yield os.fsencode(path[start:]).decode("utf-8", "replace"), path


def _read(path: Path) -> bytes | None:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_FILE:
            return None
        with path.open("rb") as file:
            head = file.read(8)
            if head.startswith((b"!<arch>\n", b"\x7fELF")) and not _EXTENSION.search(path.name):
                return None
            return head + file.read()
    except OSError:
        return None


def _state(root: Path) -> str:
    """A digest of the names, sizes and times of all files."""
    digest = blake3.blake3()
    for name, path in _files(root):
        try:
            status = os.lstat(path)
        except OSError:
            continue
        digest.update(f"{name}\0{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode())
    return digest.hexdigest()


def _load(label: str, root: Path, folder: Path, state: str) -> SystemIndex | None:
    """The index in a folder of the cache; None if there is none of this state."""
    try:
        about = json.loads((folder / "about.json").read_bytes())
        if about["state"] != state:
            return None
        text_P, keys = np.load(folder / "text.npy"), np.load(folder / "keys.npy", mmap_mode="r")
        return SystemIndex(label, root, tuple(about["places"]), text_P, keys)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(index: SystemIndex, folder: Path, state: str) -> None:
    """Write an index into the cache, if there is room."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            np.save(f"{made}/text.npy", index.text_P)
            np.save(f"{made}/keys.npy", index.keys)
            Path(made, "about.json").write_text(json.dumps({"state": state, "places": index.places}))
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(made, folder)
            os.mkdir(made)  # for the end of the context
    except OSError:
        return


def words_of(tokens: Iterable[str]) -> Mapping[str, bytes]:
    """Token -> its longest word, for the tokens that have one; the index knows the words of ASCII alone."""
    longest = ((token, max(WORD.findall(token.encode()), key=len, default=b"")) for token in tokens if token.isascii())
    return {token: word for token, word in longest if word}
