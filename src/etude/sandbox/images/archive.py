"""Images in archives: the format of `docker save` and the OCI image layout, and their layers.

Formats: https://github.com/opencontainers/image-spec (image-layout.md, manifest.md, layer.md) and, for docker's
manifest.json, https://github.com/moby/docker-image-spec.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from etude.errors import UserError

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_OPAQUE, _WHITEOUT = ".wh..wh..opq", ".wh."
MAX_JSON = 16 << 20
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


@dataclass(frozen=True)
class ArchivedImage:
    """One image of an archive.

    digest: of its configuration, "sha256:..." (the id that docker and podman show), which names those of its layers.
    layers: members of the archive, lowest first; `contents` the digests of their uncompressed bytes.
    environment: variables that the image sets.
    """

    digest: str
    layers: tuple[str, ...]
    contents: tuple[str, ...]
    environment: dict[str, str]


class ImageArchive:
    """An open archive of images. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raises UserError for a file that is no archive."""
        self.path = path
        try:
            self._tar = tarfile.open(path)  # noqa: SIM115  # closed by __exit__
            self._members = {os.path.normpath(member.name): member for member in self._tar}
        except (OSError, tarfile.TarError, EOFError) as e:
            reason = str(e).partition(":")[0]
            raise UserError(
                f"{path} is no archive of an image ({reason}); make one with `podman save` or `skopeo copy`."
            ) from None

    def __enter__(self) -> ImageArchive:
        return self

    def __exit__(self, *error: object) -> None:
        self._tar.close()

    def image(self) -> ArchivedImage:
        """The image of this machine's architecture. Raises UserError if there is none, or several."""
        if "manifest.json" in self._members:
            images = self._json("manifest.json")
            self._one(images, "manifest.json")
            return self._image(images[0]["Config"], images[0]["Layers"])
        if "index.json" in self._members:
            manifest = self._manifest(self._json("index.json"))
            return self._image(_blob(manifest["config"]), [_blob(layer) for layer in manifest["layers"]])
        raise UserError(
            f"{self.path} holds no image: it has neither manifest.json nor index.json. Unpack a bare root file system "
            "and name its folder, or make an image of it with `podman import`."
        )

    def _image(self, config: str, layers: Sequence[str]) -> ArchivedImage:
        data = self._data(config)
        settings = json.loads(data)
        wanted, own = _ARCHITECTURES.get(platform.machine(), platform.machine()), settings.get("architecture")
        if own not in (None, "", wanted):
            raise UserError(f"{self.path} is an image for {own}, and this machine is {wanted}.")
        pairs = (entry.partition("=") for entry in (settings.get("config") or {}).get("Env") or ())
        for layer in layers:
            if os.path.normpath(layer) not in self._members:
                raise UserError(f"{self.path} lacks the layer {layer}; save the image again.")
        contents = (settings.get("rootfs") or {}).get("diff_ids") or ()
        if len(contents) != len(layers):
            raise UserError(f"{self.path} has {len(layers)} layers and {len(contents)} digests of them; save it again.")
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        return ArchivedImage(digest, tuple(layers), tuple(contents), {name: value for name, _, value in pairs})

    def _manifest(self, index: dict[str, Any]) -> dict[str, Any]:
        """The manifest of this machine's architecture in an index, which may lead to another index."""
        wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
        fitting = [m for m in index.get("manifests", []) if m.get("platform", {}).get("architecture", wanted) == wanted]
        self._one(fitting, "index.json")
        document = self._json(_blob(fitting[0]))
        return self._manifest(document) if "manifests" in document else document

    def _one(self, images: Sequence[object], where: str) -> None:
        if len(images) != 1:
            raise UserError(f"{self.path} holds {len(images)} images for this machine ({where}); save one alone.")

    def _data(self, name: str) -> bytes:
        """A small member; the name of a blob is its digest. Raises UserError."""
        member = self._members.get(os.path.normpath(name))
        file = None if member is None or member.size > MAX_JSON else self._tar.extractfile(member)
        if file is None:
            raise UserError(f"{self.path} lacks {name}; save the image again.")
        data = file.read()
        expected = name.rpartition("blobs/sha256/")[2] if "blobs/sha256/" in name else ""
        if expected and hashlib.sha256(data).hexdigest() != expected:
            raise UserError(f"{self.path}: {name} is damaged; save the image again.")
        return data

    def _json(self, name: str) -> Any:
        try:
            return json.loads(self._data(name))
        except ValueError:
            raise UserError(f"{self.path}: {name} is not JSON; save the image again.") from None

    def unpack(self, image: ArchivedImage, folder: Path) -> None:
        """Apply all layers to an empty folder. Raises UserError for a damaged layer."""
        for name, content in zip(image.layers, image.contents, strict=True):
            member = self._members[os.path.normpath(name)]
            file = self._tar.extractfile(member)  # follows links between equal layers
            if file is None:
                raise UserError(f"{self.path}: the layer {name} is no file; save the image again.")
            hashed = _Hashed(_plain(file))
            try:
                with tarfile.open(fileobj=hashed, mode="r|") as layer:  # type: ignore[call-overload]
                    _apply(layer, folder)
                while hashed.read(1 << 20):
                    pass
            except Exception as e:  # every compression has errors of its own
                if isinstance(e, UserError) or (isinstance(e, OSError) and e.errno in _OF_THE_DISK):
                    raise
                raise UserError(f"{self.path}: the layer {name} is damaged ({e}); save the image again.") from None
            if content != f"sha256:{hashed.digest.hexdigest()}":
                raise UserError(f"{self.path}: the layer {name} is damaged (its digest differs); save the image again.")


