"""The files of a watched repository: their texts at the last look, and the changes since."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from etude.errors import UserError
from etude.live.observe import survival
from etude.live.observe.spool import SeenText, WatchState
from etude.live.observe.worktree import TextRepository, excluded

MAX_FILES = 100_000
QUIET = 0.2
"""Seconds without a change after which a file is read."""
Stamp = tuple[int, int, int]
"""Time of the last change in nanoseconds, size and inode of a file."""


@dataclass
class PendingChange:
    """A change of a file that is not assigned to a turn or a person yet."""

    path: str
    before: str
    after: str
    at: float


@dataclass
class FileChanges:
    """The changes between two looks; `renames`: old path -> new path, including files that changed, too."""

    changes: list[PendingChange] = field(default_factory=list[PendingChange])
    renames: dict[str, str] = field(default_factory=dict[str, str])


class FileWatch:
    """The reader of the files of `repository` whose stamps have changed; `state` keeps their texts. `now` is the clock,
    in seconds; `exclude`: globs of paths that are never read."""

    def __init__(
        self, repository: TextRepository, state: WatchState, exclude: tuple[str, ...], now: Callable[[], float]
    ) -> None:
        self.exclude = exclude
        self._repository = repository
        self._state = state
        self._now = now
        self._texts = state.texts()
        self._unread: dict[str, Stamp] = {}  # files that are no text, or too long

    def watched(self, path: str) -> bool:
        """Whether a path may be read."""
        return not path.startswith((".etude/", ".agent-trace/")) and not excluded(path, self.exclude)

    def stamp(self, path: str) -> Stamp | None:
        """The stamp of a file; None for a missing file."""
        try:
            status = os.lstat(self._repository.root / path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def text(self, path: str) -> str | None:
        """The text of a file at the last look: "" for a missing file, None for an unreadable file."""
        if path in self._unread:
            return None
        seen = self._texts.get(path)
        return "" if seen is None else self._text_of(seen)

    def look(self, by_git: Callable[[], bool], first: bool = False) -> FileChanges:
        """The changes since the last look, without changes `by_git`. The `first` look reads the tree and has none.
        Raises UserError for too many files."""
        listed = self._repository.files()
        if len(listed) > MAX_FILES:
            raise UserError(
                f"{self._repository.root} has {len(listed)} files, and at most {MAX_FILES} are watched: "
                f"let git ignore what is generated"
            )
        changes, moved = FileChanges(), by_git()
        fresh: dict[str, str] = {}
        present = {path: blob for path, blob in listed.items() if self.watched(path)}
        gone = [path for path in self._texts if path not in present or not self.stamp(path)]
        for path in self._unread.keys() - present.keys():
            del self._unread[path]
        for path in sorted(present):
            stamp = self.stamp(path)
            seen = self._texts.get(path)
            if not stamp or self._unread.get(path) == stamp or (seen is not None and seen.stamp == stamp):
                continue
            if not first and abs(self._now() - stamp[0] / 1e9) < QUIET:
                continue  # until the next look
            read = self._repository.read(path)
            if self.stamp(path) != stamp:
                continue
            if read is None or read[0].count("\n") > survival.MAX_LINES:
                self._unread[path] = stamp
                self._keep(path, None)
                continue
            was_unread = self._unread.pop(path, None) is not None
            text, blob = read
            before = None if seen is None else self._text_of(seen)
            self._keep(path, SeenText(stamp, blob, None if blob == present[path] else text))
            if seen is None and not first and not was_unread:
                fresh[path] = text
            elif before is not None and before != text and not moved:
                changes.changes.append(PendingChange(path, before, text, stamp[0] / 1e9))
        self._follow_renames(changes, gone, fresh, moved)
        return changes

    def _follow_renames(self, changes: FileChanges, gone: list[str], fresh: dict[str, str], by_git: bool) -> None:
        """Adds renames, of `gone` files to `fresh` files, and the changes of deleted, renamed and new files."""
        for path in gone:
            text = self._text_of(self._texts[path])
            target = survival.renamed(text, fresh) if text else None
            self._keep(path, None)
            if target is not None:
                changes.renames[path] = target
                at = self._texts[target].stamp[0] / 1e9
                after = fresh.pop(target)
                if text is not None and after != text and not by_git:
                    changes.changes.append(PendingChange(target, text, after, at))
            elif text and not by_git:
                changes.changes.append(PendingChange(path, text, "", self._now()))
        if not by_git:
            for path, text in fresh.items():
                changes.changes.append(PendingChange(path, "", text, self._texts[path].stamp[0] / 1e9))

    def _text_of(self, seen: SeenText) -> str | None:
        return seen.text if seen.text is not None else self._repository.blob(seen.blob)

    def _keep(self, path: str, seen: SeenText | None) -> None:
        if seen is None:
            self._texts.pop(path, None)
        else:
            self._texts[path] = seen
        self._state.set_text(path, seen)
