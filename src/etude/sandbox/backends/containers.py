"""Docker and Podman, by their command lines: a container for each box, without network and almost without capabilities.

The container's first program is ours and ends with its standard input, so a box never outlives its owner.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from etude.code import lines_of
from etude.errors import UserError
from etude.sandbox.backends.host import CAPABILITIES, SERVER_PROCESSES, Need
from etude.sandbox.backends.processes import ProcessStream, attached, last, output
from etude.sandbox.base import Capabilities
from etude.sandbox.images.store import saved_image

ContainerEngine = Literal["docker", "podman"]
ENGINES: tuple[ContainerEngine, ...] = ("docker", "podman")
KERNEL_THREADS = 512
# nofile, nproc: some hosts forbid the defaults of engines.
_ULIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", "--ulimit", "core=0:0")
_SAVE_SECONDS = 900.0
_FACTS = """
import pathlib, sys
accounts = pathlib.Path("/etc/passwd")
print(*sys.version_info[:3], sep=".")
print(accounts.read_text() if accounts.is_file() else "")
"""
_ISOLATION: dict[str, Literal["gvisor", "vm"]] = {"runsc": "gvisor", "kata": "vm", "krun": "vm"}


class Containers:
    """A container engine. `runtime` is one of its runtimes, such as runc or runsc (gVisor); None: its default."""

    def __init__(self, name: ContainerEngine, image: str, runtime: str | None) -> None:
        self.name = name
        self._image = image
        self.image_name = f"{image} of {name}"
        self._runtime = runtime

    async def reach(self) -> None:
        """Raises UserError if the engine is not installed or does not answer."""
        await self._info()

    async def open(self) -> Capabilities:
        """Check image, runtime and limits. Raises UserError."""
        info = await self._info()
        self._folder = tempfile.TemporaryDirectory(prefix="etude-containers-")
        code, printed = await output([self.name, "image", "inspect", "--format", "{{.Id}}", self._image])
        if code:
            raise UserError(f"{self.name} has no image {self._image} ({last(printed)}); pull or import it first.")
        self._id = printed.removeprefix("sha256:")
        self.image_name = f"{self._image} {self._id} of {self.name}"
        if self.name == "docker":
            runtimes, version = info["Runtimes"], info.get("CgroupVersion", "1")
            rootless = any("rootless" in option for option in info.get("SecurityOptions") or ())
            missing = [] if info["MemoryLimit"] and info["PidsLimit"] else ["memory or processes"]
        else:
            host = info["host"]
            runtimes, rootless = None, host["security"]["rootless"]
            version = host["cgroupVersion"].removeprefix("v")
            missing = sorted({"memory", "pids"} - set(host["cgroupControllers"] or ()))
        if missing:
            raise UserError(f"{self.name} cannot limit {', '.join(missing)} here; give it control groups.")
        if self._runtime is not None:
            known = shutil.which(self._runtime) if runtimes is None else runtimes.get(self._runtime)
            if known is None:
                raise UserError(f"{self.name} knows no runtime {self._runtime}; install it, or drop sandbox.runtime.")
        options = ["--rm", "--network", "none", "--pull", "never", *_ULIMITS, "--entrypoint", "python3"]
        program = [*self._program(), "run", *options]
        code, printed = await output([*program, self._image, "-c", _FACTS])
        if code:
            raise UserError(f"{self.name} cannot run python3 of {self._image} ({last(printed)}){self._cure(printed)}.")
        self.python, _, self._accounts = printed.partition("\n")
        return Capabilities(
            isolation=self._isolation(),
            rootless=rootless,
            egress=False,
            pty=True,
            seccomp=True,
            cgroup="v2" if version == "2" else "v1",
            limits=("memory", "processes", "disk", "cpus", *(["files"] if self.name == "docker" else [])),
        )

    def _cure(self, printed: str) -> str:
        return "; set sandbox.runtime to runc" if "cgroups in hybrid mode" in printed else ""

    def _isolation(self) -> Literal["container", "gvisor", "vm"]:
        stem = (self._runtime or "").rpartition("/")[2]
        for word, kind in _ISOLATION.items():
            if word in stem:
                return kind
        return "container"

    async def _info(self) -> dict[str, Any]:
        if shutil.which(self.name) is None:
            raise UserError(f"{self.name} is not installed here; install it, or use another sandbox.type.")
        code, printed = await output([self.name, "info", "--format", "{{json .}}"])
        with contextlib.suppress(ValueError):
            info = json.loads(printed)
            if code == 0 and not info.get("ServerErrors"):
                return info
        raise UserError(f"{self.name} does not answer ({last(printed)}); start it, or use another sandbox.type.")

    async def start(self, command: Sequence[str], need: Need) -> ProcessStream:
        """Run a container without network."""
        name = f"etude-{secrets.token_hex(8)}"
        run = [*self._program(), "run", "--rm", "--interactive", "--name", name, *self._options(need)]
        now = ["--time", "0"] if self.name == "podman" else []
        return await attached([*run, self._image, *command[1:]], [self.name, "rm", "--force", *now, name])

    def system(self) -> dict[str, Path]:
        """The image, as the engine saves it, unpacked into the user's cache. Raises UserError."""
        return {"/": saved_image(self._id, self._save)}

    def _save(self, path: Path) -> None:
        command = [self.name, "save", "--output", path, self._id]
        try:
            subprocess.run(command, capture_output=True, timeout=_SAVE_SECONDS, check=True)
        except subprocess.TimeoutExpired:
            raise UserError(f"{self.name} did not save the image {self._image} in {_SAVE_SECONDS:.0f} s.") from None
        except subprocess.CalledProcessError as e:
            why = last(e.stderr.decode("utf-8", "replace"))
            raise UserError(f"{self.name} cannot save the image {self._image} ({why}).") from None

    def close(self) -> None:
        """Remove the files that containers have in place of theirs."""
        if self._folder is not None:
            self._folder.cleanup()

    def _passwd(self, user: int) -> str:
        """The file with the accounts of the image and the user of a box."""
        assert self._folder is not None
        path = Path(self._folder.name, f"passwd-{user}")
        lines = [line for line in lines_of(self._accounts) if line.split(":")[2:3] not in ([], [str(user)])]
        path.write_text("".join(f"{line}\n" for line in [*lines, f"user:x:{user}:{user}::/home/user:/bin/bash"]))
        return str(path)

    def _program(self) -> list[str]:
        if self._runtime is None:
            return [self.name]
        flags = ["--runtime", self._runtime] if self.name == "podman" else []
        if self.name == "podman" and "runsc" in self._runtime:
            flags += ["--runtime-flag", "network=none"]  # else it takes the host's own network namespace for ours
        return [self.name, *flags]

    def _options(self, need: Need) -> list[str]:
        limits = need.limits
        # a page less than the largest file, so that a disk is full before a file is too large
        disk = f"size={limits.disk_mb * 1024 - 4}k" + (",nr_inodes=16384" if self.name == "docker" else "")
        # a kernel of its own counts its own threads here; the box's processes are counted inside
        processes = limits.processes + (KERNEL_THREADS if self._isolation() != "container" else SERVER_PROCESSES)
        tree = f"size={limits.disk_mb + need.files_mb}m"
        mounts = {"/workspace": tree, "/site": tree, "/opt/runner": tree, "/run": tree}
        mounts |= dict.fromkeys(("/home/user", "/tmp", "/var/tmp"), disk)
        fixed = "--network none --read-only --cap-drop ALL --security-opt no-new-privileges --hostname devbox"
        return [
            *fixed.split(),
            *("--user", "0:0", "--workdir", "/", "--entrypoint", "sh", "--log-driver", "none", "--pull", "never"),
            *("--memory", f"{need.memory_mb}m", "--memory-swap", f"{need.memory_mb}m", "--cpus", str(limits.cpus)),
            *("--pids-limit", str(processes), "--shm-size", f"{limits.disk_mb}m"),
            *_ULIMITS,
            *(part for name in CAPABILITIES for part in ("--cap-add", name)),
            *("--volume", f"{self._passwd(need.user)}:/etc/passwd:ro"),
            *(part for at, how in mounts.items() for part in ("--tmpfs", f"{at}:rw,exec,nosuid,nodev,{how}")),
            *(["--runtime", self._runtime] if self._runtime is not None and self.name == "docker" else []),
        ]
