"""The root file system of boxes: the system's programs read-only, a small /etc and /dev, nothing else of the host."""

from __future__ import annotations

import os
from collections.abc import Sequence

from . import linux

HOST = "/.host"  # the host's root, until a handler has bound the folders it needs
RUNNER = "/opt/runner"  # this folder and pytest
PROGRAMS = f"{RUNNER}/bin"  # `python` and `python3`, where the interpreter has no folder in which it goes by both names
WORKSPACE = "/workspace"
SITE = "/site"
RUN = "/run"  # private mounts; its entries can't be listed
LAYER = "/run/box"  # the files that a box writes
UPPER = f"{LAYER}/upper"  # those of them in the work tree
SHARED = "/run/lower"  # the common files of an image's boxes: those of the task
TASK = f"{SHARED}/0"
REPOSITORY = f"{SHARED}/repository"  # without the files of the task: boxes are made on it, and never hold it
BOX_ID = 1000
BASE_ID = 200_000  # host ids of boxes when the sandbox is started by root

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (  # files of which none is about this machine or its users
    *("ld.so.cache", "ld.so.conf", "localtime", "timezone", "mime.types", "services", "protocols", "rpc", "networks"),
    *("bash.bashrc", "profile", "inputrc", "nanorc", "debian_version", "issue", "issue.net", "host.conf", "gai.conf"),
    *("login.defs", "magic", "deluser.conf", "adduser.conf", "debconf.conf", "xattr.conf", "e2scrub.conf"),
)
_NAMES = ("python", "python3")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def programs(interpreter: str) -> str:
    """The folder where `python` and `python3` are this interpreter: its own, or PROGRAMS. Debian's has no `python`, and
    the names may be another version's."""
    own = os.path.dirname(interpreter)
    named = all(os.path.realpath(f"{own}/{name}") == os.path.realpath(interpreter) for name in _NAMES)
    return own if named else PROGRAMS


def link_programs(interpreter: str) -> None:
    """Make the folder PROGRAMS, if the interpreter needs it."""
    if programs(interpreter) == PROGRAMS:
        os.makedirs(PROGRAMS, exist_ok=True)
        for name in _NAMES:
            os.symlink(interpreter, f"{PROGRAMS}/{name}")


def system_folders(prefix: str) -> list[str]:
    """Folders of the host that boxes have at the same path: the system's, and the Python at `prefix`."""
    folders = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    inside = any(prefix == path or prefix.startswith(path + "/") for path in _SYSTEM)
    return folders if inside else [*folders, prefix]


