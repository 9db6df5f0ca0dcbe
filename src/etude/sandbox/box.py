"""A box as a value: an image and the files that differ from it, without a process or a mount."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from etude.sandbox.backend import Backend
from etude.sandbox.base import (
    BoxDead,
    Changes,
    Escape,
    ExecResult,
    Image,
    Limits,
    NoSpace,
    NotFound,
    NotRegular,
    TestReport,
    TooLarge,
)
from etude.sandbox.egress.policy import EgressRequest
from etude.sandbox.left_state import StateWatch
from etude.sandbox.shell import Shell

RunTests = Callable[
    [Image, Changes, Sequence[str], Path | None, Limits], Awaitable[TestReport]
]  # as `Sandbox.run_tests`

MAX_FILE_BYTES = 10 << 20  # bytes of one file
MAX_DEPTH = 64
MAX_NAME = 255
MAX_PATH = 1024  # bytes


def checked_path(path: str) -> str:
    """A normal path relative to the root ("" is the root). Raises Escape."""
    if "\0" in path or path.startswith("/"):
        raise Escape(f"{path[:80]!r} is not a path below the repository")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Escape(f"{path[:80]!r} leaves the repository")
    try:
        longest = max(map(len, map(os.fsencode, parts)), default=0)
    except UnicodeEncodeError:  # half of a surrogate pair, without a byte
        raise Escape(f"{path[:80]!r} is no path") from None
    if len(parts) > MAX_DEPTH or longest > MAX_NAME or len(os.fsencode(path)) > MAX_PATH:
        raise TooLarge(f"{path[:80]!r} is too long")
    return "/".join(parts)


class ValueBox:
    """A box that turns live at the first `exec`. Until then it reads changes over the image, and follows no links."""

    def __init__(
        self, backend: Backend, image: Image, limits: Limits, run_tests: RunTests, *, bare: bool = False
    ) -> None:
        """`backend` makes the live box, `run_tests` runs the visible tests. A `bare` box has no machine profile, no
        decoys and no way out."""
        self._backend = backend
        self._bare = bare
        self._run_tests = run_tests
        self._image = image
        self._limits = limits
        texts = dict(image.changes) if bare else {**image.decoys, **image.changes}
        self._base = {path: text.encode("utf-8", "surrogateescape") for path, text in texts.items()}
        self._base |= image.history
        self._changes: dict[str, bytes | None] = {}
        self._shell: Shell | None = None
        self._closed = False
        self._start = asyncio.Lock()

    async def read(self, path: str, max_bytes: int = 65536) -> bytes:
        """As `Box.read`."""
        self._open()
        path = checked_path(path)
        if self._shell is not None:
            return await self._shell.read(path, max_bytes)
        return self._content(path, max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """As `Box.write`."""
        self._open()
        path = checked_path(path)
        if not path:
            raise NotRegular("the repository itself is a folder")
        if len(data) > MAX_FILE_BYTES:
            raise TooLarge(f"a file has at most {MAX_FILE_BYTES} bytes")
        if self._shell is not None:
            await self._shell.write(path, data)
            return
        self._check_parents(path)
        if self._is_folder(path):
            raise NotRegular(f"{path} is a folder")
        if path not in self._layers() and self._kind(path) not in (None, stat.S_IFREG):
            raise NotRegular(f"{path} is not a regular file")
        others = sum(len(text) for name, text in self._changes.items() if text is not None and name != path)
        if others + len(data) > self._limits.disk_mb << 20:
            raise NoSpace("the disk is full")
        self._changes[path] = bytes(data)

    async def list(self, path: str) -> list[str]:
        """As `Box.list`."""
        self._open()
        path = checked_path(path)
        if self._shell is not None:
            return await self._shell.list(path)
        if not self._is_folder(path):
            exists = path in self._layers() or self._kind(path) is not None
            raise (NotRegular if exists else NotFound)(f"{path} is not a folder")
        names = set()
        if self._kind(path) == stat.S_IFDIR:
            with os.scandir(self._image.repository / path) as entries:
                names = {e.name + "/" if e.is_dir(follow_symlinks=False) else e.name for e in entries}
        prefix = f"{path}/" if path else ""
        for name, data in self._layers().items():
            if name.startswith(prefix):
                head, slash, _ = name[len(prefix) :].partition("/")
                if data is not None:
                    names.add(head + slash)
                elif not slash:
                    names.discard(head)
        return sorted(names)

    async def delete(self, path: str) -> None:
        """As `Box.delete`."""
        self._open()
        path = checked_path(path)
        if self._shell is not None:
            await self._shell.delete(path)
            return
        self._content(path, MAX_FILE_BYTES)  # raises if it cannot be read
        if path in self._base or self._kind(path) is not None:
            self._changes[path] = None
        else:
            del self._changes[path]

    async def exec(self, line: str, timeout: float) -> ExecResult:
        """As `Box.exec`; the first call makes the box live."""
        self._open()
        return await (await self._started()).exec(line, timeout)

    async def interrupt(self) -> None:
        """As `Box.interrupt`."""
        if self._shell is not None:
            await self._shell.interrupt()

    async def run_tests(self, tests: Sequence[str], timeout: float) -> TestReport:
        """As `Box.run_tests`."""
        self._open()
        limits = replace(self._limits, seconds=timeout)
        return await self._run_tests(self._image, await self.changes(), tests, None, limits)

    async def changes(self, roots: Sequence[str] = ()) -> dict[str, bytes | None]:
        """As `Box.changes`; without files that `git status` writes."""
        self._open()
        roots = () if {"", "."} & set(roots) else [root.rstrip("/") for root in roots]
        current = dict(self._changes) if self._shell is None else await self._shell.changes(roots)
        return await asyncio.to_thread(self._differing, current)  # thousands of files may be compared

    def _differing(self, changes: Changes) -> dict[str, bytes | None]:
        """The changes whose content differs from the image."""
        kept: dict[str, bytes | None] = {}
        for path, data in changes.items():
            if checked_path(path) != path:
                raise Escape(f"{path[:80]!r} is no path below the repository")
            # `git status` writes files, which are no part of the work.
            if not (self._image.history and path.startswith(".git/")) and data != self._original(path):
                kept[path] = data
        return kept

    async def watched(self) -> StateWatch:
        """Makes the box live, and watches what commands leave in it from now on. Raises BoxError."""
        self._open()
        watch = StateWatch(await self._started(), bool(self._backend.services))
        await watch.start()
        return watch

    def requests(self) -> Sequence[EgressRequest] | None:
        """As `Box.requests`."""
        if not self._backend.gated:
            return None
        return [] if self._shell is None else self._shell.requests()

    async def close(self) -> None:
        """As `Box.close`."""
        self._closed = True
        if self._shell is not None:
            await self._shell.close()

    async def _started(self) -> Shell:
        async with self._start:
            if self._shell is None:
                self._shell = await self._backend.shell(self._image, self._layers(), self._limits, bare=self._bare)
        return self._shell

    def _open(self) -> None:
        if self._closed:
            raise BoxDead("the box is closed")

    def _layers(self) -> dict[str, bytes | None]:
        return {**self._base, **self._changes}

    def _content(self, path: str, max_bytes: int) -> bytes:
        layers = self._layers()
        data = layers.get(path)
        if data is None:
            if path in layers:
                raise NotFound(f"{path} does not exist")
            self._check_parents(path)
            kind = self._kind(path)
            if kind is None and not self._is_folder(path):
                raise NotFound(f"{path} does not exist")
            if kind != stat.S_IFREG:
                raise NotRegular(f"{path} is not a regular file")
            data = _read(self._image.repository / path, max_bytes)
        if len(data) > max_bytes:
            raise TooLarge(f"{path} has more than {max_bytes} bytes")
        return data

    def _original(self, path: str) -> bytes | None:
        if path in self._base:
            return self._base[path]
        return _read(self._image.repository / path, MAX_FILE_BYTES) if self._kind(path) == stat.S_IFREG else None

    def _kind(self, path: str) -> int | None:
        """File type in the image on disk; None if there is nothing."""
        try:
            return stat.S_IFMT(os.lstat(self._image.repository / path).st_mode)
        except OSError:
            return None

    def _is_folder(self, path: str) -> bool:
        if not path or self._kind(path) == stat.S_IFDIR:
            return True
        return any(name.startswith(f"{path}/") and data is not None for name, data in self._layers().items())

    def _check_parents(self, path: str) -> None:
        layers = self._layers()
        parts = path.split("/")
        for i in range(1, len(parts)):
            parent = "/".join(parts[:i])
            kind = self._kind(parent)
            if kind == stat.S_IFLNK:
                raise Escape(f"{parent} is a link")
            if layers.get(parent) is not None or (kind not in (None, stat.S_IFDIR) and parent not in layers):
                raise NotRegular(f"{parent} is not a folder")


def _read(path: Path, max_bytes: int) -> bytes:
    """At most `max_bytes` + 1 bytes of a file, which may be replaced while it is opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(f"{path.name} does not exist") from None
    except OSError as e:
        raise NotRegular(f"{path.name}: {e.strerror}") from None
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotRegular(f"{path.name} is not a regular file")
        return file.read(max_bytes + 1)
