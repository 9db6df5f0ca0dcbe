"""The sources of documents: own and foreign repositories, folders, pinned packages, replay data.

A git clone gives the files of its commit HEAD, each with the date of its last change; a folder without history gives
its files as they are. No code of a source is run, and no link is followed. Another kind of source is another branch of
`listed` and `contents`: it lists files and reads their bytes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

import msgspec

from etude.code import SUBMODULE, Clone, clone_around, find_permissive_licence, is_permissive, project_name
from etude.config import cache
from etude.corpus.documents.structs import OF_ROWS, CorpusSource, Kind, SourceFile
from etude.corpus.documents.texts import language_of_file, passed_over
from etude.corpus.sources import fetch_source
from etude.errors import UserError

MAX_BYTES = 1_000_000  # of a file
REPLAY_SUFFIXES = (".jsonl", ".txt", ".md")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==\S+")
_HIDDEN_BUT_READ = (".github",)


def corpus_sources(
    sources: Sequence[str],
    own: Sequence[str],
    own_licence: str,
    conversations: Sequence[str],
    replay: Sequence[str],
) -> tuple[CorpusSource, ...]:
    """The sources that a command line names, own ones first. Raises UserError for the first that cannot be used."""
    if not (sources or own or conversations or replay):
        raise UserError("a corpus needs sources: give folders, NAME==VERSION, --own REPO or --replay FILE")
    made = [_own(path, own_licence) for path in own]
    made += [_package(text) if _PACKAGE.fullmatch(text) else _repository(text) for text in sources]
    made += [_conversations(Path(path), own_licence) for path in conversations]
    made += [_replay(Path(path)) for path in replay]
    roots = Counter(str(Path(source.root).resolve()) for source in made)
    if twice := [root for root, count in roots.items() if count > 1]:
        raise UserError(f"{twice[0]} is named twice: name each source once")
    names: Counter[str] = Counter()
    out: list[CorpusSource] = []
    for source in made:
        names[source.name] += 1
        count = names[source.name]
        unique = f"{source.name}-{count}" if count > 1 else source.name
        out.append(msgspec.structs.replace(source, name=unique))
    return tuple(out)


def _own(path: str, licence: str) -> CorpusSource:
    root = Path(path)
    if not root.is_dir():
        raise UserError(f"--own {path} is not a folder: give a git clone or a folder of files")
    return _folder(root, "own", licence, "--own-licence")


def _repository(path: str) -> CorpusSource:
    root = Path(path)
    if root.is_file():
        raise UserError(f"{path} is a file: give its folder, or --replay {path}")
    if not root.is_dir():
        raise UserError(f"{path} is neither a folder nor NAME==VERSION: give a clone, a folder or a pinned package")
    licence, stated = find_permissive_licence(root)
    if not is_permissive(licence):
        raise UserError(
            f"{path} declares the licence {licence!r} ({stated}), which is not permissive: leave it out, or name it "
            "with --own if it is yours"
        )
    return _folder(root, "repository", licence, stated)


def _folder(root: Path, kind: Kind, licence: str, stated: str) -> CorpusSource:
    source = CorpusSource(name=project_name(root), kind=kind, root=str(root.absolute()), licence=licence, stated=stated)
    clone = clone_around(root)
    if clone is None:
        return source
    inside = root.resolve().relative_to(clone.root.resolve()).as_posix().removeprefix(".")
    head = clone.id_of("HEAD")
    if not head and not inside:
        raise UserError(f"{root} has no commit: commit its files, or remove {root / '.git'}")
    if not head or (inside and not clone.output("ls-tree", "HEAD", f"{inside}/")):
        return source  # a folder that the clone does not keep
    last = clone.demand("log", "-1", "--format=%ct", "HEAD").decode().strip()
    return msgspec.structs.replace(source, revision=head, history=True, inside=inside, last=iso(int(last)))


def _package(requirement: str) -> CorpusSource:
    fetched = fetch_source(requirement, cache() / "corpus")
    root = str(fetched.root.absolute())
    return CorpusSource(
        name=f"{fetched.name}-{fetched.version}",
        kind="package",
        root=root,
        licence=fetched.licence,
        stated="METADATA",
        revision=fetched.version,
    )


def _conversations(path: Path, licence: str) -> CorpusSource:
    if not path.is_file() or path.suffix != ".jsonl":
        raise UserError(
            f"--conversations {path} is no file of rows: give a .jsonl of `etude corpus sessions`, `pull-requests` or "
            "`etude tasks traces`"
        )
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem)
    return CorpusSource(
        name=name, kind="conversations", root=str(path.absolute()), licence=licence, stated="--own-licence"
    )


def _replay(path: Path) -> CorpusSource:
    if not path.exists():
        raise UserError(f"--replay {path} does not exist: give a .jsonl, .txt or .md file, or a folder of them")
    if path.is_file() and path.suffix not in REPLAY_SUFFIXES:
        raise UserError(f"--replay {path} is none of {', '.join(REPLAY_SUFFIXES)}: give such a file or a folder")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem if path.is_file() else path.resolve().name)
    return CorpusSource(name=name, kind="replay", root=str(path.absolute()), licence="", stated="its rows")


def check_dates(sources: Sequence[CorpusSource]) -> None:
    """Raises UserError if no source has a history, or one has a part of it alone: then dates of files are unknown."""
    if not any(source.history for source in sources):
        raise UserError(
            "files are held out by the date of their last change, and no source has a git history: give a "
            "clone, or drop the option"
        )
    for source in filter(lambda source: source.history, sources):
        if (_clone(source).common / "shallow").exists():
            raise UserError(
                f"{source.root} is a shallow clone, which lacks the dates of its files: run `git fetch --unshallow`"
            )


def iso(seconds: int) -> str:
    """A time as it stands in rows."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def divided(source: CorpusSource, after: str) -> CorpusSource:
    """The source with the last commit of its first-parent line that is not later than `after`. Raises UserError."""
    if not source.history:
        return source
    line = ("rev-list", "-1", "--first-parent", f"--before={after}", source.revision, "--")
    return msgspec.structs.replace(source, base=_clone(source).demand(*line).decode().strip())


