"""The parts of every box: namespaces, the layers of its files, limits; and messages from and to the owner.

A work tree is an overlay. From top to bottom: the files that the box writes; the files of its task (live boxes:
`image_template.py`); the repository.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from . import files, linux, root

INODES = 16384  # that a box may write
PART = 1 << 16  # bytes that are put together before they are sent
PRIVATE = linux.MS_NOSUID | linux.MS_NODEV


def enter() -> None:
    """Enter new namespaces but that of pids, which is made with its first process."""
    linux.unshare(linux.NEWNS | linux.NEWIPC | linux.NEWUTS | linux.NEWNET)


def furnish(
    limits: dict[str, Any],
    changes: Mapping[str, bytes | None],
    lowers: Sequence[str] = (root.WORKSPACE,),
    places: Mapping[str, str] | None = None,
) -> None:
    """A writable layer over `lowers` (topmost first) with the changed files in it, a fresh /proc; folders of the work
    tree at their `places`, too."""
    socket.sethostname("devbox")
    layer = root.LAYER
    linux.mount("tmpfs", layer, "tmpfs", PRIVATE, f"size={limits['disk']},nr_inodes={INODES}")
    for name in ("tmp", "shm", "home"):
        os.mkdir(f"{layer}/{name}")
    os.chmod(f"{layer}/tmp", 0o1777)
    os.chmod(f"{layer}/shm", 0o1777)
    _overlay(lowers, changes)
    for place in root.layered:
        _layer(place)
    linux.mount(f"{layer}/tmp", "/tmp", None, linux.MS_BIND)
    linux.mount(f"{layer}/shm", "/dev/shm", None, linux.MS_BIND)
    home = f"/home/{root.user}"
    if os.path.ismount(home):  # the image's own
        _layer(home)
    else:
        linux.mount(f"{layer}/home", home, None, linux.MS_BIND)
    for place, folder in sorted((places or {}).items()):
        for path in (place, f"{root.WORKSPACE}/{folder}"):
            os.makedirs(path, exist_ok=True)
        linux.mount(f"{root.WORKSPACE}/{folder}", place, None, linux.MS_BIND)
    linux.mount("proc", "/proc", "proc", PRIVATE | linux.MS_NOEXEC)
    linux.loopback_up()


def terminals() -> None:
    """Pseudo-terminals of this mount namespace's own."""
    linux.mount("devpts", "/dev/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, "newinstance,ptmxmode=0666")


def cover(changes: Mapping[str, bytes | None]) -> list[str]:
    """Lay the files of a task over the repository, for this process and its forks. Returns the layers of its boxes."""
    if not changes:
        return [root.WORKSPACE]
    linux.mount("tmpfs", root.SHARED, "tmpfs", PRIVATE, "mode=755")
    for folder in (root.TASK, root.REPOSITORY):
        os.mkdir(folder)
    write(root.TASK, changes, [root.WORKSPACE])
    lowers = [root.TASK, root.REPOSITORY]
    linux.mount(root.WORKSPACE, root.REPOSITORY, None, linux.MS_BIND)
    # Boxes have an overlay of these layers and not of this one: kernels don't stack them deeper than two.
    linux.mount("overlay", root.WORKSPACE, "overlay", PRIVATE, f"lowerdir={':'.join(lowers)},userxattr")
    return lowers


def _overlay(lowers: Sequence[str], changes: Mapping[str, bytes | None]) -> None:
    """Cover the workspace with `lowers` and a writable layer over them that holds the changes."""
    work = f"{root.LAYER}/work"
    os.mkdir(root.UPPER)
    os.mkdir(work)
    with files.refusing("a changed file", ""):
        write(root.UPPER, changes, lowers)
    options = f"lowerdir={':'.join(lowers)},upperdir={root.UPPER},workdir={work},userxattr"
    linux.mount("overlay", root.WORKSPACE, "overlay", PRIVATE, options)
    for path, data in changes.items():
        if data is None:
            # Another change may have put a folder in the place of the file, or of a folder above it a file.
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
                os.unlink(f"{root.WORKSPACE}/{path}")


def _layer(place: str) -> None:
    """Cover a folder of the image with a writable layer."""
    upper, work = (f"{root.LAYER}/image{place}/{name}" for name in ("upper", "work"))
    os.makedirs(upper)
    os.mkdir(work)
    os.chmod(upper, stat.S_IMODE(os.stat(place).st_mode))
    linux.mount("overlay", place, "overlay", PRIVATE, f"lowerdir={place},upperdir={upper},workdir={work},userxattr")


def write(layer: str, changes: Mapping[str, bytes | None], lowers: Sequence[str]) -> None:
    """Write the files of a layer, with the times and modes of the files that they replace."""
    for path, data in changes.items():
        if data is None:
            continue
        os.makedirs(os.path.dirname(f"{layer}/{path}"), exist_ok=True)
        with open(f"{layer}/{path}", "wb") as file:
            file.write(data)
        for lower in lowers:
            with contextlib.suppress(OSError):
                old = os.stat(f"{lower}/{path}", follow_symlinks=False)
                if stat.S_ISREG(old.st_mode):
                    os.chmod(f"{layer}/{path}", stat.S_IMODE(old.st_mode) & 0o777)
                    os.utime(f"{layer}/{path}", ns=(old.st_atime_ns, old.st_mtime_ns))
                break


def confine(limits: dict[str, Any], program: bytes, user: int | None = None) -> None:
    """Resource limits, no capabilities, the system-call filter; then this process is the box, as `user` if given.

    limits["contained"]: it shows the limits and bounds of a container's process (None: not), as far as they hold
    nothing: "grouped", where control groups hold memory and processes; else "alone".
    """
    contained = limits.get("contained")
    if user is not None:
        os.seteuid(0)  # a server of files acts as the user
    if os.path.isdir("/proc/self"):  # a verifier has none
        linux.offer_to_the_kernel(1000)  # before the server of the box, which is to outlive the box
    os.umask(0o022)
    os.chdir(root.WORKSPACE)
    hard = {
        resource.RLIMIT_AS: limits["addresses"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_FSIZE: limits["disk"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 256 if contained is None else 1024,
    }
    if contained == "grouped":
        del hard[resource.RLIMIT_AS], hard[resource.RLIMIT_FSIZE]
        hard[resource.RLIMIT_NPROC] = 4096
    if limits["seconds"]:
        hard[resource.RLIMIT_CPU] = int(limits["seconds"]) + 2
    for kind, value in hard.items():
        resource.setrlimit(kind, (value, value))
    if contained is None:
        linux.drop_privileges(user)
        linux.install_filter(program)
    else:  # no_new_privs would show; without set-user-id files and file capabilities, exec(2) gives none anyway
        linux.install_filter(program)
        linux.drop_privileges(user, contained=True)


def close_files() -> None:
    """Leave this process, which has all rights in its namespace, no file that it can change but those in /tmp, and
    none of /proc, through which memory can be written."""
    linux.offer_to_the_kernel(1000)
    linux.unshare(linux.NEWNS)
    for folder in (root.WORKSPACE, root.LAYER, f"/home/{root.user}", "/dev/shm"):
        linux.set_attributes(folder, linux.MS_RDONLY)
    linux.mount("tmpfs", "/proc", "tmpfs", PRIVATE | linux.MS_RDONLY, "size=4k,mode=555")


def decode(payload: bytes) -> tuple[dict[str, Any], dict[str, bytes | None]]:
    """A request and its change set: a length, JSON with the sizes of files, and the files."""
    end = 4 + struct.unpack_from("<I", payload)[0]
    request = json.loads(payload[4:end])
    changes: dict[str, bytes | None] = {}
    for path, size in request["changes"]:
        changes[path] = None if size is None else payload[end : end + size]
        end += size or 0
    return request, changes


def read_all(fd: int) -> bytes:
    """The whole content of an open file."""
    parts = []
    offset = 0
    while part := os.pread(fd, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def send(
    connection: socket.socket, head: dict[str, Any], body: Sequence[bytes] = (), descriptors: Sequence[int] = ()
) -> None:
    """A length-prefixed JSON head in UTF-8, followed by `head["bytes"]` raw bytes. Descriptors go along with the first
    byte. The owner refuses a head that is no UTF-8, so file names travel in the body."""
    text = json.dumps(head | {"bytes": sum(map(len, body))}, ensure_ascii=False).encode("utf-8", "replace")
    data = struct.pack("<I", len(text)) + text
    if descriptors:
        data = data[socket.send_fds(connection, [data], descriptors) :]
    for part in body:
        if len(data) + len(part) > PART:
            connection.sendall(data)
            data = b""
        data += part
    connection.sendall(data)
