"""Boxes of an image against the image's own machine: a container that podman makes of it.

`etude doctor parity --image PATH` makes a container and a box in turn, with the same repository, and takes a
fingerprint in a terminal of each. A pair is held out together, so that the load and uptime of this machine tell
nothing. All probes count: there are no declared exceptions here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import secrets
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.audit.parity.audit import (
    FINGERPRINT_SCRIPT,
    MIN_SAMPLES,
    PARITY_GATE,
    SECONDS,
    ParityAudit,
    Progress,
    box_probes,
    compare_pairs_of_machines,
    made_up,
)
from etude.config import NamespaceSandboxConfig
from etude.errors import RunFailed, UserError, last_line
from etude.grading import open_sandbox
from etude.sandbox import WORKSPACE, FingerprintSample, Image, ProfileSource, checkout, parse_fingerprint, stamp
from etude.sandbox.images.store import find_image

_LOAD_SECONDS = 600.0
_SECONDS = 120.0  # of any other command of podman
_LIFE_SECONDS = 900.0  # of a container
_SIZE = 40, 120  # rows and columns of the terminal, as in boxes without a machine profile
_USER = 1000  # of a root folder, which says no user of its own
# Tried in this order: Debian's crun refuses hybrid control groups, and some hosts forbid podman's own limits.
_RUNTIMES: tuple[tuple[str, ...], ...] = ((), ("--runtime", "runc"))
_LIMITS: tuple[tuple[str, ...], ...] = ((), ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"))


# Gives the work tree of a container the dates of a folder; its arguments are the container and both places.
_DATES = """
import os, subprocess, sys
name, tree, place = sys.argv[1:]
shown = subprocess.run(["podman", "mount", name], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
for parent, folders, names in os.walk(tree, topdown=False):
    for path in [*(f"{parent}/{entry}" for entry in names), parent]:
        known = os.lstat(path)
        os.utime(shown + place + path[len(tree):], ns=(known.st_atime_ns, known.st_mtime_ns), follow_symlinks=False)
subprocess.run(["podman", "umount", name], check=True, stdout=subprocess.DEVNULL)
"""


@dataclass(frozen=True)
class ImageParity:
    """Boxes of an image against containers of it, in pairs. The audit's `whole` has all probes, and is what counts."""

    audit: ParityAudit
    pairs: int
    probes: int  # that were seen on either side

    @property
    def passed(self) -> bool:
        """Whether the AUC on all probes is within the gate."""
        return self.audit.whole.mean <= PARITY_GATE


@dataclass(frozen=True)
class _OwnMachine:
    """Containers of one image: podman's command line up to `run`, and the words of `run` from there to the image."""

    program: tuple[str, ...]
    options: tuple[str, ...]
    image: str

    def probes(self, tree: Path) -> Mapping[str, Any]:
        """The fingerprint of a fresh container with the work tree `tree`. Raises RunFailed."""
        name = f"etude-parity-{secrets.token_hex(8)}"
        lasting = ["--detach", "--rm", "--timeout", str(int(_LIFE_SECONDS))]  # whatever becomes of this process
        start = [*self.program, "run", *lasting, "--name", name, *self.options]
        _podman([*start, "--entrypoint", "sleep", self.image, "infinity"])
        try:
            _podman(["podman", "cp", f"{tree}/.", f"{name}:{WORKSPACE}"])
            in_store = () if os.geteuid() == 0 else ("podman", "unshare")  # podman cp keeps whole seconds of dates
            _podman([*in_store, sys.executable, "-c", _DATES, name, str(tree), WORKSPACE])
            _podman(["podman", "cp", str(FINGERPRINT_SCRIPT), f"{name}:/tmp/fingerprint.py"])
            shell = [*self.program, "exec", "--interactive", "--tty", "--workdir", WORKSPACE, name, "bash"]
            seen = _typed(shell, "python3 /tmp/fingerprint.py --samples 1 >> /tmp/samples.jsonl; exit")
            line = _podman([*self.program, "exec", name, "cat", "/tmp/samples.jsonl"], otherwise=seen)
            return parse_fingerprint(line.strip(), "the fingerprint of a container").probes
        finally:
            with contextlib.suppress(RunFailed):
                _podman(["podman", "rm", "--force", "--time", "0", name])


def compare_with_own_machine(image: Path, pairs: int, progress: Progress = lambda *_: None) -> ImageParity:
    """Make `pairs` boxes and containers of an image in turn, and compare them. Raises UserError."""
    if pairs < MIN_SAMPLES:
        raise UserError(f"--boxes must be at least {MIN_SAMPLES}")
    config = NamespaceSandboxConfig(image=str(image))
    with _loaded(image) as name:
        boxes, machines = asyncio.run(_in_turn(_own_machine(image, name), config, pairs, "image", progress))
    probes = {probe for sample in (*boxes, *machines) for probe in sample.probes}
    return ImageParity(compare_pairs_of_machines(boxes, machines), pairs, len(probes))


async def _in_turn(
    own: _OwnMachine,
    config: NamespaceSandboxConfig,
    pairs: int,
    machine_profiles: ProfileSource | None,
    progress: Progress,
) -> tuple[list[FingerprintSample], list[FingerprintSample]]:
    """Fingerprints of boxes and of containers; the second of each pair are those of one tree."""
    boxes: list[FingerprintSample] = []
    machines: list[FingerprintSample] = []
    with tempfile.TemporaryDirectory(prefix="etude-parity-") as folder:
        async with open_sandbox(config, machine_profiles=machine_profiles) as sandbox:
            for number, (name, tree) in enumerate(made_up(Path(folder), pairs)):

                async def container(name: str = name, tree: Image = tree, number: int = number) -> None:
                    with _written(tree, number) as place:
                        probes = await asyncio.to_thread(own.probes, place)
                    machines.append(FingerprintSample(name, probes))

                async def box(name: str = name, tree: Image = tree) -> None:
                    boxes.append(FingerprintSample(name, await box_probes(sandbox, tree)))

                for one in (container, box) if number % 2 else (box, container):
                    await one()
                progress(number + 1, pairs)
    return boxes, machines


@contextmanager
def _written(image: Image, seed: int) -> Iterator[Path]:
    """The work tree of an image as a folder of files, with the dates of a checkout."""
    with tempfile.TemporaryDirectory(prefix="etude-parity-tree-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(image.repository, tree, symlinks=True)
        texts = {path: text.encode("utf-8", "surrogateescape") for path, text in image.changes.items()}
        for path, data in {**texts, **image.history}.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
        age, rate = checkout(random.Random(seed))
        stamp(str(tree), time.time() - age, rate)
        yield tree


@contextmanager
def _loaded(image: Path) -> Iterator[str]:
    """The name of an image in podman's store, from which it is removed again if it was not there. Raises UserError."""
    if shutil.which("podman") is None:
        raise UserError("podman is not installed, and makes an image's own machine: install it, or use --against.")
    try:
        if image.is_dir():
            name = f"localhost/etude-parity:{secrets.token_hex(8)}"
            with subprocess.Popen(["tar", "-C", str(image), "-c", "."], stdout=subprocess.PIPE) as packed:
                _podman(["podman", "import", "--quiet", "-", name], _LOAD_SECONDS, packed.stdout)
            held = False
        else:
            name = find_image(NamespaceSandboxConfig(image=str(image))).digest.removeprefix("sha256-")
            held = not subprocess.run(["podman", "image", "exists", name], check=False).returncode
            _podman(["podman", "load", "--quiet", "--input", str(image)], _LOAD_SECONDS)
    except RunFailed as e:
        raise UserError(f"podman cannot load {image} ({e}).") from None
    try:
        yield name
    finally:
        if not held:
            subprocess.run(["podman", "rmi", "--force", name], check=False, capture_output=True)


def _own_machine(image: Path, name: str) -> _OwnMachine:
    """Containers of an image without network, as boxes have none: by the first runtime and limits that work here.
    Raises UserError."""
    fixed = ("--network", "none", "--pull", "never", *(("--user", str(_USER)) if image.is_dir() else ()))
    reason = ""
    for runtime in _RUNTIMES:
        for limits in _LIMITS:
            made = _OwnMachine(("podman", *runtime), (*fixed, *limits), name)
            try:
                _podman([*made.program, "run", "--rm", *made.options, "--entrypoint", "true", name])
            except RunFailed as e:
                reason = reason or str(e)
            else:
                return made
    raise UserError(f"podman starts no container here ({reason}).")


def _podman(command: Sequence[str], seconds: float = _SECONDS, source: Any = None, otherwise: str = "") -> str:
    """The output of a command. Raises RunFailed with its last line, or the last line of `otherwise`."""
    try:
        done = subprocess.run(
            command, stdin=source or subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{' '.join(command[:2])} does not end within {seconds:.0f} s") from None
    if done.returncode:
        printed = last_line(f"{otherwise}\n{done.stderr}", f"exit code {done.returncode}")
        raise RunFailed(f"{' '.join(command[:2])}: {printed[-200:]}")
    return done.stdout


def _typed(command: Sequence[str], line: str) -> str:
    """Start a shell in a terminal, type a line, and wait for the shell's end. Returns what the terminal showed."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *_SIZE, 0, 0))
    shell = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown, deadline = bytearray(), time.monotonic() + SECONDS
    try:
        os.write(ours, line.encode() + b"\n")
        with contextlib.suppress(OSError):  # the end of a terminal
            while select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
                shown += os.read(ours, 65536)
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
    return shown.decode("utf-8", "replace")