def build(prefix: str, interpreter: str, runner: dict[str, str]) -> None:
    """Make and enter the root in this mount namespace, with the Python at `prefix` and host paths by name in RUNNER."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    new = "/tmp"  # any folder: it is covered in this namespace alone, until pivot_root
    binds = [(path, path) for path in system_folders(prefix)]
    links = [(path, os.readlink(path)) for path in _SYSTEM if os.path.islink(path)]
    binds += [(source, f"{RUNNER}/{name}") for name, source in runner.items()]
    etc = {name: f"/etc/{name}" for name in _ETC if os.path.isfile(f"/etc/{name}")}
    linux.mount("tmpfs", new, "tmpfs", linux.MS_NOSUID, "mode=755,size=16m")
    folders = ("/proc", "/dev/shm", "/dev/pts", "/etc", "/home/user", "/tmp", "/var/tmp")
    for folder in (HOST, WORKSPACE, SITE, LAYER, SHARED, *folders):
        os.makedirs(new + folder, 0o755)
    for name, source in etc.items():
        # Resolved below the old root: /tmp there is covered by now.
        with open(source, "rb") as old, open(f"{new}/etc/{name}", "wb") as file:
            file.write(old.read())
    if os.path.isdir("/etc/alternatives"):  # links to awk, editors and pagers
        os.mkdir(f"{new}/etc/alternatives")
        for entry in os.scandir("/etc/alternatives"):
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), f"{new}{entry.path}")
    linux.pivot_root(new, new + HOST)
    os.chdir("/")
    for path, target in links:
        os.symlink(target, path)
    for source, target in binds:
        _bind(HOST + source, target)
    link_programs(interpreter)
    linux.bind(f"{HOST}/proc", "/proc", read_only=False)
    _etc()
    _dev()
    os.chmod("/tmp", 0o1777)
    os.chmod("/var/tmp", 0o1777)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    linux.bind(source, target)


def _etc() -> None:
    texts = {
        "passwd": passwd("user"),
        "group": group("user"),
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "hostname": "devbox\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "shells": "/bin/sh\n/bin/bash\n",
    }
    for name, text in texts.items():
        with open(f"/etc/{name}", "w") as file:
            file.write(text)
    os.symlink("../usr/lib/os-release", "/etc/os-release")


_SERVICES = (  # of Debian: name, number, group, full name, home
    *("daemon:1:1:daemon:/usr/sbin", "bin:2:2:bin:/bin", "sys:3:3:sys:/dev", "sync:4:65534:sync:/bin"),
    *("games:5:60:games:/usr/games", "man:6:12:man:/var/cache/man", "lp:7:7:lp:/var/spool/lpd"),
    *("mail:8:8:mail:/var/mail", "news:9:9:news:/var/spool/news", "uucp:10:10:uucp:/var/spool/uucp"),
    *("proxy:13:13:proxy:/bin", "www-data:33:33:www-data:/var/www", "backup:34:34:backup:/var/backups"),
    *("list:38:38:Mailing List Manager:/var/list", "irc:39:39:ircd:/run/ircd", "_apt:42:65534::/nonexistent"),
    "nobody:65534:65534:nobody:/nonexistent",
)


def passwd(user: str, count: int = 0) -> str:
    """Text of /etc/passwd: accounts of a distribution, of services up to `count`, and of the user."""
    rows = [service.split(":") for service in _SERVICES]
    more = range(100, 100 + min(400, count - len(rows) - 2))
    rows += [[f"_service{n}", str(n), "65534", "", "/nonexistent"] for n in more]
    services = "".join(f"{name}:x:{uid}:{gid}:{full}:{home}:{_login(name)}\n" for name, uid, gid, full, home in rows)
    return f"root:x:0:0:root:/root:/bin/bash\n{services}{user}:x:{BOX_ID}:{BOX_ID}::/home/{user}:/bin/bash\n"


def _login(name: str) -> str:
    return "/bin/sync" if name == "sync" else "/usr/sbin/nologin"


def group(user: str) -> str:
    """Text of /etc/group for that user."""
    rows = [service.split(":") for service in _SERVICES]
    names = [("nogroup" if name == "nobody" else name, gid) for name, uid, gid, *_ in rows if uid == gid]
    names += [("games", "60"), ("man", "12"), ("users", "100")]
    return "root:x:0:\n" + "".join(f"{name}:x:{gid}:\n" for name, gid in names) + f"{user}:x:{BOX_ID}:\n"


def _dev() -> None:
    for name in _DEVICES:
        with open(f"/dev/{name}", "w"):
            pass
        linux.mount(f"{HOST}/dev/{name}", f"/dev/{name}", None, linux.MS_BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target if name == "fd" else f"/proc/self/{target}", f"/dev/{name}")
    os.symlink("pts/ptmx", "/dev/ptmx")


def enter(
    repository: str, site: str | None, host_id: int | None, extra: dict[str, str], places: Sequence[str] = ()
) -> None:
    """In a handler: bind image and `extra` (target -> host folder), make the empty folders `places`, leave the host;
    the next fork is a box's pid 1."""
    linux.unshare(linux.NEWNS)
    folders = {WORKSPACE: repository} | ({SITE: site} if site is not None else {}) | extra
    for target, source in folders.items():
        os.makedirs(target, exist_ok=True)
        if host_id is None:
            linux.bind(HOST + source, target)
        else:
            linux.bind_owned(HOST + source, target, host_id)
    for place in places:
        os.makedirs(place, exist_ok=True)
    os.chmod(RUN, 0o311)  # without root, the box user owns it; the root is read-only, so it stays like this
    linux.unmount(HOST)
    linux.set_attributes("/", linux.MS_RDONLY, tree=False)
    namespaces = linux.NEWNS | linux.NEWPID | linux.NEWIPC | linux.NEWUTS | linux.NEWNET | linux.NEWCGROUP
    linux.become(host_id, BOX_ID, namespaces)
