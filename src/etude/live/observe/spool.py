"""The state of `etude live watch`: followed edits, the tree at the last look, and signals that wait for the gateway.

One SQLite file of mode 0600 below the user's state folder. Observations and their signals are written in one
transaction, and a signal leaves the file when the gateway has acknowledged it: a kill loses no signal, and at worst
sends one again, under the same event.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from etude.errors import UserError
from etude.live.observe.survival import AppliedHunk, lines_of

MAX_WAITING = 10_000
"""The number of waiting signals from which on the watcher pauses."""
MAX_EDITS = 5_000
MAX_CHARACTERS = 200_000_000
"""Characters in the texts of all followed edits; each edit has its file before and after."""

_TABLES = """
CREATE TABLE IF NOT EXISTS edits (id TEXT PRIMARY KEY, open INTEGER NOT NULL, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS texts (
    path TEXT PRIMARY KEY, mtime INTEGER, size INTEGER, inode INTEGER, blob TEXT, text TEXT
);
CREATE TABLE IF NOT EXISTS waiting (sequence INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT UNIQUE, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS marks (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass
class WatchedEdit:
    """One edit of a turn, and its fate so far. `hunk` is one difference between the texts `before` and `applied` of its
    file; times are seconds of this machine's clock."""

    id: str
    turn: str
    model: str
    path: str
    branch: str
    before: str
    applied: str
    first: int
    old: int
    place: int
    new: int
    shown: float
    confidence: float = 1.0
    overwritten: float = 0.0
    """Share replaced by later turns."""
    undone: bool = False
    horizons: tuple[float, ...] = ()
    """Past horizons, reported or missed."""
    committed: str = ""
    merged: bool = False
    reverted: bool = False

    @property
    def hunk(self) -> AppliedHunk:
        """The edit in the form of `survival`."""
        old = tuple(lines_of(self.before)[self.first : self.first + self.old])
        return AppliedHunk(self.first, old, self.place, tuple(lines_of(self.applied)[self.place :][: self.new]))


@dataclass(frozen=True)
class SeenText:
    """A file at the last look: its stamp, and its text or the id of its blob."""

    stamp: tuple[int, int, int]
    blob: str
    text: str | None


class AlreadyWatched(UserError):
    """Another process holds the state of the repository."""


class WatchState:
    """The state of one repository, held by one process at a time. Raises AlreadyWatched if another process holds it."""

    def __init__(self, root: Path) -> None:
        self.folder = state_folder(root)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise AlreadyWatched(f"{root} is watched by another `etude live watch`; end that one first") from None
        place = self.folder / "state.db"
        place.touch(mode=0o600)
        self._db = sqlite3.connect(place, isolation_level=None)
        self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA secure_delete = ON;")
        self._db.executescript(_TABLES)

    def close(self) -> None:
        """Closes the file, and releases the lock."""
        self._db.close()
        os.close(self._lock)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A transaction: all writes inside, or none."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def mark(self, name: str, default: str = "") -> str:
        """The value of a mark."""
        row = self._db.execute("SELECT value FROM marks WHERE name = ?", (name,)).fetchone()
        return default if row is None else str(row[0])

    def set_mark(self, name: str, value: str) -> None:
        """Sets the value of a mark."""
        self._db.execute("INSERT OR REPLACE INTO marks VALUES (?, ?)", (name, value))

    def texts(self) -> dict[str, SeenText]:
        """All files at the last look."""
        rows = self._db.execute("SELECT path, mtime, size, inode, blob, text FROM texts")
        return {path: SeenText((mtime, size, inode), blob, text) for path, mtime, size, inode, blob, text in rows}

    def set_text(self, path: str, seen: SeenText | None) -> None:
        """Sets the text of a file; None for a deleted file."""
        if seen is None:
            self._db.execute("DELETE FROM texts WHERE path = ?", (path,))
        else:
            row = (path, *seen.stamp, seen.blob, seen.text)
            self._db.execute("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?, ?)", row)

    def edits(self) -> list[WatchedEdit]:
        """The followed edits."""
        rows = self._db.execute("SELECT state FROM edits WHERE open = 1 ORDER BY rowid")
        return [WatchedEdit(**json.loads(row[0]) | {"horizons": tuple(json.loads(row[0])["horizons"])}) for row in rows]

    def known(self, edit: str) -> bool:
        """Whether an edit is or was followed."""
        return self._db.execute("SELECT 1 FROM edits WHERE id = ?", (edit,)).fetchone() is not None

    def put(self, edit: WatchedEdit) -> None:
        """Writes an edit."""
        state = json.dumps(asdict(edit))
        self._db.execute("INSERT OR REPLACE INTO edits VALUES (?, 1, ?)", (edit.id, state))

    def drop(self, edit: WatchedEdit) -> None:
        """Ends following an edit: only its identifier is kept."""
        self._db.execute("UPDATE edits SET open = 0, state = '{}' WHERE id = ?", (edit.id,))

    def emit(self, event: str, body: dict[str, Any]) -> None:
        """Queues a signal, unless a signal with its event waits already."""
        row = (event, json.dumps(body | {"event": event, "queued": time.time()}))
        self._db.execute("INSERT OR IGNORE INTO waiting (event, body) VALUES (?, ?)", row)

    def waiting(self, most: int = 100) -> list[tuple[int, dict[str, Any]]]:
        """The first waiting signals, with their numbers in the client's sequence."""
        rows = self._db.execute("SELECT sequence, body FROM waiting ORDER BY sequence LIMIT ?", (most,))
        return [(number, json.loads(body)) for number, body in rows]

    def count(self) -> int:
        """The number of waiting signals."""
        return int(self._db.execute("SELECT COUNT(*) FROM waiting").fetchone()[0])

    def acknowledged(self, sequence: int) -> None:
        """Removes a signal that the gateway has acknowledged."""
        self._db.execute("DELETE FROM waiting WHERE sequence = ?", (sequence,))


def state_folder(root: Path) -> Path:
    """The folder of the state of the repository at `root`: below $XDG_STATE_HOME, or ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=10).hexdigest()
    return Path(base) / "etude" / "watch" / name
