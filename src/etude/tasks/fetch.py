"""Bring a library and its dependencies in, through pip: the library as a source package pinned by its digest."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from configparser import ConfigParser
from configparser import Error as ConfigError
from pathlib import Path

from etude.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_MAX_BYTES = 512 << 20  # of an unpacked package; a small archive may hold an endless file


def fetch_library(name: str, version: str, sha256: str, into: Path, timeout: float = 180.0) -> Path:
    """Download the source package NAME==VERSION, verify it, and unpack it below `into`; the repository's folder.

    A folder that an earlier call unpacked is used again. Raises UserError if the package can't be had or is another.
    """
    if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise UserError(f"{name}=={version} needs a plain name, a version and a sha256 of 64 hex digits.")
    target = into / f"{name}-{version}-{sha256[:12]}"
    if target.is_dir():
        return target / f"{name}-{version}"
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".fetch-") as scratch:
        archive = _download(name, version, sha256, Path(scratch), timeout)
        unpacked = _unpack(archive, Path(scratch) / "unpacked")
        unpacked.rename(unpacked.with_name(f"{name}-{version}"))
        unpacked.parent.rename(target)
    return target / f"{name}-{version}"


def fetch_npm(name: str, version: str, integrity: str, into: Path, timeout: float = 180.0) -> Path:
    """The same for a package of npm, whose digest is the field `integrity` ("sha512-..." in base 64).

    `npm pack` runs nothing of the package. Raises UserError as `fetch_library` does, or if npm is missing.
    """
    if not re.fullmatch(r"(@[a-z0-9._-]+/)?[a-z0-9._-]+", name) or not _VERSION.fullmatch(version):
        raise UserError(f"{name}@{version} is not the name and version of an npm package.")
    target = into / f"{name.replace('/', '-').lstrip('@')}-{version}"
    if target.is_dir():
        return target
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".fetch-") as scratch:
        npm(["pack", "--ignore-scripts", f"{name}@{version}"], Path(scratch), timeout)
        archives = sorted(Path(scratch).glob("*.tgz"))
        digest = base64.b64encode(hashlib.sha512(archives[0].read_bytes()).digest()).decode() if archives else ""
        if f"sha512-{digest}" != integrity:
            raise UserError(f"{name}@{version} has integrity sha512-{digest}, not {integrity}; check both.")
        _unpack(archives[0], Path(scratch) / "unpacked").rename(target)
    return target


def npm(arguments: list[str], folder: Path, timeout: float) -> None:
    """Run npm in `folder`; the caller forbids scripts. Raises UserError with its last line of error."""
    if shutil.which("npm") is None:
        raise UserError("npm is not installed; install Node.js, or leave JavaScript repositories out.")
    command = ["npm", *arguments, "--no-audit", "--no-fund", "--loglevel=error"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"npm {arguments[0]} took over {timeout:.0f} s; check the network.") from None
    if done.returncode != 0:
        reason = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["no message"]
        said = "; ".join(line.strip()[:200] for line in reason[:2])
        raise UserError(f"npm {arguments[0]} failed ({said}); check the network and the package.")


def unpack(archive: Path, sha256: str, into: Path) -> Path:
    """Unpack a source package at hand below `into` after checking its digest; the repository's folder."""
    _verify(archive, sha256)
    into.mkdir(parents=True, exist_ok=True)
    return _unpack(archive, into)


def dependencies(repository: Path) -> list[str]:
    """Requirements that the repository's pyproject.toml or setup.cfg declares; empty if neither does."""
    project = read_project(repository)
    declared = project.get("dependencies")
    if isinstance(declared, list):
        return [str(requirement) for requirement in declared]
    config = ConfigParser(interpolation=None)
    try:
        config.read(repository / "setup.cfg", encoding="utf-8")
    except (ConfigError, UnicodeDecodeError) as e:
        raise UserError(f"{repository / 'setup.cfg'} cannot be read ({str(e).splitlines()[0]}); repair it.") from None
    return [line for line in config.get("options", "install_requires", fallback="").splitlines() if line.strip()]


def install_dependencies(repository: Path, site: Path, timeout: float = 300.0) -> list[str]:
    """Install what the repository requires into `site`, which is created, and return the requirements."""
    site.mkdir(parents=True, exist_ok=True)
    required = dependencies(repository)
    install(required, site, timeout)
    return required


def install(required: Sequence[str], site: Path, timeout: float = 300.0, wheels: bool = False) -> None:
    """Install requirements into the folder `site`; only `wheels`, which run no code while they are installed."""
    if not required:
        return
    only = ["--only-binary", ":all:"] if wheels else []
    _pip(["install", "--target", str(site), "--no-compile", "--no-warn-script-location", *only, *required], timeout)
    # Scripts name this machine's interpreter; nothing in a box calls them.
    shutil.rmtree(site / "bin", ignore_errors=True)
    for cache in sorted(site.rglob("__pycache__")):
        shutil.rmtree(cache)


def read_project(repository: Path) -> dict[str, object]:
    """The [project] table of pyproject.toml; empty if there is none. Raises UserError if it is not TOML."""
    path = repository / "pyproject.toml"
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path} cannot be read ({e}); repair it.") from None


def _download(name: str, version: str, sha256: str, folder: Path, timeout: float) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{name}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
    # Only this package must be a source package: building its build tools from source would take minutes.
    arguments = ["download", "--no-deps", "--no-binary", name, "--require-hashes"]
    _pip([*arguments, "-r", str(requirements), "-d", str(folder / "download")], timeout)
    archives = sorted((folder / "download").glob("*.tar.gz"))
    if len(archives) != 1:
        raise UserError(f"{name}=={version} has no source package (.tar.gz); give a version that has one, or a folder.")
    _verify(archives[0], sha256)
    return archives[0]


def _verify(archive: Path, sha256: str) -> None:
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise UserError(f"{archive.name} has sha256 {found}, not {sha256}; check the version and the digest.")


def _unpack(archive: Path, into: Path) -> Path:
    """Extract with tarfile's data filter (no absolute paths, links outside, devices); the one folder inside."""
    try:
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
            if sum(member.size for member in members) > _MAX_BYTES:
                raise UserError(f"{archive.name} unpacks to more than {_MAX_BYTES >> 20} MiB; give a smaller library.")
            tar.extractall(into, members, filter="data")
    except tarfile.TarError as e:
        raise UserError(f"{archive.name} cannot be unpacked safely ({e}); use another package.") from None
    folders = [path for path in into.iterdir() if path.is_dir()]
    if len(folders) != 1:
        raise UserError(f"{archive.name} is not a source package: it holds {len(folders)} folders instead of one.")
    return folders[0]


def _pip(arguments: list[str], timeout: float) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"pip {arguments[0]} took over {timeout:.0f} s; check the network, or give a folder.") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or ["ERROR: no message"]
        reason = errors[-1].removeprefix("ERROR: ").rstrip(".")
        raise UserError(f"pip {arguments[0]} failed ({reason}); check the network and the requirement.")
