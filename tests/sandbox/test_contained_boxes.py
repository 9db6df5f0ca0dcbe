"""Boxes that look like containers of their image: what they show, and that they hold all the same."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from etude.config import NamespaceSandboxConfig
from etude.grading.runner import open_sandbox
from etude.sandbox.base import ExecResult, Image, Limits
from etude.sandbox.images.store import find_image
from etude.sandbox.machine_profile import ImageTerminal, container

SHOWN = """
import json, os, pwd, socket
def text(path): return open(path).read()
status = dict(line.split(":", 1) for line in text("/proc/self/status").splitlines())
account = pwd.getpwuid(os.getuid())
print(json.dumps({
    "host": socket.gethostname(), "known": socket.gethostname() in text("/etc/hosts").split(),
    "account": [account.pw_name, account.pw_dir], "home": os.environ["HOME"], "groups": os.getgroups(),
    "owners": [os.stat(path).st_uid for path in ("/", "/usr", "/etc", "/usr/bin", "/etc/passwd")],
    "status": {name: status[name].strip() for name in "NoNewPrivs Seccomp CapEff CapPrm CapBnd CapAmb".split()},
    "init": text("/proc/1/cmdline"), "environment": sorted(os.environ), "term": os.environ["TERM"],
    "limits": text("/proc/self/limits"), "ids": text("/proc/self/uid_map").split()[::3],
}))
"""
ESCAPES = """
import ctypes, errno, os, shutil, subprocess
failed = []
def refused(what, call, codes=(errno.EPERM,)):
    ctypes.set_errno(0)
    if call() >= 0 or ctypes.get_errno() not in codes: failed.append(what)
libc = ctypes.CDLL(None, use_errno=True)
refused("a user namespace", lambda: libc.unshare(0x10000000))
refused("a mount", lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None))
refused("root's id", lambda: libc.setuid(0))
refused("root's group", lambda: libc.setgid(0))
refused("supplementary groups", lambda: libc.setgroups(1, (ctypes.c_int * 1)(0)))
refused("giving a file away", lambda: libc.chown(b"/tmp", 0, 0))
refused("keyrings", lambda: libc.syscall(250, 0, -3, 0))
shutil.copy("/usr/bin/id", "/tmp/id"); os.chmod("/tmp/id", 0o6755)
if "euid" in subprocess.run(["/tmp/id"], capture_output=True, text=True).stdout: failed.append("set-user-id")
for line in open("/proc/self/mountinfo"):
    place, options = line.split()[4:6]
    if "nosuid" not in options.split(",") and not place.startswith("/dev/"): failed.append(f"{place} without nosuid")
for place in ("/run/box", "/run/lower"):
    try: os.listdir(place); failed.append(place)
    except PermissionError: pass
for path in ("/etc/passwd", "/usr/bin/id", "/usr/new", "/etc/new"):
    try: open(path, "a"); failed.append(path)
    except OSError: pass
