"""The memory of a whole rl run on the CPU, against the memory table: random weights in the shape of Qwen3-0.6B.

    python -m benchmarks.run_memory [--out DIR] [--small]

Prints one JSON object: the bytes of the table, the peak over the run of the sum over its processes, and their ratio. A
process counts with its anonymous and shared memory (`/proc/PID/smaps_rollup`, a shared page by its share), every half
second; pages of files, which the kernel can drop, do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu import Setting
from benchmarks.gpu_run import random_folder
from etude.cli.overlays import read_toml
from etude.config import RLConfig, validate
from etude.trainer.rl.memory_table import GIB, memory_table

EVERY = 0.5
RUN = """
stage = "rl"
name = "run-memory"
[model]
path = {model!r}
[tasks]
environment = "recipes.environments.reverse_text:ReverseText"
arguments = {{ count = 20 }}
[rollout]
prompts = 2
group = 4
turns = 1
tokens = 16
context = 256
seconds = 3000
staleness = 0
[trainer]
steps = 2
lr = 1e-5
dtype = "bfloat16"
micro_tokens = 1024
activation_checkpointing = true
threads = 2
[inference]
dtype = "bfloat16"
cache_mb = 512
threads = 2
[weights]
seconds = 3000
[guards]
act = false
[eval]
before = false
after = false
"""


def main() -> int:
    """Runs and prints; 1 if the run failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.run_memory")
    parser.add_argument("--out", type=Path, default=Path("outputs/run-memory"))
    parser.add_argument("--small", action="store_true", help="a small model: a try of the script")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "run.toml"
    path.write_text(RUN.format(model=str(random_folder(Setting("cpu", arguments.small, out)))))
    table = memory_table(validate(RLConfig, read_toml(path, [], []), str(path)))
    root = Path(__file__).resolve().parent.parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    subprocess.run(["rm", "-rf", str(out / "outputs")], check=True)
    began = time.monotonic()
    with (out / "log").open("w") as log:
        command = [sys.executable, "-m", "etude.cli.main", "train", str(path)]
        child = subprocess.Popen(command, cwd=out, env=env, stdout=log, stderr=log)
    most, by_process = 0, dict[str, int]()
    while child.poll() is None:
        held = {pid: bytes_of(pid) for pid in tree(child.pid)}
        if sum(held.values()) > most:
            most, by_process = sum(held.values()), {name_of(pid): size for pid, size in held.items()}
        time.sleep(EVERY)
    needed = table.needed("host")
    print(table.text(), file=sys.stderr)
    print(json.dumps({
        "table_gb": needed / GIB, "peak_gb": most / GIB, "peak_of_table": most / needed,
        "processes_gb": {name: round(size / GIB, 2) for name, size in by_process.items()},
        "seconds": round(time.monotonic() - began), "exit_code": child.returncode,
    }))  # fmt: skip
    return int(child.returncode != 0)


def tree(pid: int) -> list[int]:
    """A process and its descendants that live."""
    pids, parents = [pid], dict[int, list[int]]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:
            continue
    for each in pids:
        pids += parents.get(each, ())
    return pids


def bytes_of(pid: int) -> int:
    """Anonymous and shared bytes of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines}
    return 1024 * (sizes.get("Pss_Anon:", 0) + sizes.get("Pss_Shmem:", 0))


def name_of(pid: int) -> str:
    """The module that a process runs, and its number."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return str(pid)
    return f"{next((word for word in words if word.startswith('etude.')), words[0])} {pid}"


if __name__ == "__main__":
    sys.exit(main())
