"""The root file system of boxes: the folders of an image, a small /dev, nothing else of the host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from . import linux

HOST = "/.host"  # the host's root, until a handler has bound the folders it needs
RUNNER = "/opt/runner"  # this folder and pytest
WORKSPACE = "/workspace"
SITE = "/site"
RUN = "/run"  # private mounts; its entries can't be listed
LAYER = "/run/box"  # the files that a box writes
UPPER = f"{LAYER}/upper"  # those of them in the work tree
SHARED = "/run/lower"  # the common files of an image's boxes: those of the task
TASK = f"{SHARED}/0"
REPOSITORY = f"{SHARED}/repository"  # without the files of the task: boxes are made on it, and never hold it
BOX_ID = 1000
USER = "user"  # its name, unless the image has an account of that number
SEARCH = (f"{WORKSPACE}/src", WORKSPACE, SITE, RUNNER)  # where Python finds modules besides its own
ROOT_ID = 199_999  # host id of the owner of an image's files, where boxes show root's
BASE_ID = 200_000  # host ids of boxes when the sandbox is started by root

# Folders at the top of an image that boxes have as they are; over the others, every box has a writable layer.
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "boot")
# Folders that boxes have of their own, whatever the image has there.
OWN = ("proc", "sys", "dev", "run", "tmp", "home", "workspace", "site", "mnt", "media", "lost+found", "opt")
layered: tuple[str, ...] = ()  # those of the others that this zygote's image has, set when it starts
user = USER  # likewise: the name of the user of boxes
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def build(image: dict[str, Any], runner: dict[str, str]) -> None:
    """Make and enter the root in this mount namespace: an image's `folder` of the host, and host paths by name in
    RUNNER. With `roots`, files of the image's root can show as such: they belong to ROOT_ID."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    new = "/tmp"  # any folder: it is covered in this namespace alone, until pivot_root
    folder = image["folder"]
    entries = [entry for entry in sorted(os.listdir(folder)) if entry not in OWN]
    if os.path.isdir(f"{folder}/opt") and not os.path.islink(
        f"{folder}/opt"
    ):  # its entries, since RUNNER lies beside them
        entries += [f"opt/{entry}" for entry in sorted(os.listdir(f"{folder}/opt"))]
    links = {entry: os.readlink(f"{folder}/{entry}") for entry in entries if os.path.islink(f"{folder}/{entry}")}
    linux.mount("tmpfs", new, "tmpfs", linux.MS_NOSUID, "mode=755,size=16m")
    home = f"/home/{image['user']}"
    for made in (HOST, WORKSPACE, SITE, RUNNER, LAYER, SHARED, "/proc", "/dev/shm", "/dev/pts", home, "/tmp"):
        os.makedirs(new + made, 0o755)
    os.makedirs(f"{new}/var/tmp")
    os.chmod(f"{new}/tmp", 0o1777)
    os.chmod(f"{new}/var/tmp", 0o1777)
    linux.pivot_root(new, new + HOST)
    os.chdir("/")
    linux.bind(f"{HOST}/proc", "/proc", read_only=False)
    users = linux.user_namespace(0, 0, ROOT_ID) if image["roots"] else None
    for entry in entries:
        if entry in links:
            os.symlink(links[entry], f"/{entry}")
        else:
            _bind(f"{HOST}{folder}/{entry}", f"/{entry}", users)
    for name, source in runner.items():
        _bind(HOST + source, f"{RUNNER}/{name}")
    _dev()
    if users is not None:
        os.close(users)
        for place in ("/", "/home", "/dev", *(f"/{link}" for link in links)):
            os.chown(place, ROOT_ID, ROOT_ID, follow_symlinks=False)


def _bind(source: str, target: str, users: int | None = None) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    if users is None:
        linux.bind(source, target)
    else:
        linux.bind_mapped(source, target, users)


_SERVICES = (  # of Debian: name, number, group, full name, home
    *("daemon:1:1:daemon:/usr/sbin", "bin:2:2:bin:/bin", "sys:3:3:sys:/dev", "sync:4:65534:sync:/bin"),
    *("games:5:60:games:/usr/games", "man:6:12:man:/var/cache/man", "lp:7:7:lp:/var/spool/lpd"),
    *("mail:8:8:mail:/var/mail", "news:9:9:news:/var/spool/news", "uucp:10:10:uucp:/var/spool/uucp"),
    *("proxy:13:13:proxy:/bin", "www-data:33:33:www-data:/var/www", "backup:34:34:backup:/var/backups"),
    *("list:38:38:Mailing List Manager:/var/list", "irc:39:39:ircd:/run/ircd", "_apt:42:65534::/nonexistent"),
    "nobody:65534:65534:nobody:/nonexistent",
)


def passwd(user: str, count: int = 0, known: str | None = None) -> str:
    """Text of /etc/passwd: the accounts `known` (None: of a distribution), services up to `count`, and the user."""
    lines = (known or _distribution()).split("\n")
    lines = [line for line in lines if line.split(":")[2:3] not in ([], [str(BOX_ID)])]
    lines += [
        _account(f"_service{n}", n, 65534, "", "/nonexistent") for n in range(100, 99 + min(401, count - len(lines)))
    ]
    return "".join(f"{line}\n" for line in [*lines, f"{user}:x:{BOX_ID}:{BOX_ID}::/home/{user}:/bin/bash"])


def _distribution() -> str:
    rows = [service.split(":") for service in _SERVICES]
    return "\n".join(["root:x:0:0:root:/root:/bin/bash", *(_account(*row) for row in rows)])


def _account(name: str, uid: object, gid: object, full: str, home: str) -> str:
    return f"{name}:x:{uid}:{gid}:{full}:{home}:{'/bin/sync' if name == 'sync' else '/usr/sbin/nologin'}"


def group(user: str, known: str | None = None) -> str:
    """Text of /etc/group for that user; the groups `known` (None: of a distribution) stay."""
    if known is None:
        rows = [service.split(":") for service in _SERVICES]
        names = [("nogroup" if name == "nobody" else name, gid) for name, uid, gid, *_ in rows if uid == gid]
        names += [("games", "60"), ("man", "12"), ("users", "100")]
        known = "root:x:0:\n" + "".join(f"{name}:x:{gid}:\n" for name, gid in names)
    lines = [line for line in known.split("\n") if line.split(":")[2:3] not in ([], [str(BOX_ID)])]
    return "".join(f"{line}\n" for line in [*lines, f"{user}:x:{BOX_ID}:"])


def _dev() -> None:
    for name in _DEVICES:
        with open(f"/dev/{name}", "w"):
            pass
        linux.mount(f"{HOST}/dev/{name}", f"/dev/{name}", None, linux.MS_BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target if name == "fd" else f"/proc/self/{target}", f"/dev/{name}")
    os.symlink("pts/ptmx", "/dev/ptmx")


def enter(
    repository: str,
    site: str | None,
    host_id: int | None,
    extra: dict[str, str],
    places: Sequence[str] = (),
    contained: bool = False,
) -> None:
    """In a handler: bind image and `extra` (target -> host folder), make the empty folders `places`, leave the host;
    the next fork is a box's pid 1. `contained`: files of an image's root are root's, where real root maps ids."""
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
    linux.become(host_id, BOX_ID, namespaces, ROOT_ID if contained and host_id is not None else None)