def listed(source: CorpusSource, drops: Counter[str], shard_bytes: int, after: str = "") -> list[SourceFile]:
    """The files of a source that may be read, sorted by path; `drops` counts the others by reason. Of a history that a
    time `after` divides: the files as of then, and those that were added or changed since, held out. Raises
    UserError."""
    if source.kind in OF_ROWS:
        return list(_replay_files(source, shard_bytes))
    every = _divided(source, drops, after) if source.history else _on_disk(source, drops)
    kept: list[SourceFile] = []
    for file in sorted(every, key=lambda file: (file.path, file.held_out)):
        if language_of_file(file.path) is None:
            drops["other kinds of files"] += 1
        elif (reason := passed_over(file.path)) is not None:
            drops[reason] += 1
        elif file.size > MAX_BYTES:
            drops["too long"] += 1
        else:
            kept.append(file)
    return kept


def contents(source: CorpusSource, files: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, bytes, bytes]]:
    """The bytes of files, in order, and those of their bases. Raises UserError for a file that has gone."""
    if source.history:
        blobs = _clone(source).contents(blob for file in files for blob in (file.blob, file.base) if blob)
        yield from ((file, blobs[file.blob], blobs.get(file.base, b"")) for file in files)
        return
    root = Path(source.root)
    for file in files:
        path = root / file.path if file.path else root
        try:
            with path.open("rb") as opened:
                yield file, _lines_between(opened, file.start, file.end) if file.end else opened.read(), b""
        except OSError as e:
            raise UserError(
                f"{path} cannot be read ({e.strerror}): leave the source as it is, and begin anew"
            ) from None


