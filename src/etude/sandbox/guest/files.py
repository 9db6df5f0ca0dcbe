"""File operations below a folder that its owner may rearrange at any moment: no link is followed, nothing hangs."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
import time
from collections.abc import Iterator, Sequence

from . import linux

MAX_ENTRIES = 10_000  # of a folder, or of the files that a box has written
MAX_NAMES = 4 << 20  # bytes of their paths
MAX_PATH = 1024  # bytes of one path
MAX_DEPTH = 64
MAX_FILE = 10 << 20  # bytes
MAX_TOTAL = 200 << 20
MAX_SECONDS = 10.0  # of processor time; the wall clock would charge a box for its neighbours

_OPENAT2 = 437
_RESOLVE = 0x01 | 0x02 | 0x04 | 0x08  # NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH
_O_PATH = 0o10000000
_KINDS = {
    errno.ENOENT: "NotFound",
    errno.ELOOP: "Escape",
    errno.EXDEV: "Escape",
    errno.ENOTDIR: "NotRegular",
    errno.EISDIR: "NotRegular",
    errno.ENXIO: "NotRegular",
    errno.ENODEV: "NotRegular",
    errno.ENOSPC: "NoSpace",
    errno.EDQUOT: "NoSpace",
    errno.EFBIG: "NoSpace",
    errno.ENAMETOOLONG: "TooLarge",
}


class FileRefused(Exception):
    """`kind` names the error class of `etude.sandbox.base`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@contextlib.contextmanager
def refusing(path: str, other: str = "NotRegular") -> Iterator[None]:
    """Turns errors of the system into FileRefused; an unlisted error gets the kind `other`, or passes if that is ""."""
    try:
        yield
    except OSError as e:
        if not (kind := _KINDS.get(e.errno or 0, other)):
            raise
        raise FileRefused(kind, f"{path}: {e.strerror}") from None
    except (MemoryError, RecursionError):
        raise FileRefused("TooLarge", f"{path} is too large") from None


class Allowance:
    """The remaining allowance for reading a tree: entries, bytes of their paths and of their contents, and the
    processor time for it. Each method raises FileRefused where it is spent."""

    def __init__(
        self,
        total: float,
        entries: float = MAX_ENTRIES,
        names: float = MAX_NAMES,
        path: float = MAX_PATH,
        seconds: float = MAX_SECONDS,
    ) -> None:
        self.total, self.entries, self.names, self.path = total, entries, names, path
        self.until = time.process_time() + seconds

    @classmethod
    def endless(cls) -> Allowance:
        """An unlimited allowance, for a tree that no agent has touched."""
        return cls(*[float("inf")] * 5)

    def look(self, path: str) -> None:
        """Counts an entry."""
        size = len(os.fsencode(path))
        self.entries -= 1
        self.names -= size
        if self.entries < 0 or self.names < 0:
            raise FileRefused("TooLarge", "there are too many files, or their names are too long")
        if size > self.path:
            raise FileRefused("TooLarge", f"{path[:80]}... is too long a path")
        if time.process_time() > self.until:
            raise FileRefused("TooLarge", "there is too much to look at")

    def read(self, path: str, size: int) -> None:
        """Counts `size` bytes of a file, holes included."""
        self.total -= size
        if size > MAX_FILE or self.total < 0:
            raise FileRefused("TooLarge", f"{path} is too large to hand in")


def _leftovers() -> Allowance:
    """The allowance for files outside of the roots: as many as can be read at once."""
    return Allowance(MAX_FILE, entries=2000, names=256 << 10, seconds=1.0)


