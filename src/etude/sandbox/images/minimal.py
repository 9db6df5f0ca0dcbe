"""The default image of boxes: a small root made from files of this machine.

The image has this interpreter with its standard library, the usual programs of a shell, git, and Node if installed. The
image has no package: no site-packages, dist-packages, wheels of ensurepip or node_modules, since any of them may hold a
copy of the library under test. Further programs are added by name, with the files of their Debian packages.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import blake3

from etude.code import lines_of
from etude.errors import UserError
from etude.sandbox.guest import root

_INTERPRETER: str = sys._base_executable  # type: ignore[attr-defined]  # outside of any virtual environment
_USUAL = (
    *("sh", "bash", "env", "getent", "locale", "grep", "egrep", "fgrep", "sed", "awk", "mawk", "gawk", "find", "xargs"),
    *("diff", "cmp", "diff3", "sdiff", "patch", "tar", "gzip", "gunzip", "zcat", "bzip2", "bunzip2", "xz", "unxz"),
    *("zip", "unzip", "less", "more", "which", "file", "make", "git", "node", "getopt", "column", "rev", "hexdump"),
    *("ps", "pgrep", "pkill", "top", "free", "uptime", "pwdx", "kill", "hostname", "flock", "setsid", "script", "tput"),
    *("clear", "reset", "tset", "infocmp", "toe", "logger", "mountpoint", "lscpu", "watch", "w", "pidof", "strings"),
    # coreutils
    *(
        "[",
        "arch",
        "b2sum",
        "base32",
        "base64",
        "basename",
        "basenc",
        "cat",
        "chgrp",
        "chmod",
        "chown",
        "cksum",
        "comm",
    ),
    *(
        "cp",
        "csplit",
        "cut",
        "date",
        "dd",
        "df",
        "dir",
        "dircolors",
        "dirname",
        "du",
        "echo",
        "expand",
        "expr",
        "factor",
    ),
    *("false", "fmt", "fold", "groups", "head", "hostid", "id", "install", "join", "link", "ln", "logname", "ls"),
    *("md5sum", "mkdir", "mkfifo", "mknod", "mktemp", "mv", "nice", "nl", "nohup", "nproc", "numfmt", "od", "paste"),
    *("pathchk", "pinky", "pr", "printenv", "printf", "ptx", "pwd", "readlink", "realpath", "rm", "rmdir", "runcon"),
    *("seq", "sha1sum", "sha224sum", "sha256sum", "sha384sum", "sha512sum", "shred", "shuf", "sleep", "sort", "split"),
    *("stat", "stdbuf", "stty", "sum", "sync", "tac", "tail", "tee", "test", "timeout", "touch", "tr", "true"),
    *("truncate", "tsort", "tty", "uname", "unexpand", "uniq", "unlink", "users", "vdir", "wc", "who", "whoami", "yes"),
)
_FOLDERS = (
    "/usr/lib/locale/C.utf8",
    "/usr/share/zoneinfo",
    "/usr/share/terminfo",
    "/usr/share/git-core",
    "/lib/terminfo",
)
_PLACES = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
_ETC = (  # files of which none is about this machine or its users
    *("ld.so.cache", "ld.so.conf", "localtime", "timezone", "mime.types", "services", "protocols", "rpc", "networks"),
    *("bash.bashrc", "profile", "inputrc", "nanorc", "debian_version", "issue", "issue.net", "host.conf", "gai.conf"),
    *("login.defs", "magic", "deluser.conf", "adduser.conf", "debconf.conf", "xattr.conf", "e2scrub.conf"),
)
_LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # links into /usr on most machines
# Libraries that wheels and addons of Node expect of any system (PEP 600), if no program needs them itself.
_EXPECTED = (
    *("libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2", "libnsl.so.1"),
    *("libgcc_s.so.1", "libstdc++.so.6", "libatomic.so.1", "libz.so.1"),
)
_NO_LIBRARY = frozenset({"site-packages", "dist-packages", "ensurepip", "idlelib", "turtledemo", "lib2to3"})


class MinimalImage:
    """The files of a minimal image. `files`: path in the image, without the first slash -> path of this machine."""

    def __init__(self, programs: Sequence[str]) -> None:
        """The usual programs and `programs`. Raises UserError for one that is not installed here."""
        self.files: dict[str, str] = {}
        self._prefix = os.path.realpath(sys.base_prefix)
        self._library = os.path.realpath(os.path.dirname(os.__file__))
        self._wanted = programs

    def key(self) -> str:
        """Changes with the programs, the interpreter and the libraries of this machine, and with this module."""
        digest = blake3.blake3(Path(__file__).read_bytes() + repr((sys.version, self._prefix, self._wanted)).encode())
        paths = [_INTERPRETER, self._library, "/etc/ld.so.cache", "/usr/lib/os-release", "/var/lib/dpkg/status"]
        for path in [*paths, *filter(None, map(_place, (*_USUAL, *self._wanted)))]:
            if os.path.exists(path):
                known = os.stat(path)
                digest.update(f"{path} {known.st_size} {known.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def build(self, folder: Path) -> None:
        """Copy all files into an empty folder. Raises UserError."""
        self._plan()
        for name in _LINKED:
            if os.path.islink(f"/{name}"):
                os.symlink(os.readlink(f"/{name}"), folder / name)
        for path, source in sorted(self.files.items()):
            _copy(source, folder / path)
        _etc(folder)
        _python(folder, self._interpreter())

    def _interpreter(self) -> str:
        """The interpreter's place in the image. An interpreter of its own prefix, which may be in a home, gets
        /usr/local."""
        name = os.path.basename(os.path.realpath(_INTERPRETER))
        return f"/usr/bin/{name}" if self._prefix == "/usr" else f"/usr/local/bin/{name}"

    def _plan(self) -> None:
        for program in _USUAL:
            if (path := _place(program)) is not None:
                self._add(path)
        for folder in (*_FOLDERS, _git_folder()):
            self._tree(folder, lambda _: True)
        self._add_python()
        for program in self._wanted:
            self._more(program)
        self._add("/usr/lib/os-release")
        self._libraries()

    def _more(self, program: str) -> None:
        """A further program, with the files of its package and of those that the package needs."""
        if program == "pip":
            self._add_pip()
            return
        path = _place(program)
        if path is None:
            raise UserError(
                f"sandbox.programs: {program} is not installed on this machine; install it, or leave it out."
            )
        self._add(path)
        for file in _package_files(os.path.realpath(path)):
            if os.path.islink(file) or os.path.isfile(file):
                self._add(file)

    def _add_pip(self) -> None:
        """The package pip, at which `python3 -m pip` finds it: Debian's interpreter has folders of its own."""
        version = os.path.basename(self._library)
        places = (f"{self._library}/site-packages/pip", "/usr/lib/python3/dist-packages/pip")
        place = next((place for place in places if os.path.isdir(place)), None)
        if place is None:
            raise UserError(
                "pip is not installed beside this interpreter, and boxes with sandbox.index need it; install pip "
                'there, or name another installer: sandbox.programs = ["uv"].'
            )
        packages = "dist-packages" if self._prefix == "/usr" else "site-packages"
        self._tree(place, lambda _: True, f"/usr/local/lib/{version}/{packages}/pip")

    def _add_python(self) -> None:
        self.files[self._interpreter()[1:]] = os.path.realpath(_INTERPRETER)
        place = self._library if self._prefix == "/usr" else f"/usr/local/lib/{os.path.basename(self._library)}"
        self._tree(self._library, _of_library, place)

    def _add(self, path: str) -> None:
        """Add a file; of a link, the files that the link leads to."""
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if path[1:] in self.files or path[1:] in _LINKED:
            return
        self.files[path[1:]] = path
        if os.path.islink(path):
            target = os.path.join(os.path.dirname(path), os.readlink(path))
            if os.path.isfile(target) or os.path.islink(target):
                self._add(target)

    def _tree(self, folder: str, wanted: Callable[[str], bool], place: str | None = None) -> None:
        """Add the files below a folder whose path in the folder is `wanted`, at `place` in the image."""
        if not folder:
            return
        folder = os.path.realpath(folder)
        for parent, folders, names in os.walk(folder):
            inner = os.path.relpath(parent, folder)
            folders[:] = [name for name in folders if wanted(os.path.normpath(f"{inner}/{name}/"))]
            for name in (*names, *(entry for entry in folders if os.path.islink(f"{parent}/{entry}"))):
                path = os.path.normpath(f"{inner}/{name}")
                if wanted(path):
                    self.files.setdefault(f"{place or folder}/{path}"[1:], f"{parent}/{name}")
                    if os.path.islink(f"{parent}/{name}") and os.path.isfile(f"{parent}/{name}"):
                        self._add(os.path.join(parent, os.readlink(f"{parent}/{name}")))

    def _libraries(self) -> None:
        """Add the shared libraries of all programs, also those outside of the system's folders."""
        objects = sorted({source for source in self.files.values() if _is_object(source)})
        for start in range(0, len(objects), 400):
            command = ["ldd", *objects[start : start + 400]]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            for library in sorted(set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", done.stdout, re.MULTILINE))):
                if library.startswith(("/usr/", "/lib")) and not library.startswith("/usr/local/"):
                    self._add(library)
                    beside = os.path.dirname(library)
                    for name in _EXPECTED if os.path.basename(library) == "libc.so.6" else ():
                        if os.path.exists(f"{beside}/{name}"):
                            self._add(f"{beside}/{name}")
                else:  # on the loader's own path in the image
                    self.files.setdefault(f"usr/lib/{os.path.basename(library)}", os.path.realpath(library))


def _of_library(path: str) -> bool:
    """Whether the standard library of boxes has this file or folder: no packages, no tests but their helpers."""
    parts = path.split("/")
    if parts[0] in _NO_LIBRARY or parts[0].startswith("config-"):
        return False
    if parts[0] == "test":
        return len(parts) == 1 or parts[1] in ("__init__.py", "support")
    return not any(part in ("test", "tests") for part in parts)


def _place(program: str) -> str | None:
    return next((path for place in _PLACES if os.access(path := f"{place}/{program}", os.X_OK)), None)


def _git_folder() -> str:
    """The folder of git's own programs; empty without git."""
    if _place("git") is None:
        return ""
    done = subprocess.run(["git", "--exec-path"], capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


def _is_object(path: str) -> bool:
    """Whether a file is a program or library in ELF."""
    if os.path.islink(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def _package_files(path: str) -> Iterator[str]:
    """The files of the Debian package that holds a file, of those that this one recommends, and of all that they
    need."""
    if shutil.which("dpkg-query") is None:
        return

    def query(*words: str) -> str:
        return subprocess.run(["dpkg-query", *words], capture_output=True, text=True, timeout=60).stdout

    holders = query("--search", path).partition(": ")[0].split(", ")
    waiting, seen = [name.partition(":")[0] for name in holders if name], set[str]()
    waiting += [other for name in waiting for other in _names(query("--show", "--showformat=${Recommends}", name))]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        yield from lines_of(query("--listfiles", name))
        waiting += _names(query("--show", "--showformat=${Depends}, ${Pre-Depends}", name))


def _names(relations: str) -> list[str]:
    """The first alternatives of a field of a package, such as "libc6 (>= 2.34), gcc | clang"."""
    parts = (part.split("|")[0].split("(")[0].split(":")[0].strip() for part in relations.split(","))
    return [part for part in parts if part]


def _copy(source: str, target: Path) -> None:
    """Copy a file with its times and mode, or a link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    shutil.copyfile(source, target)
    known = os.stat(source)
    target.chmod(stat.S_IMODE(known.st_mode) & 0o755 | 0o444)
    os.utime(target, ns=(known.st_atime_ns, known.st_mtime_ns))


def _etc(folder: Path) -> None:
    etc = folder / "etc"
    etc.mkdir(exist_ok=True)
    for name in _ETC:
        if os.path.isfile(f"/etc/{name}") and not (etc / name).exists():
            (etc / name).write_bytes(Path("/etc", name).read_bytes())
    texts = {
        "passwd": root.passwd("user"),
        "group": root.group("user"),
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "hostname": "devbox\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "shells": "/bin/sh\n/bin/bash\n",
    }
    for name, text in texts.items():
        (etc / name).write_text(text)
    if not (etc / "os-release").exists():
        (etc / "os-release").symlink_to("../usr/lib/os-release")


def _python(folder: Path, interpreter: str) -> None:
    """The names of the interpreter in the folder that boxes find first."""
    names: Iterable[str] = ("python", "python3")
    (folder / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    for name in names:
        place = folder / "usr/local/bin" / name
        place.unlink(missing_ok=True)
        place.symlink_to(interpreter)
