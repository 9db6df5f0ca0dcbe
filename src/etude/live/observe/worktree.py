"""A developer's git repository, read as text by `code/git.py`, without its hooks, filters and other programs.

Files of the tree are read without conversion; links are not followed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.code import clone_around, lines_of
from etude.errors import UserError

MAX_BYTES = 1 << 20  # of a file whose edits are followed
MAX_COMMITS = 1000  # read when a branch has moved


@dataclass(frozen=True)
class TreeState:
    """The state of a working tree. Files that change together with the state were changed by git, not by an edit."""

    head: str  # commit, or empty before the first
    branch: str  # full name of the ref, or "HEAD" if detached
    stash: str
    mainline: str
    """Commit of the remote's main branch, as known here; empty without one."""


_REFS = ("refs/remotes/origin/HEAD", "refs/remotes/origin/main", "refs/remotes/origin/master", "refs/stash")


class TextRepository:
    """The working tree at `root`. Raises UserError if there is none."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not self.root.is_dir():
            raise UserError(f"{root} is not a folder; give the root of a git repository")
        clone = clone_around(self.root)
        if clone is None:
            raise UserError(f"{root} is not a git repository that can be read")
        if clone.root != self.root:
            raise UserError(f"{root} lies in the git repository {clone.root}; give its root")
        self._clone = clone
        self.common = clone.common

    def state(self) -> TreeState:
        """Commit, branch, stash and main branch."""
        branch = self._text("symbolic-ref", "-q", "HEAD").strip() or "HEAD"
        lines = lines_of(self._text("for-each-ref", "--format=%(refname) %(objectname)", *_REFS))
        refs = {name: commit for name, _, commit in (line.partition(" ") for line in lines)}
        mainline = next((refs[name] for name in _REFS[:-1] if name in refs), "")
        return TreeState(self.commit("HEAD"), branch, refs.get("refs/stash", ""), mainline)

    def commit(self, name: str) -> str:
        """The commit of a name, or ""."""
        return self._text("rev-parse", "--verify", "-q", f"{name}^{{commit}}").strip()

    def committed_at(self, commit: str) -> float:
        """The time of a commit by its committer's clock, seconds since the epoch; 0 if unknown."""
        line = re.search(r"^committer .* (\d+) [-+]\d{4}$", self._text("cat-file", "commit", commit), re.M)
        return float(line[1]) if line else 0.0

    def files(self) -> dict[str, str]:
        """Path -> blob id in the index, or "" for a file that is neither in the index nor ignored."""
        files: dict[str, str] = {}
        for entry in self._parts("ls-files", "-z", "--others", "--exclude-standard", within=self.root):
            files[entry] = ""
        staged = self._clone.staged().items()
        return files | {path: blob for path, (mode, blob) in staged if mode.startswith("100")}

    def is_behind(self, old: str, new: str) -> bool:
        """Whether `new` descends from `old`, or is it."""
        return self._clone.run("merge-base", "--is-ancestor", old, new).returncode == 0

    def commits(self, old: str, new: str) -> list[str]:
        """First-parent commits after `old` up to `new`, oldest first; `new` alone if `old` is not behind it."""
        if not new or old == new:
            return []
        if not old or not self.is_behind(old, new):
            return [new]
        chain = self._text("rev-list", "--first-parent", f"--max-count={MAX_COMMITS}", new, f"^{old}").split()
        return chain[::-1]

    def changes(self, commit: str) -> dict[str, str]:
        """Paths that a commit changed against its first parent -> their paths before, equal if not renamed."""
        parts = iter(
            self._parts(
                "diff-tree",
                "-r",
                "-M",
                "-z",
                "--root",
                "--no-commit-id",
                "--name-status",
                "--no-ext-diff",
                "--no-textconv",
                "--first-parent",
                "-m",
                commit,
            )
        )
        changed: dict[str, str] = {}
        for kind in parts:
            before = next(parts)
            changed[next(parts) if kind[0] in "RC" else before] = before
        return changed

    def text_at(self, commit: str, path: str) -> str | None:
        """Text of a file in a commit; None for a missing, too long or binary file."""
        return self.blob(f"{commit}:{path}")

    def blob(self, name: str) -> str | None:
        """Text of a blob; None if it is missing, too long, or no text."""
        size = self._text("cat-file", "-s", name).strip()
        if not size.isdigit() or int(size) > MAX_BYTES:
            return None
        return _decoded(self._clone.run("cat-file", "blob", name).stdout)

    def read(self, path: str) -> tuple[str, str] | None:
        """Text of a file of the tree, and the id of its blob without git's conversions; None for a file that is not
        regular, too long, or binary."""
        try:
            place = self.root / path
            if not place.parent.resolve().is_relative_to(self.root):
                return None
            descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError:
            return None
        text = _decoded(data) if len(data) <= MAX_BYTES else None
        return None if text is None else (text, hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())

    def setting(self, name: str) -> str:
        """A value of the repository's own configuration, or ""."""
        return self._clone.settings.get(name.lower(), "").strip()

    def tracked(self, path: str) -> bool:
        """Whether a file is checked in, or staged."""
        return bool(self._text("ls-files", "--", path).strip())

    def _parts(self, *arguments: str, within: Path | None = None) -> Iterable[str]:
        done = self._clone.run(*arguments, within=within)
        return (os.fsdecode(part) for part in done.stdout.split(b"\0") if part)

    def _text(self, *arguments: str) -> str:
        return os.fsdecode(self._clone.run(*arguments).stdout)


def excluded(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a path. `*` also matches slashes, which excludes rather too much; a folder's name
    excludes all files in it."""
    return any(re.fullmatch(_pattern(p), path) for p in patterns)


def _pattern(glob: str) -> str:
    body = "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in re.sub(r"\*+", "*", glob.strip("/")))
    return rf"(?s:(?:.*/)?{body}(?:/.*)?)"


def _decoded(data: bytes) -> str | None:
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
