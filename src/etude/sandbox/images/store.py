"""The cache of unpacked images, and the choice of an image by the table [sandbox].

Below the user's cache, `images/DIGEST/root` is the root folder of an image and `images/DIGEST/image.json` has the rest;
`images/known/KEY` names the digest of a source that has not changed since. A folder appears whole or not at all, and is
never changed; it may be deleted while nothing uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import blake3
import msgspec

from etude.code import lines_of
from etude.config import NamespaceSandboxConfig, cache
from etude.errors import UserError
from etude.sandbox.guest import root
from etude.sandbox.images.archive import ImageArchive, inside
from etude.sandbox.images.minimal import MinimalImage

MINIMAL = "minimal"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CHUNK = 1 << 20
_YOUNG = 60.0  # seconds


@dataclass(frozen=True)
class RootImage:
    """An unpacked image.

    name: "minimal", or the path of the archive or folder. `digest` names the content.
    folder: the root; never changed.
    environment: variables that the image sets.
    python: the path of python3 in the image.
    writable: folders at the top of the root that every box has a writable layer over.
    user: name of the account of the user of boxes, whose home folder in the image is /home/NAME, if there is one.
    """

    name: str
    digest: str
    folder: Path
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)
    writable: tuple[str, ...] = ()
    user: str = root.USER

    @property
    def path(self) -> str:
        """The variable PATH of its processes."""
        return self.environment.get("PATH", PATH)


class _Facts(msgspec.Struct, frozen=True):
    environment: dict[str, str] = {}
    user: str = root.USER


def find_image(config: NamespaceSandboxConfig) -> RootImage:
    """The image of a configuration, made or unpacked if this is its first use. Raises UserError."""
    if config.image is None:
        made = MinimalImage(_programs(config))
        digest = _known(made.key(), lambda: _store(made.build))
        return _opened(MINIMAL, _without(MINIMAL, digest, config.exclude), own=True)
    source = Path(config.image)
    try:
        key = _key(source)
    except OSError as e:
        raise UserError(
            f"sandbox.image: {source} cannot be read ({e.strerror}); name an archive or a folder of this machine, or "
            'set sandbox.type = "podman" for an image of its store.'
        ) from None
    digest = _known(key, lambda: _imported(source))
    return _opened(str(source), _without(str(source), digest, config.exclude), own=False)


def _programs(config: NamespaceSandboxConfig) -> tuple[str, ...]:
    """The programs that are added to the minimal image: with a package index, one that installs from it."""
    if config.index is None or {"pip", "uv"} & set(config.programs):
        return config.programs
    return (*config.programs, "pip")


def saved_image(key: str, save: Callable[[Path], None]) -> Path:
    """The root folder of an image that a container engine has. `save` writes its archive to a path, unless the image
    of that key is known. Raises UserError."""

    def imported() -> str:
        with _unfinished() as work:
            save(Path(work, "image.tar"))
            return _imported(Path(work, "image.tar"))

    return _images() / _known(key, imported) / "root"


def _opened(name: str, digest: str, own: bool) -> RootImage:
    folder = _images() / digest / "root"
    facts = _facts(digest)
    top = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    writable = () if own else tuple(f"/{entry}" for entry in top if entry not in (*root.SYSTEM, *root.OWN))
    path = facts.environment.get("PATH", PATH)
    places = [f"{entry}/python3" for entry in path.split(":") if entry.startswith("/")]
    python = next((place for place in places if os.path.isfile(inside(folder, place))), None)
    if python is None or not os.path.isfile(inside(folder, "/bin/bash")):
        less = ", without what is excluded," if "-without-" in digest else ""
        lacks = "python3 in its PATH" if python is None else "/bin/bash"
        raise UserError(f"the image {name}{less} has no {lacks}; boxes need python3 (3.11 or later) and bash.")
    return RootImage(name, digest, folder, python, facts.environment, writable, facts.user)


def _without(name: str, digest: str, exclude: Sequence[str]) -> str:
    """The digest of the image without some paths, whose files are those of the whole image. Raises UserError."""
    if not exclude:
        return digest
    whole = _images() / digest / "root"
    places = {inside(whole, path) for path in exclude}
    for path in exclude:
        place = inside(whole, path)
        if place == str(whole) or not path.startswith("/"):
            raise UserError(f"sandbox.exclude: {path} is no path below the root; write /usr/share/doc, for example.")
        if not os.path.lexists(place):
            raise UserError(f"sandbox.exclude: {path} is not in the image {name}.")
    reduced = f"{digest}-without-{blake3.blake3(repr(sorted(places)).encode()).hexdigest()[:16]}"
    if (_images() / reduced / "image.json").is_file():
        return reduced

    def left_out(parent: str, names: list[str]) -> list[str]:
        return [entry for entry in names if f"{parent}/{entry}" in places]

    def link(source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def build(folder: Path) -> _Facts:
        shutil.copytree(whole, folder, symlinks=True, ignore=left_out, dirs_exist_ok=True, copy_function=link)
        return _facts(digest)

    return _store(build, reduced)


def _facts(digest: str) -> _Facts:
    return msgspec.json.decode((_images() / digest / "image.json").read_bytes(), type=_Facts)


def _images() -> Path:
    return cache() / "images"


def _known(key: str, make: Callable[[], str]) -> str:
    """The digest of an unchanged source, or of the image that `make` makes."""
    note = _images() / "known" / key
    with contextlib.suppress(OSError):
        digest = note.read_text()
        if (_images() / digest / "image.json").is_file():
            return digest
    digest = make()
    note.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as file:
        file.write(digest)
    os.replace(file.name, note)
    return digest


def _store(build: Callable[[Path], _Facts | None], digest: str = "") -> str:
    """Build a root and move it to its place. Its content is its name, unless `digest` is known. Raises UserError."""
    try:
        with _unfinished() as work:
            made = Path(work, "image")
            (made / "root").mkdir(parents=True)
            os.chmod(made, 0o755)
            facts = build(made / "root") or _Facts()
            os.chmod(made / "root", 0o755)
            _give(made / "root")
            digest = digest or _digest(made / "root")
            (made / "image.json").write_bytes(msgspec.json.encode(facts))
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(made, _images() / digest)
    except OSError as e:
        where = f" ({e.filename})" if e.filename else ""
        raise UserError(
            f"the image could not be unpacked into {_images()}: {e.strerror}{where}; XDG_CACHE_HOME moves it."
        ) from None
    return digest


@contextlib.contextmanager
def _unfinished() -> Iterator[str]:
    """A folder beside the images, for one that is being made. Folders of processes that were killed are removed."""
    _images().mkdir(parents=True, exist_ok=True)
    for lock in _images().glob(".new-*/lock"):
        with contextlib.suppress(OSError), open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_mtime > _YOUNG:  # a younger one may not be locked yet
                shutil.rmtree(lock.parent, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(dir=_images(), prefix=".new-", ignore_cleanup_errors=True) as work,
        open(f"{work}/lock", "wb") as file,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)  # until this process ends
        yield work


def _give(folder: Path) -> None:
    """Where root unpacks: files outside of the system's folders belong to the user of boxes. In the system's folders,
    the user may read the files of services."""
    if os.geteuid() != 0:
        return
    for parent, folders, names in os.walk(folder):
        top = os.path.relpath(parent, folder).split("/")[0]
        for name in (*folders, *names):
            path = f"{parent}/{name}"
            known = os.lstat(path)
            if (name if top == "." else top) not in (*root.SYSTEM, *root.OWN):
                os.chown(path, root.BOX_ID, root.BOX_ID, follow_symlinks=False)
            elif known.st_uid and "home" not in (top, name) and not stat.S_ISLNK(known.st_mode):
                os.chmod(path, stat.S_IMODE(known.st_mode) | known.st_mode >> 6 & 0o5)


def _key(source: Path) -> str:
    """Changes with the archive or folder."""
    digest = blake3.blake3(os.fsencode(source.resolve()))
    for path, known in _entries(source) if source.is_dir() else [("", source.stat())]:
        facts = f"{known.st_mode} {known.st_size} {known.st_mtime_ns}"
        digest.update(os.fsencode(path) + f"\0{facts}\n".encode())
    return digest.hexdigest()


def _entries(folder: Path) -> list[tuple[str, os.stat_result]]:
    entries: list[tuple[str, os.stat_result]] = []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted((*folders, *names)):
            path = f"{parent}/{name}"
            entries.append((os.path.relpath(path, folder), os.lstat(path)))
    return entries


def _digest(folder: Path) -> str:
    """The digest of a tree's names, modes, links and contents."""
    digest = blake3.blake3()
    for path, known in _entries(folder):
        digest.update(os.fsencode(path) + f"\0{known.st_mode:o}\0".encode())
        if stat.S_ISLNK(known.st_mode):
            digest.update(os.fsencode(os.readlink(folder / path)) + b"\0")
        elif stat.S_ISREG(known.st_mode):
            digest.update(b"%d\0" % known.st_size)
            with open(folder / path, "rb") as file:
                while data := file.read(_CHUNK):
                    digest.update(data)
    return f"blake3-{digest.hexdigest()}"


