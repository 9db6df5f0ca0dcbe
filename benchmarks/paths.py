"""How far the data walks: the files and frames of a traced real run, by `python -m benchmarks.paths [--json]`.

command   frames of etude between the command and the first optimizer step: those of the command's process down to the
          start of the trainer, and those of the trainer down to the optimizer
episode   files that one episode crosses in the process that plays it, from its lease to its row in the ledger; and how
          often it comes back to `run/loop.py` after it has left that file
request   files that one `POST /generate` crosses in the inference server, the engine's thread included
version   files that one weight version crosses, from the trainer's commit to the engine that serves it, all processes

A tiny deterministic run (the bundled model, four tasks, two steps) is started as a user starts it. A profile function
(`sys.setprofile`) in each of its processes notes the first call of every function of etude, together with the episode,
request or version that the call serves: a context variable, which asyncio tasks inherit. Code inside of boxes is left
out. Foundations (`records.py`, `errors.py`, ...) count like any other file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import etude

ROOT = Path(__file__).parents[1]
SOURCE = Path(etude.__file__).parent
SECONDS = 600.0
# Where a path begins: file and function -> what is walked. A function may be a thread's first.
ROOTS = {
    "run/episodes.py:play_leased": "episode",
    "inference/server/token_routes.py:_generate": "request",
    "inference/engine/engine.py:step": "request",
    "inference/engine/engine.py:_apply_swaps": "version",  # between two steps
    "trainer/rl/process.py:commit": "version",
    "weights/publisher.py:_run": "version",
    "inference/server/weights.py:poll": "version",
}
STEP = "trainer/optimizer.py:apply"  # the optimizer step
LAUNCH = "processes.py:start"  # of the trainer's process

CONFIG = """
stage = "rl"
name = "paths"
deterministic = true
[model]
path = "{model}"
[tasks]
repository = "unused"
dataset = "{tasks}"
[rollout]
prompts = 2
group = 2
staleness = 0
max_in_flight = 4
turns = 2
tokens = 48
context = 512
[trainer]
steps = 2
[eval]
before = false
after = false
"""

HOOK = """
import contextvars, json, os, sys, threading
SOURCE, OUT, ROOTS, STEP, LAUNCH = json.loads(os.environ["ETUDE_PATHS"])
walk = contextvars.ContextVar("walk", default=None)
names, seen, last, marked, before = {}, set(), {}, set(), {}  # `before`: a walk -> the walk that it interrupts
log = os.open(os.path.join(OUT, "%d.jsonl" % os.getpid()), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(*row):
    os.write(log, (json.dumps(row) + "\\n").encode())

def name_of(code):
    file = code.co_filename
    if not file.startswith(SOURCE) or "/guest/" in file or code.co_name.startswith("<"):
        return None
    return "%s:%s" % (file[len(SOURCE) + 1 :], code.co_name)

def stack(frame):
    out = []
    while frame is not None:
        if (name := name_of(frame.f_code)) is not None:
            out.append(name)
        frame = frame.f_back
    return out[::-1]

def profile(frame, event, arg):
    if event == "return" and (at := walk.get()) is not None and at[1] == id(frame):
        if not frame.f_code.co_flags & 0x80:  # a function ends here, a coroutine may go on
            walk.set(before.pop(at, None))
    if event != "call":
        return
    code = frame.f_code
    if code not in names:
        names[code] = name_of(code)
    name = names[code]
    if name is None:
        return
    if name in ROOTS and (walk.get() is None or ROOTS[name] != walk.get()[0]):
        before[(ROOTS[name], id(frame))] = walk.get()
        walk.set((ROOTS[name], id(frame)))
    if name in (STEP, LAUNCH) and (name == LAUNCH or name not in marked):
        marked.add(name)
        note("stack", name, stack(frame), str(frame.f_locals.get("name", "")))
    if (at := walk.get()) is not None:
        if (at, name) not in seen:
            seen.add((at, name))
            note("call", *at, name)
        file = name.partition(":")[0]
        if last.get(at) != file:
            last[at] = file
            note("visit", *at, file)

threading.setprofile(profile)
sys.setprofile(profile)
"""


def traced(folder: Path) -> list[list]:
    """Runs the command in `folder` and returns what its processes noted. Raises RuntimeError if the run fails."""
    hook, out = folder / "hook", folder / "out"
    hook.mkdir()
    out.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK)
    tasks = ROOT / "tests/tasks/data/tiny"
    (folder / "paths.toml").write_text(CONFIG.format(model=ROOT / "models/nano", tasks=tasks))
    path = os.pathsep.join([str(hook), str(SOURCE.parent)])
    settings = json.dumps([str(SOURCE), str(out), ROOTS, STEP, LAUNCH])
    done = subprocess.run(
        [sys.executable, "-m", "etude.cli.main", "train", "paths.toml"], cwd=folder, timeout=SECONDS,
        env=os.environ | {"PYTHONPATH": path, "ETUDE_PATHS": settings, "TERM": "dumb"}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the traced run failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line) for file in sorted(out.glob("*.jsonl")) for line in file.read_text().splitlines()]


def files(rows: Iterable[Sequence], kind: str) -> list[str]:
    """The files of the longest walk of a kind; for a version those of all processes together."""
    walks: dict[object, dict[str, None]] = {}
    for row in rows:
        if row[0] == "call" and row[1] == kind:
            walks.setdefault(kind if kind == "version" else row[2], {})[row[3].partition(":")[0]] = None
    return list(max(walks.values(), key=len, default={}))


def returns(rows: Iterable[Sequence], file: str) -> int:
    """How often, at most, an episode comes back to `file` after it has left it."""
    walks: dict[int, list[str]] = {}
    for row in rows:
        if row[0] == "visit" and row[1] == "episode":
            walks.setdefault(row[2], []).append(row[3])
    return max((max(0, visits.count(file) - (visits[0] == file)) for visits in walks.values()), default=0)


def measures(rows: Sequence[Sequence]) -> Mapping[str, list[str]]:
    """Name of a path -> the frames or files on it."""
    stacks = [row for row in rows if row[0] == "stack"]
    command = next((row[2] for row in stacks if row[1] == LAUNCH and row[3] == "trainer"), [])
    step = next((row[2] for row in stacks if row[1] == STEP), [])
    return {
        "command": [*command, *step],
        "episode": files(rows, "episode"),
        "request": files(rows, "request"),
        "version": files(rows, "version"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints every path with its frames or files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paths", description="How far the data walks.")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="etude-paths-") as folder:
        rows = traced(Path(folder))
    frames, back = measures(rows), returns(rows, "run/loop.py")
    for name, places in frames.items():
        print(f"{name}: {len(places)}", *(f"  {place}" for place in places), sep="\n")
    print(f"an episode comes back to run/loop.py {back} times")
    if arguments.json:
        print(json.dumps({"bench": "paths", "rows": [
            {"case": name, "value": len(places), "unit": "frames" if name == "command" else "files", "baseline": ""}
            for name, places in frames.items()
        ] + [{"case": "episode returns", "value": back, "unit": "times", "baseline": ""}], "checks": {}}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
