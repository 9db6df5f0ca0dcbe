"""Runs a task of a dataset as a Harbor runner does: containers' paths, in a box root of our own.

`python -m tests.tasks.harbor_box DATASET TASK CONFIG` builds the file system of the verifier's image (see the dataset's
Dockerfile), hands in the agent's tree with or without the gold answer, runs /tests/test.sh, and prints what Harbor
would read from /logs/verifier/reward.txt.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from etude.config import NamespaceSandboxConfig
from etude.grading.runner import EXAMINER
from etude.sandbox.guest import linux, root
from etude.sandbox.images.store import find_image
from etude.sandbox.namespace.zygote import installed_runner


def reward(dataset: Path, task: str, solved: bool, extra: dict[str, str] | None = None) -> str:
    """What /logs/verifier/reward.txt holds; `solved`: solve.sh has run. `extra` files are handed in as well."""
    spec = {"dataset": str(dataset.resolve()), "task": task, "solved": solved, "extra": extra or {}}
    command = [sys.executable, "-m", "tests.tasks.harbor_box", json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.strip().splitlines()[-1]


def _main(spec: dict) -> None:
    image = find_image(NamespaceSandboxConfig())
    runner = installed_runner(EXAMINER)
    linux.unshare(linux.NEWNS) if os.geteuid() == 0 else linux.become(None, root.BOX_ID, linux.NEWNS)
    root.build({"folder": str(image.folder), "user": image.user, "roots": False}, runner)
    data = Path(root.HOST + spec["dataset"])
    linux.mount("tmpfs", "/workspace", "tmpfs", 0, "mode=755,size=256m")
    for name in ("grade", "tests", "solution", "logs", "verifier", "hidden"):
        os.makedirs(f"/{name}")
    linux.mount("tmpfs", "/grade", "tmpfs", 0, "mode=755,size=256m")
    linux.bind(str(data / "site"), root.SITE)
    search = {}
    for line in (data / "Dockerfile").read_text().splitlines():
        if copied := re.fullmatch(r"COPY (\w+)/ (/\w+)/", line):
            if copied[1] != "site":
                shutil.copytree(data / copied[1], copied[2], symlinks=True, dirs_exist_ok=True)
        elif found := re.search(r"PYTHONPATH=(\S+)", line):
            search = {"PYTHONPATH": f"{found[1]}:{root.RUNNER}"}  # where pip would have put pytest
    folder = data / "tasks" / spec["task"]
    for source, target in ((folder / "environment/files", "/workspace"), (folder / "tests", "/tests"),
                           (folder / "solution", "/solution")):  # fmt: skip
        shutil.copytree(source, target, dirs_exist_ok=True)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", **search}
    if spec["solved"]:
        subprocess.run(["/solution/solve.sh"], check=True, timeout=30, cwd="/workspace", env=environment)
    for path, text in spec["extra"].items():
        Path("/workspace", path).parent.mkdir(parents=True, exist_ok=True)
        Path("/workspace", path).write_text(text)
    done = subprocess.run(
        ["/tests/test.sh"], timeout=100, cwd="/workspace", env=environment, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    print(Path("/logs/verifier/reward.txt").read_text())


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
