"""The demo on seeds that chose nothing: `python -m benchmarks.experiments.demo_seeds 11-20 [--beside]`.

Runs `etude demo --seed N --name demo-N`, one seed after the other, on an otherwise idle machine, and prints the table
of README. `demo_seeds.jsonl` beside this file has a line for each start and each end, so that no run that was started
is left out: a run that was cut is resumed and its row says so, a finished one is not repeated. `--beside` runs beside a
process that keeps one core busy; these runs have names and rows of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from etude import runfolder
from etude.dashboard.text import percent, points

OUTPUTS = Path("outputs")
LOG = Path(__file__).with_suffix(".jsonl")  # committed, so that it holds every run that was started
SECONDS = 3600  # that one run may take
HEAD = (
    "seed", "before", "after", "difference", "tasks, functions", "new training tasks", "teach", "commit", "steps",
    "minutes", "trainer, GB", "starts",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seeds", help="such as 11-20, or 11")
    parser.add_argument("--beside", action="store_true", help="beside a process that keeps one core busy")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("-")
    OUTPUTS.mkdir(exist_ok=True)
    for seed in range(int(first), int(last or first) + 1):
        name = f"demo-{seed}{'-beside' if arguments.beside else ''}"
        if not finished(name):
            with busy() if arguments.beside else contextlib.nullcontext():
                play(name, seed)
    print(table(logged()))


def logged() -> list[dict[str, Any]]:
    """The lines of the log."""
    return runfolder.read_jsonl(LOG, texts=("name", "event"))


def finished(name: str) -> bool:
    return any(line["name"] == name and line["event"] == "ended" for line in logged())


def play(name: str, seed: int) -> None:
    """One run, or the rest of one that was cut. Raises CalledProcessError if it fails: its start stays in the log."""
    commit = _git("rev-parse", "--short", "HEAD")
    if _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{LOG.name}", f":!*/{LOG.name}"):
        commit += "-dirty"
    load, known = os.getloadavg()[0], (OUTPUTS / name / "config.json").exists()
    if known and not any(line["name"] == name for line in logged()):
        raise SystemExit(f"{OUTPUTS / name} is of a run that {LOG.name} does not know: move it away")
    note(name, "started", seed=seed, commit=commit, date=str(date.today()), load=round(load, 2), cores=os.cpu_count())
    words = ["--resume"] if known else ["--seed", str(seed)]
    command = [sys.executable, "-m", "etude.cli.main", "demo", "--name", name, *words]
    with (OUTPUTS / f"{name}.log").open("a") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=SECONDS, check=True)
    report = json.loads((OUTPUTS / name / "report.json").read_bytes())
    memory = runfolder.read_jsonl(OUTPUTS / name / "memory.jsonl")
    held = max((line.get("memory/trainer") or 0 for line in memory), default=0)
    kept = ("seconds", "steps", "pass_before", "pass_after", "paired_diff", "training", "held_out", "stages", "checks")
    note(name, "ended", trainer_bytes=held, **{key: report[key] for key in kept})


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()


def note(name: str, event: str, **values: Any) -> None:
    runfolder.append_json(LOG, {"name": name, "event": event, **values})


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """A process that computes without end."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A row for every run that was started, in Markdown, and the means over those that ended."""
    rows, gains = [], []
    for name in dict.fromkeys(line["name"] for line in lines):
        own = [line for line in lines if line["name"] == name]
        starts = sum(line["event"] == "started" for line in own)
        end = next((line for line in own if line["event"] == "ended"), None)
        label = name.removeprefix("demo-")
        if end is None:
            rows.append((label, "did not end", *[""] * (len(HEAD) - 3), str(starts)))
            continue
        gain, training, held_out = end["paired_diff"], end["training"], end["held_out"]
        gains.append(gain)
        commits = dict.fromkeys(line["commit"] for line in own if "commit" in line)
        rows.append((
            label, percent(end["pass_before"]), percent(end["pass_after"]),
            f"{points(gain['mean'])} [{points(gain['low'])}, {points(gain['high'])}]",
            f"{held_out['tasks']}, {held_out['functions']}", ", then ".join(map(percent, training["new"] or ())),
            percent(training["teach_later"] or 0, 0), ", ".join(commits), str(end["steps"]),
            f"{end['seconds'] / 60:.1f}", f"{end['trainer_bytes'] / 1e9:.2f}", str(starts),
        ))  # fmt: skip
    text = "\n".join(f"| {' | '.join(row)} |" for row in (HEAD, ("---",) * len(HEAD), *rows))
    if not gains:
        return text
    above = sum(gain["low"] > 0 for gain in gains)
    mean = points(fmean(gain["mean"] for gain in gains))
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    return f"{text}\n\n{above} of {len(gains)} intervals above 0, mean {mean} points; {machine}"


if __name__ == "__main__":
    main()
