"""The sources of training text: folders, and pinned, permissively licensed packages.

Every source is recorded with its exact version and the licence that its own metadata declares. A source without a
permissive licence is refused, so a corpus holds only text that may be used and redistributed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.code import fetch_wheel, is_permissive, metadata_licence
from etude.code.functions import decoded
from etude.errors import UserError


@dataclass(frozen=True)
class PackageSource:
    """One package: `root` holds its Python files, `licence` is what its metadata declares."""

    name: str
    version: str
    licence: str
    root: Path


@dataclass(frozen=True)
class File:
    """One Python file: `path` is relative to the source's root, with forward slashes."""

    source: str
    path: str
    text: str


def fetch_source(requirement: str, directory: Path) -> PackageSource:
    """Download one pinned wheel (`name==version`), unpack it below `directory` and read its licence. A wheel that is
    already unpacked is used again. No code of the package is run. Raises UserError if the requirement is not pinned or
    the licence is not permissive."""
    root = fetch_wheel(requirement, directory)
    files = sorted(root.glob("*.dist-info/METADATA"))
    licence = metadata_licence(files[0].read_text(encoding="utf-8", errors="replace")) if files else ""
    if not is_permissive(licence):
        raise UserError(f"corpus source {requirement} declares licence {licence!r}, which is not permissive; remove it")
    name, _, version = requirement.partition("==")
    return PackageSource(name, version, licence, root)


def files(source: PackageSource) -> Iterator[File]:
    """Every Python file of a source that decodes, in sorted order so that a corpus is the same on every machine."""
    for path in sorted(source.root.rglob("*.py")):
        relative = path.relative_to(source.root)
        if "site-packages" in relative.parts or "dist-packages" in relative.parts:
            continue
        try:
            text = decoded(path.read_bytes())
        except (ValueError, OSError):
            continue
        yield File(source.name, relative.as_posix(), text)
