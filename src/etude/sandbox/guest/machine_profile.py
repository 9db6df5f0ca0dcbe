"""The looks of a live box by its machine profile: names, clocks, files of /etc and /proc, and a home folder."""

from __future__ import annotations

import contextlib
import os
import site
import socket
import sys
import time
from typing import Any

from . import linux, root

FOLDER = f"{root.SHARED}/profile"
HOMES = f"{root.LAYER}/homes"
STAMPED, STAMPED_SIZE = 300, 8 << 20  # entries, and bytes, of a tree whose files are dated anew
_PTH = "project.pth"
# Bytecode would be part of the agent's changes.
_LINES = "".join(f"{folder}\n" for folder in root.SEARCH) + "import sys; sys.dont_write_bytecode = True\n"


def prepare(profile: dict[str, Any]) -> None:
    """In the template: settle the common looks of an image's boxes, their work tree's dates included."""
    linux.call_itself(profile["init"], profile["init_name"])  # boxes, forked from this process, keep the name
    if profile["uptime"] is not None:
        _clocks(profile["uptime"])
    for path, text in _files(profile).items():
        _write(FOLDER + path, text)
    if (packages := _beside(profile)) is not None:
        _lead_to_modules(packages)
    if profile["contained"]:
        if not os.path.lexists("/etc/mtab"):
            os.symlink("/proc/mounts", f"{FOLDER}/etc/mtab")
        for parent, folders, names in os.walk(FOLDER) if roots() else ():
            for name in (".", *folders, *names):
                os.chown(f"{parent}/{name}", 0, 0, follow_symlinks=False)
    options = f"lowerdir={FOLDER}/etc:/etc,userxattr"  # without an upper layer it is read-only
    linux.mount("overlay", "/etc", "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
    if profile["checkout_age"] is not None:
        _date(time.time() - profile["checkout_age"], profile["checkout_rate"])


def settle(profile: dict[str, Any]) -> None:
    """Settle a box's own looks, in its namespaces. Python finds the modules of the work tree, and writes no
    bytecode."""
    socket.sethostname(profile["host"])
    for path in ("/proc/cmdline", "/proc/cpuinfo"):
        if os.path.exists(FOLDER + path):
            linux.bind(FOLDER + path, path)
    if not profile["contained"]:
        _home(profile)
    elif _beside(profile) is None:
        _write(f"/home/{root.user}/{_user_site()}/{_PTH}", _LINES)


def roots() -> bool:
    """Whether files of root can be made here."""
    with open("/proc/self/uid_map") as file:
        return file.readline().split()[0] == "0"


def count_from(pids: int) -> None:
    """Give the next process of this box a pid above `pids`."""
    with contextlib.suppress(OSError):  # a kernel without it: CONFIG_CHECKPOINT_RESTORE
        last = os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY)
        os.write(last, b"%d" % pids)
        os.close(last)


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def _home(profile: dict[str, Any]) -> None:
    home = f"{HOMES}/{profile['user']}"
    for name in profile["folders"]:
        os.makedirs(f"{home}/{name}")
    for name, text in profile["files"].items():
        _write(f"{home}/{name}", text)
    # The file of `pip install --user --editable`; variables of the environment would be conspicuous.
    _write(f"{home}/{_user_site()}/{_PTH}", _LINES)
    linux.mount(HOMES, "/home", None, linux.MS_BIND)


def _user_site() -> str:
    return f".local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def _beside(profile: dict[str, Any]) -> str | None:
    """The first folder of packages that the image's Python has, where a .pth file is less conspicuous than at home, and
    which virtual environments read alone."""
    if not profile["contained"] and sys.prefix == sys.base_prefix:
        return None
    return next(filter(os.path.isdir, site.getsitepackages()), None)


def _lead_to_modules(folder: str) -> None:
    """Lay a .pth file over a folder of packages."""
    _write(f"{FOLDER}/packages/{_PTH}", _LINES)
    options = f"lowerdir={FOLDER}/packages:{folder},userxattr"
    linux.mount("overlay", folder, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)


def _date(checkout: float, rate: float) -> None:
    """Date the files of the work tree, which copies them to the layer of the task."""
    work = f"{root.SHARED}/work"
    os.makedirs(root.TASK, exist_ok=True)
    os.mkdir(work)
    options = f"lowerdir={root.WORKSPACE},upperdir={root.TASK},workdir={work},userxattr"
    linux.mount("overlay", root.WORKSPACE, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
    try:
        stamp(root.WORKSPACE, checkout, rate)
    finally:
        linux.unmount(root.WORKSPACE)


def stamp(folder: str, checkout: float, rate: float) -> None:
    """Date a small tree's files as a checkout that wrote `rate` files a second; a large tree keeps its dates."""
    entries: list[str] = []
    size = 0
    for parent, folders, names in os.walk(folder):
        if ".git" in folders:
            folders.remove(".git")
            entries += [*(entry.path for entry in os.scandir(f"{parent}/.git")), f"{parent}/.git"]
        paths = [f"{parent}/{name}" for name in sorted(names)]
        size += sum(os.lstat(path).st_size for path in paths)
        entries += [*paths, parent]
        if len(entries) > STAMPED or size > STAMPED_SIZE:
            return
    entries += [folder]  # after its content, whose copying changes it
    with contextlib.suppress(PermissionError):  # without mapped owners, lower files are not the user's
        for place, path in enumerate(entries):
            when = checkout + place / rate
            os.utime(path, (when, when), follow_symlinks=False)


def _clocks(uptime: float) -> None:
    """Processes forked from now on count time since a boot that was `uptime` seconds ago: see time_namespaces(7)."""
    linux.unshare(linux.NEWTIME)
    clocks = {"monotonic": time.CLOCK_MONOTONIC, "boottime": time.CLOCK_BOOTTIME}
    lines = [f"{name} {int(uptime - time.clock_gettime(clock))} 0\n" for name, clock in clocks.items()]
    with open("/proc/self/timens_offsets", "w") as file:
        file.write("".join(lines))


def _files(profile: dict[str, Any]) -> dict[str, str]:
    user, host = profile["user"], profile["host"]
    own = f"127.0.1.1 {host}\n" if profile["known_host"] else ""
    files = {
        "/etc/hostname": f"{host}\n",
        "/etc/hosts": f"127.0.0.1 localhost\n{own}::1 localhost ip6-localhost ip6-loopback\n",
    }
    if not profile["contained"]:
        files["/etc/passwd"] = root.passwd(user, profile["accounts"], _text("/etc/passwd"))
        files["/etc/group"] = root.group(user, _text("/etc/group"))
    if profile["machine_id"]:
        files["/etc/machine-id"] = profile["machine_id"]
    if profile["kernel_line"] is not None:
        files["/proc/cmdline"] = profile["kernel_line"]
    if profile["hypervisor"] is False:
        files["/proc/cpuinfo"] = _text("/proc/cpuinfo").replace(" hypervisor", "")
    return files


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
