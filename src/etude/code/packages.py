"""Fetches packages and their dependencies with pip: source packages pinned by digest, and wheels.

No code of a fetched package or of its dependencies is run: wheels and source packages are only unpacked. pip runs
isolated from the current folder, takes wheels alone, and gets requirements that are names and versions.
"""

import gzip
import hashlib
import lzma
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from etude.code import archives
from etude.code.declared import declared_requirements
from etude.code.lines import lines_of
from etude.errors import UserError, last_line

VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_FILE = re.compile(r"/|\.(zip|whl|tar|tar\.\w+|tgz|tbz|tlz|txz)$", re.IGNORECASE)  # pip installs such a file
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
        partial = into / f"{root.name}.partial"
        unpack_wheel(download_wheel(requirement, into / "wheels" / root.name, timeout), partial)
        partial.rename(root)
    return root


def download_wheel(requirement: str, into: Path, timeout: float = 600.0) -> Path:
    """Download the wheel of NAME==VERSION into a folder of its own, without unpacking it. `timeout` is in seconds.
    Raises UserError for a package without a wheel, and if pip fails."""
    into.mkdir(parents=True, exist_ok=True)
    _pip(["download", "--no-deps", "--only-binary=:all:", "--dest", str(into), requirement], timeout)
    (wheel,) = into.glob("*.whl")
    return wheel


def unpack(archive: Path, into: Path) -> Path:
    """Extract a source package below `into`; returns the one folder inside. Raises UserError for paths and links that
    lead outside, for devices, for an archive of more than 512 MiB and for one that holds several folders."""
    try:
        with tarfile.open(archive) as tar:
            entries = archives.contents(tar)
            if sum(file.size for file in entries.values() if file is not None) > _MAX_BYTES:
                raise UserError(f"{archive.name} unpacks to more than {_MAX_BYTES >> 20} MiB; give a smaller library.")
            archives.extract(tar, entries, into)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as e:
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


class NotInstallable(UserError):
    """A requirement that etude does not install: of a package without a wheel, or no name of the package index.
    `requirement` is the line; of a package that another one needs, that package."""

    def __init__(self, message: str, requirement: str) -> None:
        super().__init__(message)
        self.requirement = requirement


def verify(archive: Path, sha256: str) -> None:
    """Raises UserError if the digest of a file is not `sha256`."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != sha256:
        raise UserError(f"{archive.name} has sha256 {digest}, not {sha256}; check the version and the digest.")


def plain(line: str) -> str:
    """The requirement, if it is a name with versions. Raises NotInstallable for an option of pip, an address, a folder,
    and for a line that is not a requirement."""
    from packaging.requirements import InvalidRequirement, Requirement

    text = line.strip()
    where = "etude installs wheels of the package index alone"
    if text.startswith("-"):
        raise NotInstallable(f"the requirement {text!r} is an option of pip: {where}.", line)
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        if re.match(r"(\w+\+)?\w+:|\.|/|~", text):
            raise NotInstallable(f"the requirement {text!r} is an address or a folder: {where}.", line) from None
        why = f"the requirement {text!r} cannot be read; write a name and versions (PEP 508)."
        raise NotInstallable(why, line) from None
    if requirement.url is not None:
        raise NotInstallable(f"the requirement {text!r} is an address: {where}.", line)
    if _FILE.search(re.sub(r"\[[^]]*\]$", "", text.partition(";")[0].strip())):  # `name.tar.gz` is a name, too
        raise NotInstallable(f"the requirement {text!r} may be a file of the current folder: {where}.", line)
    return text


def install_dependencies(repository: Path, site: Path, timeout: float = 300.0) -> list[str]:
    """Install the requirements of the repository into `site`, which is created; returns the requirements."""
    required = declared_requirements(repository)
    install_wheels(required, site, timeout)
    return required


def install_wheels(required: Sequence[str], site: Path, timeout: float = 300.0, python: str | None = None) -> None:
    """Install wheels of requirements into the folder `site`, which is created, within `timeout` seconds. A wheel is
    unpacked, not run. `python` is the version that will import them, such as "3.13.5"; None: this one. Raises
    NotInstallable for a requirement that is not plain or has no wheel, and UserError if pip fails."""
    wanted = [plain(line) for line in required]
    site.mkdir(parents=True, exist_ok=True)
    if not wanted:
        return
    options = ["--target", str(site), "--no-compile", "--no-warn-script-location", "--only-binary", ":all:"]
    python = python or platform.python_version()
    options += [] if python == platform.python_version() else ["--python-version", python]
    _pip(["install", *options, "--", *wanted], timeout, python)
    # Scripts name this machine's interpreter; nothing in a box calls them. Start-up files would run at every start.
    shutil.rmtree(site / "bin", ignore_errors=True)
    for file in [*site.glob("*.pth"), site / "sitecustomize.py", site / "usercustomize.py"]:
        file.unlink(missing_ok=True)
    for cache in sorted(site.rglob("__pycache__")):
        shutil.rmtree(cache)


# pip itself would run the package's build to learn its metadata. Its finder knows the user's index, proxy and keys.
_FETCH = """
import sys
from pip._internal.commands.download import DownloadCommand
from pip._vendor.packaging.version import Version

