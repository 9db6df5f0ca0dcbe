"""A product's image of another Debian with another Python and a database: tasks are built, played and decided in it.

mmdebstrap makes the image, which takes root, minutes and Debian's packages.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from etude.config import validate_sandbox
from etude.grading import Grade, grade_changes, open_sandbox
from etude.tasks import load_dataset
from tests.helpers.containers import runtime

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(
        shutil.which("mmdebstrap") is None or os.geteuid() != 0,
        reason="needs mmdebstrap and root: apt install mmdebstrap",
    ),
]

PACKAGES = "python3,bash,postgresql,python3-psycopg2,procps"
# The database of the image: no password on the loopback, and nothing outside of the box's own folders.
HOOK = r"""
cd "$1/etc/postgresql/17/main"
sed -i '1i host all all 127.0.0.1/32 trust' pg_hba.conf
sed -i "s|^external_pid_file.*||; s|^unix_socket_directories.*|unix_socket_directories = '/tmp'|" postgresql.conf
sed -i "s|^ssl = .*|ssl = off|" postgresql.conf
"""
SANDBOX = """
[sandbox]
image = "{image}"

[[sandbox.services]]
name = "postgres"
start = "/usr/lib/postgresql/17/bin/postgres -D /var/lib/postgresql/17/main -c config_file={config}"
ready = "pg_isready -q -h 127.0.0.1"
"""
RUN = """
stage = "rl"
name = "shop"

[model]
path = "nano"

[tasks]
dataset = "{dataset}"

[trainer]
steps = 1

[rollout]
prompts = 2
group = 2
staleness = 0
turns = 4
tokens = 200
"""
CONFIG = "/etc/postgresql/17/main/postgresql.conf"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image")
    hook = folder / "hook"
    hook.write_text(f"#!/bin/sh -e{HOOK}")
    hook.chmod(0o755)
    command = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", f"--customize-hook={hook}", "trixie"]
    subprocess.run([*command, str(folder / "root")], check=True)
    return folder / "root"


def etude(folder: Path, *words: str) -> str:
    command = [str(Path(sys.executable).with_name("etude")), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tasks(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    shutil.copytree(Path(__file__).parent / "data/orders", folder / "orders")
    (folder / "sandbox.toml").write_text(SANDBOX.format(image=image, config=CONFIG))
    etude(folder, "tasks", "build", "orders", "-o", "tasks", "--sandbox", "sandbox.toml")
    return folder / "tasks"


def test_a_product_with_a_database_is_built_and_trained_on(image: Path, tasks: Path, tmp_path: Path) -> None:
    dataset = load_dataset(tasks)
    assert len(dataset.tasks) >= 20
    assert all(task.difficulty["decided"] == 1.0 for task in dataset.tasks), "every test is decided outside"
    (tmp_path / "run.toml").write_text(RUN.format(dataset=tasks) + SANDBOX.format(image=image, config=CONFIG))
    etude(tmp_path, "train", "run.toml")
    report = json.loads((tmp_path / "outputs/shop/report.json").read_text())
    assert (report["episodes"]["scored"], report["episodes"]["infra"]) == (4, 0)


CONTAINER_SERVICE = {
    "name": "postgres",
    "start": "B=/usr/lib/postgresql/17/bin; $B/initdb -D /tmp/pg -U postgres -A trust >/dev/null; "
    "exec $B/postgres -D /tmp/pg -k /tmp",
    "ready": "pg_isready -q -h 127.0.0.1",
}


@pytest.mark.skipif(shutil.which("podman") is None or runtime() is None, reason="podman starts no container here")
def test_the_same_task_is_decided_by_podman(image: Path, tasks: Path) -> None:
    """The user of a box owns no file of a container's image, so the database gets files of its own."""
    packed = subprocess.Popen(["tar", "-C", str(image), "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(["podman", "import", "--quiet", "-", "localhost/etude-test:orders"], stdin=packed.stdout, check=True)
    table = {"type": "podman", "image": "localhost/etude-test:orders", "runtime": runtime()}
    config = validate_sandbox(table | {"services": [CONTAINER_SERVICE]}, "here")
    dataset = load_dataset(tasks)
    task = dataset.tasks[0]
    gold = {path: text.encode() for path, text in task.solution.items()}

    async def play() -> list[Grade]:
        async with open_sandbox(config, memo=0) as sandbox:
            place = dataset.image(task), dataset.hidden
            return [await grade_changes(sandbox, task, *place, changes) for changes in ({}, gold)]

    try:
        none, right = asyncio.run(play())
    finally:
        subprocess.run(["podman", "rmi", "--force", "localhost/etude-test:orders"], check=False)
    assert (none.score, right.score) == (0.0, 1.0), (none, right)
    assert right.report is not None
    assert right.report.decided == 1.0