print(failed)
"""


def play(image: Image, lines: list[str], config: NamespaceSandboxConfig | None = None) -> list[ExecResult]:
    async def lived() -> list[ExecResult]:
        async with open_sandbox(config, machine_profiles="image") as sandbox:
            box = await sandbox.create(image, Limits(memory_mb=256, disk_mb=32))
            results = [await box.exec(line, 60.0) for line in lines]
            await box.close()
            return results

    return asyncio.run(lived())


def program(text: str) -> str:
    return f"python3 - <<'END'\n{text}\nEND"


def test_a_box_shows_what_a_container_shows(library_image: Image) -> None:
    (done,) = play(library_image, [program(SHOWN)])
    assert done.rc == 0, done.output
    seen = json.loads(done.output.strip().splitlines()[-1])
    assert len(seen["host"]) == 12
    assert int(seen["host"], 16) >= 0
    assert seen["known"]
    assert (seen["account"], seen["home"]) == (["user", "/home/user"], "/home/user")
    assert seen["status"] == {
        "NoNewPrivs": "0", "Seccomp": "2", "CapBnd": "00000000800405fb",
        **dict.fromkeys(("CapEff", "CapPrm", "CapAmb"), "0" * 16),
    }  # fmt: skip
    assert seen["init"] == "sleep\0infinity\0"
    assert seen["term"] == "xterm"
    names = {"HOME", "PATH", "PWD", "SHLVL", "TERM", "_", "container", "LC_CTYPE", "OLDPWD"}
    assert not {"PYTHONPATH", "PYTHONHASHSEED", "LOGNAME"} & set(seen["environment"])
    assert names - {"LC_CTYPE", "OLDPWD"} <= set(seen["environment"])
    if os.geteuid() == 0:
        assert seen["owners"] == [0] * 5
        assert seen["groups"] == []
        assert seen["ids"] == ["0", "1000"]


def test_a_box_that_shows_no_border_holds(library_image: Image) -> None:
    memory = program("import mmap; m = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): m[i] = 1")
    escapes, killed, full, alive = play(
        library_image,
        [program(ESCAPES), memory, "head -c 40M /dev/zero > /tmp/large; stat -c %s /tmp/large", "echo alive"],
    )
    assert escapes.output.strip() == "[]"
    assert killed.rc not in (0, None)
    assert int(full.output.split()[-1]) <= 32 << 20, "the disk is full"
    assert alive.output.strip() == "alive"


def test_python_finds_the_work_tree_without_a_variable(library_image: Image) -> None:
    (done,) = play(library_image, ["python3 -c 'import sys, dependency; print(sys.dont_write_bytecode)'"])
    assert done.output.split() == ["True"]


@pytest.mark.parametrize("line", ["dev:x:1000:1000::/home/dev:/bin/bash", "dev:x:1000:1000::/srv/dev:/bin/bash"])
def test_an_images_own_account_and_home_stay(library_image: Image, tmp_path: Path, line: str) -> None:
    minimal = find_image(NamespaceSandboxConfig()).folder
    root = tmp_path / "root"
    shutil.copytree(minimal, root, symlinks=True, ignore=shutil.ignore_patterns("home"))
    for folder in ("etc", "home/dev", "tmp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "etc/passwd").write_text(f"root:x:0:0:root:/root:/bin/bash\n{line}\n")
    (root / "etc/group").write_text("root:x:0:\ndev:x:1000:\n")
    (root / "home/dev/.bashrc").write_text("export GREETING=hello\n")
    if os.geteuid() == 0:
        os.chown(root / "home/dev", 1000, 1000)
        os.chown(root / "home/dev/.bashrc", 1000, 1000)
    config = NamespaceSandboxConfig(image=str(root))
    (done,) = play(library_image, ["id -un; echo $HOME $GREETING; ls -A ~; touch ~/new && ls ~/new"], config)
    own = "/home/dev" in line
    user = "dev" if own else "user"
    shown = [user, f"/home/{user}", *(["hello", ".bashrc", ".local"] if own else [".local"]), f"/home/{user}/new"]
    assert done.output.split() == shown


def test_a_home_that_is_a_link_leads_to_no_folder_of_the_host(library_image: Image, tmp_path: Path) -> None:
    secret = tmp_path / "host"
    secret.mkdir()
    (secret / "secret.txt").write_text("of the host")
    root = tmp_path / "root"
    shutil.copytree(find_image(NamespaceSandboxConfig()).folder, root, symlinks=True)
    for folder in ("home", "opt"):
        shutil.rmtree(root / folder, ignore_errors=True)
    (root / "home").mkdir()
    (root / "home/dev").symlink_to(f"../../../../../../../..{secret}")
    (root / "opt").symlink_to(f"../../../../../../../..{secret}")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\ndev:x:1000:1000::/home/dev:/bin/bash\n")
    (done,) = play(library_image, ["cat ~/secret.txt /opt/*"], NamespaceSandboxConfig(image=str(root)))
    assert "of the host" not in done.output


def test_what_a_shell_prints_is_read_or_left() -> None:
    shell = ImageTerminal.read("14\x009\x00PATH=/bin\x00A=b=c\x00")
    assert (shell.environment, shell.processes) == ({"PATH": "/bin", "A": "b=c"}, 4)
    for wrong in ("", "a\x00b\x00", "3"):
        with pytest.raises(ValueError, match=r"int|values"):
            ImageTerminal.read(wrong)
    profile = container(b"seed", "dev", shell)
    assert profile == container(b"seed", "dev", shell), "the members of a group see one machine"
    assert (profile.path, profile.environment["A"], profile.user) == (("/bin",), "b=c", "dev")