def _open(root: int, path: str, flags: int) -> int:
    """openat2(2) from `root`, beneath it, without links."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC | os.O_NONBLOCK * (not flags & _O_PATH), 0, _RESOLVE)
    fd = linux.libc.syscall(_OPENAT2, root, os.fsencode(path or "."), how, len(how))
    if fd < 0:
        code = ctypes.get_errno()
        if code == errno.ENOSYS:  # gVisor
            return _open_by_parts(root, path, flags)
        raise OSError(code, os.strerror(code))
    return int(fd)


def _open_by_parts(root: int, path: str, flags: int) -> int:
    """`_open` without openat2(2): each part is opened without following links, and checked before the next."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    device = os.fstat(root).st_dev
    current = os.dup(root)
    try:
        for part in parts:
            following = os.open(part, _O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = following
            status = os.fstat(current)
            if stat.S_ISLNK(status.st_mode) or part == ".." or status.st_dev != device:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if flags & os.O_DIRECTORY and not stat.S_ISDIR(os.fstat(current).st_mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return os.open(f"/proc/self/fd/{current}", flags | os.O_CLOEXEC | os.O_NONBLOCK * (not flags & _O_PATH))
    finally:
        os.close(current)


def read(root: int, path: str, max_bytes: int) -> bytes:
    """Content of a regular file. Raises FileRefused or OSError."""
    fd = _open(root, path, os.O_RDONLY)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FileRefused("NotRegular", f"{path} is not a regular file")
        if status.st_size > max_bytes:
            raise FileRefused("TooLarge", f"{path} has more than {max_bytes} bytes")
        return file.read(max_bytes)


def write(root: int, path: str, data: bytes) -> None:
    """Write a file by a temporary file and a rename; folders are made as needed."""
    folder, _, name = path.rpartition("/")
    parent = _make_folders(root, folder)
    temporary = f".{os.urandom(8).hex()}"
    try:
        mode = 0o644
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if not stat.S_ISREG(status.st_mode):
                raise FileRefused("NotRegular", f"{path} is not a regular file")
            mode = stat.S_IMODE(status.st_mode) & 0o777
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, mode, dir_fd=parent)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            os.unlink(temporary, dir_fd=parent)
            raise
    finally:
        os.close(parent)


def _make_folders(root: int, folder: str) -> int:
    current = os.dup(root)
    for part in filter(None, folder.split("/")):
        try:
            try:
                following = _open(current, part, _O_PATH | os.O_DIRECTORY)
            except FileNotFoundError:
                os.mkdir(part, 0o755, dir_fd=current)
                following = _open(current, part, _O_PATH | os.O_DIRECTORY)
        finally:
            os.close(current)
        current = following
    return current


def names(root: int, path: str) -> list[str]:
    """Sorted names in a folder, folders with a trailing slash. Raises FileRefused or OSError."""
    fd = _open(root, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(fd) as entries:
            listed = []
            for entry in entries:
                listed.append(entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name)
                if len(listed) > MAX_ENTRIES:
                    raise FileRefused("TooLarge", f"{path} has more than {MAX_ENTRIES} entries")
        return sorted(listed)
    finally:
        os.close(fd)


def delete(root: int, path: str) -> None:
    """Remove a file. Raises FileRefused or OSError."""
    folder, _, name = path.rpartition("/")
    parent = _open(root, folder, _O_PATH | os.O_DIRECTORY)
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise FileRefused("NotRegular", f"{path} is a folder")
        os.unlink(name, dir_fd=parent)
    finally:
        os.close(parent)


def changed(
    layer: int, base: Sequence[int], tree: int, total: int, roots: Sequence[str] = ()
) -> Iterator[tuple[str, bytes | None]]:
    """(path, content or None) that `tree`, an overlay of a written `layer` over `base`, shows of its regular files.

    With `roots`, all below these paths, and of the rest as much as can be read at once. Raises FileRefused if there is
    too much below the paths; `total` is in bytes.
    """
    allowed = Allowance(min(total, MAX_TOTAL))
    yield from _changed(layer, base, tree, allowed, roots or ("",), ())
    if roots:
        with contextlib.suppress(FileRefused, OSError):
            yield from _changed(layer, base, tree, _leftovers(), ("",), roots)


def _changed(
    layer: int,
    base: Sequence[int],
    tree: int,
    allowed: Allowance,
    starts: Sequence[str],
    without: Sequence[str],
) -> Iterator[tuple[str, bytes | None]]:
    seen: set[str] = set()
    for path in (p for start in starts for p in _touched(layer, base, start, without, allowed)):
        if path in seen or _below(path, without):
            continue
        seen.add(path)
        status = _status(tree, path)
        if status is not None and stat.S_ISREG(status.st_mode):
            allowed.read(path, status.st_size)
            yield path, read(tree, path, MAX_FILE)
        elif (status is None or stat.S_ISDIR(status.st_mode)) and any(_is_file(lower, path) for lower in base):
            yield path, None


def _below(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def _touched(layer: int, base: Sequence[int], start: str, without: Sequence[str], allowed: Allowance) -> Iterator[str]:
    """Regular files of a layer at or below `start`, and those of `base` that are hidden by an opaque folder or by an
    entry that is no folder, such as a device 0:0, which stands for a deletion."""
    parts = start.split("/") if start else []
    for i in range(1, len(parts) + 1):
        above = "/".join(parts[:i])
        status = _status(layer, above)
        if status is None:
            return
        hides = not stat.S_ISDIR(status.st_mode)
        if hides or _opaque_at(layer, above):
            yield from _hidden(base, start, allowed)
        if hides:
            if above == start and stat.S_ISREG(status.st_mode):
                yield start
            return
    for path, status, folder in _walk(layer, allowed, start, without):
        is_folder = stat.S_ISDIR(status.st_mode)
        if stat.S_ISREG(status.st_mode):
            yield path
        if not is_folder or _opaque(folder):
            yield from _hidden(base, path, allowed)


def _hidden(base: Sequence[int], path: str, allowed: Allowance) -> Iterator[str]:
    for lower in base:
        for file in _files(lower, path):
            allowed.look(file)
            yield file


def _walk(
    root: int, allowed: Allowance, start: str = "", without: Sequence[str] = ()
) -> Iterator[tuple[str, os.stat_result, int]]:
    """(path, status, descriptor of the folder) of all below the folder `start` of `root`, folders `without` left out;
    the descriptor is closed after its entries."""
    pending = [start]
    while pending:
        folder = pending.pop()
        if folder in without:
            continue
        if folder.count("/") >= MAX_DEPTH:
            raise FileRefused("TooLarge", f"folders are nested more than {MAX_DEPTH} deep")
        here = _open(root, folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if folder:
                yield folder, os.fstat(here), here
            with os.scandir(here) as listed:
                for entry in listed:
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    allowed.look(path)
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(path)
                    else:
                        yield path, status, here
        finally:
            os.close(here)


def _status(root: int, path: str) -> os.stat_result | None:
    """Status of the entry at a path, without following a link; None if there is none."""
    folder, _, name = path.rpartition("/")
    try:
        parent = _open(root, folder, _O_PATH | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    finally:
        os.close(parent)


def _is_file(root: int, path: str) -> bool:
    status = _status(root, path)
    return status is not None and stat.S_ISREG(status.st_mode)


State = dict[str, tuple[int, int, int, int]]  # regular file -> inode, size, times of its content and of itself


def state(root: int, allowed: Allowance, start: str = "", without: Sequence[str] = ()) -> State:
    """The properties that a write changes, of each regular file at or below `start`; no process in a box can set the
    last time back."""
    status = _status(root, start) if start else None
    if start and (status is None or not stat.S_ISDIR(status.st_mode)):
        entries = [(start, status)] if status is not None else []
    else:
        entries = [(path, status) for path, status, _ in _walk(root, allowed, start, without)]
    return {
        path: (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path, status in entries
        if stat.S_ISREG(status.st_mode)
    }


def differing(root: int, before: State, total: int, roots: Sequence[str] = ()) -> Iterator[tuple[str, bytes | None]]:
    """(path, content or None if deleted) of files that may have changed since `before` was taken.

    `total` and `roots` as in `changed`.
    """
    old = sum(len(os.fsencode(path)) for path in before)
    sizes = {"entries": len(before) + MAX_ENTRIES, "names": old + MAX_NAMES, "path": sys.maxsize}
    yield from _differing(root, before, Allowance(min(total, MAX_TOTAL), **sizes), roots or ("",), ())
    if roots:
        allowed = _leftovers()
        allowed.entries, allowed.names, allowed.path = allowed.entries + len(before), allowed.names + old, sys.maxsize
        with contextlib.suppress(FileRefused, OSError):
            yield from _differing(root, before, allowed, ("",), roots)


def _differing(
    root: int, before: State, allowed: Allowance, starts: Sequence[str], without: Sequence[str]
) -> Iterator[tuple[str, bytes | None]]:
    now: State = {}
    for start in starts:
        now |= state(root, allowed, start, without)
    for path in before.keys() - now.keys():
        if (starts == ("",) or _below(path, starts)) and not _below(path, without):
            yield path, None
    for path in (path for path, known in now.items() if before.get(path) != known and not _below(path, without)):
        allowed.read(path, now[path][1])
        yield path, read(root, path, MAX_FILE)


def _opaque_at(root: int, path: str) -> bool:
    folder = _open(root, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return _opaque(folder)
    finally:
        os.close(folder)


def _opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, "user.overlay.opaque") in (b"y", b"x")
    except OSError:
        return False


def _files(root: int, path: str) -> Iterator[str]:
    """Regular files at or below `path` of the pristine tree."""
    try:
        status = os.stat(path, dir_fd=root, follow_symlinks=False)
    except OSError:
        return
    if stat.S_ISREG(status.st_mode):
        yield path
    elif stat.S_ISDIR(status.st_mode):
        for name in names(root, path):
            yield from _files(root, f"{path}/{name.rstrip('/')}")