def _imported(source: Path) -> str:
    """Unpack an archive, or copy a root folder; then add the user of boxes. Raises UserError."""

    if source.is_dir():

        def copied(folder: Path) -> _Facts:
            _copy(source, folder)
            return _Facts(user=_add_user(folder))

        return _store(copied)
    with ImageArchive(source) as archive:
        image = archive.image()
        digest = image.digest.replace(":", "-")
        if (_images() / digest / "image.json").is_file():
            return digest

        def unpacked(folder: Path) -> _Facts:
            archive.unpack(image, folder)
            return _Facts(image.environment, _add_user(folder))

        return _store(unpacked, digest)


def _add_user(folder: Path) -> str:
    """Give an image the user of boxes. Its own account of that number, with a home folder of its name, stays; returns
    the account's name."""
    texts = {}
    for name in ("passwd", "group"):
        path = Path(inside(folder, f"etc/{name}"))
        texts[path] = path.read_text("utf-8", "surrogateescape") if path.is_file() else None
    accounts = [line.split(":") for line in lines_of(next(iter(texts.values())) or "")]
    own = [a[0] for a in accounts if a[2:4] == [str(root.BOX_ID)] * 2 and a[5:6] == [f"/home/{a[0]}"]]
    user = own[0] if own else root.USER
    for (path, known), text in zip(texts.items(), (root.passwd, root.group), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(user, known=known), "utf-8", "surrogateescape")
    return user


def _copy(source: Path, folder: Path) -> None:
    """Copy a root folder but for devices, sockets and FIFOs, and for what lies in its /proc, /sys, /dev and /run."""

    def left_out(parent: str, names: list[str]) -> list[str]:
        top = Path(parent) == source
        kinds = {name: os.lstat(f"{parent}/{name}").st_mode for name in names}
        odd = (
            name for name, mode in kinds.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
        )
        return [*odd, *(name for name in names if top and name in ("proc", "sys", "dev", "run", "tmp"))]

    if not any((source / place).exists() for place in ("bin/sh", "usr/bin/sh")):
        raise UserError(f"sandbox.image: {source} is no root folder of an image: it has no /bin/sh.")
    try:
        shutil.copytree(source, folder, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    except shutil.Error as e:
        path, _, reason = e.args[0][0]
        raise UserError(f"sandbox.image: {path} cannot be copied ({reason}); unpack as root.") from None
    if os.geteuid() == 0:
        for path, _ in _entries(folder):
            known = os.lstat(source / path)
            os.chown(folder / path, known.st_uid, known.st_gid, follow_symlinks=False)
