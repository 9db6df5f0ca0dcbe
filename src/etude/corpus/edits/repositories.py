"""Reads the sources of edits: commits of a git clone, releases of a package, or the files of a folder.

A repository is named by its folder, releases of a package as OLD..NEW or OLD..NEXT..NEW. A file that differs between
two successive releases is an edit by people. No code of a repository is run.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath

from etude.code import (
    Clone,
    clone_around,
    credential_name,
    find_permissive_licence,
    is_permissive,
    language_of,
    project_name,
    secret_in,
    shown_lines,
)
from etude.corpus.filters import generated
from etude.errors import UserError

log = logging.getLogger(__name__)

MAX_COMMITS = 2000
MAX_BYTES = 200_000
VENDORED = frozenset({"vendor", "_vendor", "vendored", "node_modules", "third_party", "extern", "dist", "bundled"})
LOCKS = re.compile(r"(^|/)(package-lock|pnpm-lock|yarn|composer|poetry)[^/]*$|\.min\.|\.bundle\.|-min\.")
# Control characters, and line ends of other programs that git does not split at.
_ODD = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x85\u2028\u2029]|\r(?!\n)")
MAX_LINE = 200
OWN = ("own code", "the word of whoever built the table")


@dataclass(frozen=True)
class Text:
    """One file in its current state."""

    path: str
    language: str
    text: str


@dataclass(frozen=True)
class FileChange:
    """One file before and after; `subject` is the commit's first line, or empty."""

    path: str
    language: str
    before: str
    after: str
    subject: str


@dataclass(frozen=True)
class Repository:
    """The files of a repository, the changes that people made to them, and the licence of both."""

    name: str
    licence: str
    licence_source: str
    origin: str  # "commits", "releases" or "files"
    texts: tuple[Text, ...]
    changes: tuple[FileChange, ...]


def read(argument: str, own: bool = False) -> Repository:
    """The repository that a command-line argument names; an `own` one needs no open licence. Raises UserError if it
    cannot be used."""
    path = Path(argument)
    if path.is_dir():
        licence = OWN if own else _licence(path)
        if (path / ".git").exists() and (clone := clone_around(path)) is not None:
            texts, changes = tuple(_head(clone)), tuple(_commits(clone))
            return Repository(project_name(path), *licence, "commits", texts, changes)
        return Repository(project_name(path), *licence, "files", tuple(_files(path).values()), ())
    if folders := _chain(argument):
        return _releases(folders, own)
    raise UserError(f"{argument} is not a folder: give a git clone, a folder of files, or releases as OLD..NEW")


def _chain(argument: str) -> list[Path]:
    """The folders that an argument joins by two dots; empty if a part is not a folder."""
    for dots in re.finditer(r"\.\.", argument):
        first, rest = Path(argument[: dots.start()]), argument[dots.end() :]
        if first.is_dir() and (others := [Path(rest)] if Path(rest).is_dir() else _chain(rest)):
            return [first, *others]
    return []


def wanted(path: str, text: str) -> bool:
    """Whether a file is worth learning from: written by people, not vendored, of moderate size."""
    folders = set(PurePosixPath(path).parts[:-1])
    if folders & VENDORED or LOCKS.search(path) or not text.strip() or len(text) > MAX_BYTES:
        return False
    return not (generated(text) or _ODD.search(text) or max(map(len, shown_lines(text))) > MAX_LINE)


def _licence(root: Path) -> tuple[str, str]:
    licence, where = find_permissive_licence(root)
    if not is_permissive(licence):
        raise UserError(
            f"{root} declares the licence {licence!r} ({where}), which is not permissive: leave it out of the data"
        )
    return licence, where


def _decoded(path: str, data: bytes) -> Text | None:
    language = language_of(path)
    if language is None or len(data) > MAX_BYTES:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if not wanted(path, text):
        return None
    if (rule := secret_in(data, path, marked=True) or (language == "json" and credential_name(path)) or None) is None:
        return Text(path, language, text)
    _name_secret(path, rule)
    return None


@cache  # an old commit may hold what many others hold
def _name_secret(path: str, rule: str) -> None:
    log.warning("left out, a likely secret (%s): %s", rule, path)


def _files(root: Path) -> dict[str, Text]:
    """Files by path, without hidden folders and installed packages."""
    texts: dict[str, Text] = {}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_symlink() or not path.is_file() or language_of(path.name) is None:
            continue
        if any(part.startswith(".") or part == "site-packages" for part in relative.parts):
            continue
        if (text := _decoded(relative.as_posix(), path.read_bytes())) is not None:
            texts[text.path] = text
    return texts


def _releases(folders: Sequence[Path], own: bool) -> Repository:
    """The files of the newest release, and the changes of each release against the one before, newest first."""
    new = folders[-1]
    licence = OWN if own else _licence(new)
    releases = [_files(folder) for folder in folders]
    changes = tuple(
        FileChange(path, text.language, before[path].text, text.text, "")
        for before, after in reversed(list(pairwise(releases)))
        for path, text in after.items()
        if path in before and before[path].text != text.text
    )
    return Repository(project_name(new), *licence, "releases", tuple(releases[-1].values()), changes)


# --- git ------------------------------------------------------------------------------------------------------------


def _head(clone: Clone) -> Iterator[Text]:
    rows = {path: blob for path, (mode, blob) in clone.tree("HEAD").items() if mode[:3] == "100" and language_of(path)}
    contents = clone.contents(rows.values())
    for path, blob in rows.items():
        if (text := _decoded(path, contents[blob])) is not None:
            yield text


def _commits(clone: Clone) -> Iterator[FileChange]:
    """Files that a commit without a second parent modified, newest commit first."""
    log = clone.demand(
        "log",
        "--no-merges",
        "--no-renames",
        "--diff-filter=M",
        "--raw",
        "--no-abbrev",
        f"--max-count={MAX_COMMITS}",
        "--format=%x00%s",
        "-z",
    ).decode(errors="replace")
    rows: list[tuple[str, str, str, str]] = []
    subject = ""
    fields = iter(log.split("\0"))
    for field in fields:
        field = field.strip("\n")
        if field.startswith(":100"):
            _, _, old, new, _ = field.split()
            path = next(fields, "")
            if language_of(path):
                rows.append((path, old, new, subject))
        elif field:
            subject = field
    contents = clone.contents(blob for row in rows for blob in row[1:3])
    for path, old, new, first_line in rows:
        before, after = _decoded(path, contents[old]), _decoded(path, contents[new])
        if secret_in(first_line.encode()) is not None:
            _name_secret(path, "in the message of a commit")
        elif before is not None and after is not None and before.text != after.text:
            yield FileChange(path, before.language, before.text, after.text, first_line)
