"""A head of Ray on this machine, with a token, and the processes below it by their parents."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOKEN = "0123456789abcdef" * 4


def tree(pid: int) -> list[int]:
    """The processes below `pid`, and itself."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    out = [pid]
    for one in out:
        out += parents.get(one, [])
    return out


class Head:
    """One head at a port; after `kill`, `start` begins a new one there, which knows nothing of the one before."""

    def __init__(self, env: dict[str, str], cpus: int = 4) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.env, self.cpus = (
            {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path), **env},
            cpus,
        )
        self.folder = ""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets are short
        words = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(self.port),
            "--num-cpus", str(self.cpus), "--object-store-memory", "80000000", "--include-dashboard", "false",
            "--disable-usage-stats", "--temp-dir", self.folder, "--min-worker-port", "0", "--max-worker-port", "0",
        ]  # fmt: skip
        with open(f"{self.folder}/start.log", "wb") as log:
            self.popen = subprocess.Popen(words, env=self.env, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in Path(log.name).read_text():
            assert self.popen.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL for the head, its node and all that they have started."""
        for pid in tree(self.popen.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.popen.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)
