"""Unpacks source archives (tar) without writing outside of the target folder.

`tarfile`'s own filters came with Python 3.11.4, and early ones let long chains of links out. This module makes no
links: a link to a file of the archive becomes a copy of that file.
"""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
import tarfile
from pathlib import Path

_HOPS = 8  # links to links that are followed, at most


def contents(archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo | None]:
    """Path -> the file whose bytes belong there, or None for a folder. A link to a path that is no file of the archive
    is left out. Raises tarfile.TarError for a path or link that leads outside, and for a device."""
    members = {_inside(member.name): member for member in archive.getmembers()}  # the last of a name counts, as in tar
    entries: dict[str, tarfile.TarInfo | None] = {}
    for path, member in members.items():
        file = None if member.isdir() else _file(member, members)
        if member.isdir() or file is not None:
            entries[path] = file
    return entries


def extract(archive: tarfile.TarFile, entries: dict[str, tarfile.TarInfo | None], into: Path) -> None:
    """Write `contents` below `into`, with the times and the executable bits of the files. Raises tarfile.TarError for a
    path that is both a file and a folder."""
    into.mkdir(parents=True, exist_ok=True)
    for path, file in entries.items():
        target = into / path
        try:
            (target if file is None else target.parent).mkdir(parents=True, exist_ok=True)
            if file is not None:
                _write(archive, file, target)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise tarfile.ExtractError(f"{path} is a file and a folder") from None
        except (ValueError, OverflowError) as e:  # an invalid time
            raise tarfile.ExtractError(f"{path}: {e}") from None
        except OSError as e:
            if e.errno != errno.ENAMETOOLONG:
                raise
            raise tarfile.ExtractError(f"{path[:100]}... is too long as a name") from None


def _inside(name: str) -> str:
    """The normalised path. Raises TarError for a path that leads outside."""
    path = posixpath.normpath(name)
    if path.startswith(("/", "../")) or path == ".." or "\0" in path:
        raise tarfile.ExtractError(f"{name} leads outside")
    return path


def _file(member: tarfile.TarInfo, members: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """The regular file that a member is or links to, if there is one. Raises TarError."""
    for _ in range(_HOPS):
        if member.isreg():
            return member
        if member.islnk():
            to = _inside(member.linkname)
        elif member.issym():
            if member.linkname.startswith("/"):
                raise tarfile.ExtractError(f"{member.name} links to {member.linkname}, which is outside")
            to = _inside(posixpath.join(posixpath.dirname(member.name), member.linkname))
        else:
            raise tarfile.ExtractError(f"{member.name} is a device")
        if to not in members or members[to].isdir():
            return None
        member = members[to]
    raise tarfile.ExtractError(f"{member.name} is a link that goes in circles")


def _write(archive: tarfile.TarFile, file: tarfile.TarInfo, target: Path) -> None:
    source = archive.extractfile(file)
    assert source is not None  # a regular file
    with source, target.open("wb") as out:
        shutil.copyfileobj(source, out)
    target.chmod(0o755 if file.mode & 0o100 else 0o644)
    os.utime(target, (file.mtime, file.mtime))