name, version, target, seconds = sys.argv[1:]
command = DownloadCommand("download", "")
options, _ = command.parse_args(["--no-binary", ":all:", "--no-input", "--quiet"])
with command.main_context():
    session = command._build_session(options)
    finder = command._build_package_finder(options, session)
    links = [one.link for one in finder.find_all_candidates(name) if one.version == Version(version)]
    links = [link for link in links if link.filename.endswith(".tar.gz")]
    if not links:
        sys.exit("ERROR: no source package (.tar.gz)")
    answer = session.get(links[0].url_without_fragment, stream=True, timeout=float(seconds))
    answer.raise_for_status()
    with open(target, "wb") as file:
        for part in answer.iter_content(1 << 16):
            file.write(part)
"""


def _download(name: str, version: str, sha256: str, folder: Path, timeout: float) -> Path:
    archive = folder / f"{name}-{version}.tar.gz"
    what = f"the download of {name}=={version}"
    done = _run(["-c", _FETCH, name, version, str(archive), str(timeout)], what, timeout)
    if "ERROR: no source package" in done.stderr:
        raise UserError(f"{name}=={version} has no source package (.tar.gz); give a version that has one, or a folder.")
    if done.returncode != 0:
        reason = last_line(done.stderr, "no message")[:300]
        raise UserError(f"{what} failed ({reason}); check the network, the name and the version.")
    verify(archive, sha256)
    return archive


# pip takes wheels of --python-version, but reads markers such as `python_version < "3.13"` for the Python that runs it.
_FOR_PYTHON = """
import sys
from pip._internal.cli.main import main
from pip._vendor.packaging import markers

version, own = sys.argv.pop(1), markers.default_environment
parts = {"python_version": ".".join(version.split(".")[:2])}
parts |= dict.fromkeys(("python_full_version", "implementation_version"), version)
markers.default_environment = lambda: {**own(), **parts}
sys.exit(main())
"""


def _pip(arguments: list[str], timeout: float, python: str = platform.python_version()) -> None:
    options = ["--disable-pip-version-check", "--no-input", "--quiet"]
    command = ["-c", _FOR_PYTHON, python, *options, *arguments]
    done = _run(command, f"pip {arguments[0]}", timeout)
    if done.returncode == 0:
        return
    errors = [line for line in lines_of(done.stderr) if line.startswith("ERROR: ")] or ["ERROR: no message"]
    missing = re.search(r"No matching distribution found for (\S+)", done.stderr)
    if missing and "connection broken by" in done.stderr:  # the index was not reached
        raise UserError(
            f"pip {arguments[0]} {missing[1]} failed: the package index cannot be reached; check the network."
        )
    if missing:
        version = ".".join(python.split(".")[:2])
        raise NotInstallable(
            f"{missing[1]} has no wheel for Python {version} on the package index, and etude builds nothing on this "
            "machine; build a wheel elsewhere and name its folder in PIP_FIND_LINKS.",
            missing[1],
        )
    reason = errors[-1].removeprefix("ERROR: ").rstrip(".")
    raise UserError(f"pip {arguments[0]} failed ({reason}); check the network and the requirement.")


def _run(arguments: list[str], what: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a separate, isolated Python (-I), since a module of the current folder must not replace one of pip's."""
    command = [sys.executable, "-I", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{what} took over {timeout:.0f} s; check the network, or give a folder.") from None
