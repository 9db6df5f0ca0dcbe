"""File operations below a folder that its owner may rearrange at any moment: no link is followed, nothing hangs."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator, Sequence

from . import linux

MAX_ENTRIES = 100_000
MAX_DEPTH = 64
MAX_FILE = 10 << 20  # bytes
MAX_TOTAL = 200 << 20

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


def refusal(error: OSError, path: str) -> FileRefused:
    """The refusal that an error of the system stands for."""
    return FileRefused(_KINDS.get(error.errno or 0, "NotRegular"), f"{path}: {error.strerror}")


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
    """The same without openat2(2): each part is opened without following it, and looked at before the next."""
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
    """By a temporary file and a rename; folders are made as needed."""
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


def changed(layers: Sequence[int], base: Sequence[int], tree: int) -> Iterator[tuple[str, bytes | None]]:
    """(path, content or None) that `tree`, an overlay of written `layers` over `base`, shows of their regular files."""
    total = 0
    seen: set[str] = set()
    for path in (path for layer in layers for path in _touched(layer, base)):
        if path in seen:
            continue
        seen.add(path)
        if len(seen) > MAX_ENTRIES:
            raise FileRefused("TooLarge", f"more than {MAX_ENTRIES} files were changed")
        status = _status(tree, path)
        if status is not None and stat.S_ISREG(status.st_mode):
            total += status.st_size
            if status.st_size > MAX_FILE or total > MAX_TOTAL:
                raise FileRefused("TooLarge", f"{path} is too large to hand in")
            yield path, read(tree, path, MAX_FILE)
        elif (status is None or stat.S_ISDIR(status.st_mode)) and any(_is_file(lower, path) for lower in base):
            yield path, None


def _touched(layer: int, base: Sequence[int]) -> Iterator[str]:
    """Regular files of a layer, and those of `base` that a device 0:0 (a deletion) or an opaque folder in it hides."""
    for path, status, folder in _walk(layer, MAX_ENTRIES):
        if stat.S_ISREG(status.st_mode):
            yield path
        elif _opaque(folder) if stat.S_ISDIR(status.st_mode) else stat.S_ISCHR(status.st_mode) and not status.st_rdev:
            for lower in base:
                yield from _files(lower, path)


def _walk(root: int, entries: int) -> Iterator[tuple[str, os.stat_result, int]]:
    """(path, status, descriptor of the folder) of all below `root`; the descriptor is closed after its entries."""
    left = entries
    pending = [""]
    while pending:
        folder = pending.pop()
        if folder.count("/") >= MAX_DEPTH:
            raise FileRefused("TooLarge", f"folders are nested more than {MAX_DEPTH} deep")
        here = _open(root, folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if folder:
                yield folder, os.fstat(here), here
            with os.scandir(here) as listed:
                for entry in listed:
                    left -= 1
                    if left < 0:
                        raise FileRefused("TooLarge", f"there are more than {entries} files")
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(path)
                    else:
                        yield path, status, here
        finally:
            os.close(here)


def _status(root: int, path: str) -> os.stat_result | None:
    """Of what lies there, without following a link; None if nothing does."""
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


def state(root: int, entries: int = MAX_ENTRIES) -> State:
    """What a write changes of each regular file below `root`; no process in a box can set the last time back."""
    return {
        path: (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path, status, _ in _walk(root, entries)
        if stat.S_ISREG(status.st_mode)
    }


def differing(root: int, before: State) -> Iterator[tuple[str, bytes | None]]:
    """(path, content or None if deleted) of files that may differ from what they were when `before` was taken."""
    now = state(root, len(before) + MAX_ENTRIES)
    for path in before.keys() - now.keys():
        yield path, None
    total = 0
    for path in (path for path, known in now.items() if before.get(path) != known):
        total += now[path][1]
        if now[path][1] > MAX_FILE or total > MAX_TOTAL:
            raise FileRefused("TooLarge", f"{path} is too large to hand in")
        yield path, read(root, path, MAX_FILE)


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
