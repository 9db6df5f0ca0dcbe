"""Packages and what they need, brought in by pip: source packages pinned by digest, wheels, dependencies.

Nothing of a fetched package is run: source packages and wheels are only unpacked.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from configparser import ConfigParser
from configparser import Error as ConfigError
from pathlib import Path

from etude.errors import UserError

VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_MAX_BYTES = 512 << 20  # of an unpacked package; a small archive may hold an endless file


def fetch_library(name: str, version: str, sha256: str, into: Path, timeout: float = 180.0) -> Path:
    """Download the source package NAME==VERSION, verify it and unpack it below `into`; returns its folder. A folder
    that an earlier call unpacked is used again. `timeout` is in seconds. Raises UserError if the package cannot be
    downloaded or has another digest."""
    if not _NAME.fullmatch(name) or not VERSION.fullmatch(version) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise UserError(f"{name}=={version} needs a plain name, a version and a sha256 of 64 hex digits.")
    target = into / f"{name}-{version}-{sha256[:12]}"
    if target.is_dir():
        return target / f"{name}-{version}"
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".fetch-") as scratch:
        archive = _download(name, version, sha256, Path(scratch), timeout)
        unpacked = unpack(archive, Path(scratch) / "unpacked")
        unpacked.rename(unpacked.with_name(f"{name}-{version}"))
        unpacked.parent.rename(target)
    return target / f"{name}-{version}"


def fetch_wheel(requirement: str, into: Path, timeout: float = 600.0) -> Path:
    """Download one wheel (NAME==VERSION) and unpack its Python files and metadata below `into`; returns its folder. A
    folder that an earlier call unpacked is used again. `timeout` is in seconds. Raises UserError for a requirement that
    is not pinned and for a package without a wheel."""
    name, _, version = requirement.partition("==")
    if not _NAME.fullmatch(name) or not VERSION.fullmatch(version):
        raise UserError(f"{requirement!r} is not pinned; write it as NAME==VERSION.")
    root = into / f"{name}-{version}"
    if not root.is_dir():
        wheels, partial = into / "wheels" / root.name, into / f"{root.name}.partial"
        wheels.mkdir(parents=True, exist_ok=True)
        _pip(["download", "--no-deps", "--only-binary=:all:", "--dest", str(wheels), requirement], timeout)
        for wheel in wheels.glob("*.whl"):
            unpack_wheel(wheel, partial)
        partial.rename(root)
    return root


def unpack(archive: Path, into: Path) -> Path:
    """Extract a source package below `into`; returns the one folder inside. Tarfile's data filter refuses absolute
    paths, links that lead outside and devices. Raises UserError for these, for an archive of more than 512 MiB and for
    one that holds several folders."""
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


def unpack_wheel(wheel: Path, into: Path) -> None:
    """Extract the Python files and the metadata of a wheel. Raises UserError for a member that would leave `into`."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if not member.filename.endswith((".py", ".dist-info/METADATA")):
                continue
            target = (into / member.filename).resolve()
            if not target.is_relative_to(into.resolve()):
                raise UserError(f"{wheel.name} has a member outside its own folder ({member.filename}); leave it out.")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


def verify(archive: Path, sha256: str) -> None:
    """Compare the digest of a file. Raises UserError if it is another."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != sha256:
        raise UserError(f"{archive.name} has sha256 {digest}, not {sha256}; check the version and the digest.")


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
    """Install what the repository requires into `site`, which is created; returns the requirements."""
    site.mkdir(parents=True, exist_ok=True)
    required = dependencies(repository)
    install(required, site, timeout)
    return required


def install(required: Sequence[str], site: Path, timeout: float = 300.0, wheels: bool = False) -> None:
    """Install requirements into the folder `site`, within `timeout` seconds; raises UserError if pip fails. `wheels`
    allows wheels only, which run no code while they are installed."""
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


def find_name(repository: Path) -> str:
    """Name and version, e.g. "pydash-8.1.0", from pyproject.toml, PKG-INFO or the folder's name."""
    project = read_project(repository)
    name, version = project.get("name"), project.get("version")
    info = repository / "PKG-INFO"
    if (not name or not version) and info.is_file():
        text = info.read_text(encoding="utf-8", errors="replace")
        fields = dict(re.findall(r"^(Name|Version): (\S+)$", text, re.MULTILINE))
        name, version = fields.get("Name", name), fields.get("Version", version)
    if name and version:
        return f"{name}-{version}"
    return str(name) if name else re.sub(r"[^A-Za-z0-9._-]", "-", repository.resolve().name)


def _download(name: str, version: str, sha256: str, folder: Path, timeout: float) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{name}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
    # Only this package must be a source package: building its build tools from source would take minutes.
    arguments = ["download", "--no-deps", "--no-binary", name, "--require-hashes"]
    _pip([*arguments, "-r", str(requirements), "-d", str(folder / "download")], timeout)
    archives = sorted((folder / "download").glob("*.tar.gz"))
    if len(archives) != 1:
        raise UserError(f"{name}=={version} has no source package (.tar.gz); give a version that has one, or a folder.")
    verify(archives[0], sha256)
    return archives[0]


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