class _Hashed:
    """A file, and the digest of the bytes that were read of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.digest.update(data)
        return data


def _blob(descriptor: dict[str, Any]) -> str:
    return "blobs/" + descriptor["digest"].replace(":", "/")


def _plain(file: IO[bytes]) -> Any:
    """A file of the uncompressed bytes of a layer."""
    head = file.read(4)
    file.seek(0)
    if head[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=file)
    if head == b"\x28\xb5\x2f\xfd":
        import zstandard  # not a dependency of the core, and few archives need it

        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file))
    return file


def _apply(layer: tarfile.TarFile, folder: Path) -> None:
    """Lay one layer over the folder; "whiteouts" delete what lower layers have."""
    made: set[str] = set()  # by this layer
    modes: list[tuple[str, tarfile.TarInfo]] = []  # of folders, set when all files lie in them
    for member in layer:
        name = os.path.normpath("/" + member.name)[1:]
        if not name or name == ".":
            continue
        parent = inside(folder, os.path.dirname(name))
        os.makedirs(parent, exist_ok=True)
        base = os.path.basename(name)
        path = f"{parent}/{base}"
        if base == _OPAQUE:
            for entry in os.listdir(parent):
                if f"{parent}/{entry}" not in made:
                    _remove(f"{parent}/{entry}")
        elif base.startswith(_WHITEOUT):
            _remove(f"{parent}/{base.removeprefix(_WHITEOUT)}")
        else:
            _extract(layer, member, folder, path, modes)
            made.add(path)
            if os.geteuid() == 0 and os.path.lexists(path):
                os.chown(path, member.uid, member.gid, follow_symlinks=False)
    for path, member in reversed(modes):
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, member.mode & 0o1777 | 0o500)
            os.utime(path, (member.mtime, member.mtime))


def _extract(
    layer: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, path: str, modes: list[tuple[str, tarfile.TarInfo]]
) -> None:
    """Make one file, folder or link. Devices and FIFOs are left out."""
    if member.isdir():
        if os.path.islink(path) or not os.path.isdir(path):
            _remove(path)
            os.mkdir(path)
        modes.append((path, member))
        return
    if not (member.isreg() or member.issym() or member.islnk()):
        return
    _remove(path)
    if member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        link = os.path.normpath("/" + member.linkname)[1:]
        target = f"{inside(folder, os.path.dirname(link))}/{os.path.basename(link)}"
        os.link(target, path, follow_symlinks=False)
    else:
        source = layer.extractfile(member)
        assert source is not None
        with open(path, "wb") as file:
            shutil.copyfileobj(source, file)
        os.chmod(path, member.mode & 0o777 | 0o400)
        os.utime(path, (member.mtime, member.mtime))


def inside(folder: Path | str, path: str) -> str:
    """The place of a path of an image in the folder of its root: links are followed as a process in that root would,
    and nothing leaves the folder. Raises UserError for a loop of links."""
    done, left, links = "", path.split("/"), 0
    while left:
        part = left.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            done = done.rpartition("/")[0]
            continue
        place = f"{folder}{done}/{part}"
        if not os.path.islink(place):
            done = f"{done}/{part}"
            continue
        links += 1
        if links > 40:
            raise UserError(f"the image has a loop of links at /{path}.")
        target = os.readlink(place)
        done = "" if target.startswith("/") else done
        left = [*target.split("/"), *left]
    return f"{folder}{done}"


def _remove(path: str) -> None:
    with_links = os.lstat(path).st_mode if os.path.lexists(path) else None
    if with_links is None:
        return
    if stat.S_ISDIR(with_links):
        shutil.rmtree(path)
    else:
        os.unlink(path)