def _clone(source: CorpusSource) -> Clone:
    clone = clone_around(Path(source.root))
    if clone is None:
        raise UserError(f"{source.root} is no git clone any more: begin the build anew")
    return clone


def _divided(source: CorpusSource, drops: Counter[str], after: str) -> Iterator[SourceFile]:
    """The files of the commit that is trained on, and those that the newest commit adds or changes, held out."""
    clone = _clone(source)
    if not after:
        yield from _committed(source, clone, source.revision, drops)
        return
    trained = _committed(source, clone, source.base, Counter()) if source.base else ()
    before = {file.path: file for file in trained}
    yield from before.values()
    for file in _committed(source, clone, source.revision, drops):
        old = before.get(file.path)
        if old is None or old.blob != file.blob:
            yield msgspec.structs.replace(file, held_out=True, base="" if old is None else old.blob)


def _committed(source: CorpusSource, clone: Clone, revision: str, drops: Counter[str]) -> Iterator[SourceFile]:
    within = [f"{source.inside}/"] if source.inside else []
    dates = _dates(clone.demand("log", "--no-renames", "--format=%x01%ct", "--name-only", "-z", revision))
    listing = clone.demand("ls-tree", "-r", "-z", "-l", "--full-tree", revision, *within)
    for entry in filter(None, listing.split(b"\0")):
        head, _, name = entry.partition(b"\t")
        mode, _, blob, size = head.decode().split()
        if mode == SUBMODULE:
            drops["submodule"] += 1
        elif mode == "120000":
            drops["link"] += 1
        else:
            path = name.decode("utf-8", "backslashreplace")
            yield SourceFile(path, int(size), blob, iso(dates[name]) if name in dates else "")


def _dates(log: bytes) -> dict[bytes, int]:
    """Path -> seconds of the newest commit that changed it."""
    dates: dict[bytes, int] = {}
    now = 0
    for field in log.split(b"\0"):
        for line in field.split(b"\n") if field.startswith((b"\x01", b"\n")) else [field]:
            if line.startswith(b"\x01"):
                now = int(line[1:])
            elif line:
                dates[line] = max(now, dates.get(line, 0))
    return dates


def _on_disk(source: CorpusSource, drops: Counter[str]) -> Iterator[SourceFile]:
    root, left = Path(source.root), [Path(source.root)]
    while left:
        for entry in sorted(os.scandir(left.pop()), key=lambda entry: entry.name):
            path = PurePosixPath(Path(entry.path).relative_to(root)).as_posix()
            if entry.is_symlink():
                drops["link"] += 1
            elif entry.is_dir():
                if not entry.name.startswith(".") or entry.name in _HIDDEN_BUT_READ:
                    left.append(Path(entry.path))
            elif not entry.is_file() or path.encode("utf-8", "replace").decode() != path:
                drops["other kinds of files"] += 1
            else:
                seen = entry.stat()
                yield SourceFile(path, seen.st_size, str(seen.st_mtime_ns))


def _replay_files(source: CorpusSource, shard_bytes: int) -> Iterator[SourceFile]:
    root = Path(source.root)
    paths = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in REPLAY_SUFFIXES)
    for path in paths:
        if path.is_symlink() or not path.is_file():
            continue
        name, seen = "" if path == root else path.relative_to(root).as_posix(), path.stat()
        size, stamp = seen.st_size, str(seen.st_mtime_ns)
        if path.suffix != ".jsonl":
            yield SourceFile(name, size, stamp)
            continue
        for start in range(0, size, shard_bytes):
            end = min(size, start + shard_bytes)
            yield SourceFile(name, end - start, stamp, start=start, end=end)


def _lines_between(opened, start: int, end: int) -> bytes:
    """The lines that begin in bytes [start, end)."""
    opened.seek(max(0, start - 1))
    if start:
        opened.readline()  # a line that began before
    lines: list[bytes] = []
    while opened.tell() < end and (line := opened.readline()):
        lines.append(line)
    return b"".join(lines)
