"""Thirty public repositories become tasks: what the first command gives, and the second that its message names.

`python -m benchmarks.repositories --clones DIR --output DIR` builds a dataset of each repository of `repositories.json`
and prints a table. A clone is `CLONES/OWNER+NAME`; it is made from GitHub if it is not there. A result is a file of the
output; a repository that has one is not built again. `--set kept-back` takes the ten that nothing was mended on.
`--record` writes the results of both sets as a file of `docs/figures`.

`repositories.json` holds the rule of the draw, the larger list by kind, and the repositories with their commits.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results

LIST = Path(__file__).with_suffix(".json")
SECONDS = 1800.0  # of one command
OPTIONS = ("--max-tasks", "24", "--max-functions", "60")  # small datasets, so that thirty are made in hours
_OPTION = re.compile(r"`(--[a-z][a-z-]*(?: [^`]+)?)`")
_PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b")


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds, prints the table, and returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repositories", description=__doc__)
    parser.add_argument("--clones", type=Path, required=True, help="folder of clones, OWNER+NAME")
    parser.add_argument("--output", type=Path, required=True, help="folder of datasets, logs and results")
    parser.add_argument("--set", choices=("mend", "kept-back", "all"), default="all")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="repositories, built again")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write all results of the output, build nothing")
    given = parser.parse_args(arguments)
    if given.record is not None:
        given.record.write_text(results.dump(record(given.output, given.record)))
        return 0
    entries = [entry for entry in json.loads(LIST.read_text())["repositories"] if _wanted(entry, given.set, given.only)]
    rows = [result(entry, given.clones, given.output, again=bool(given.only)) for entry in entries]
    print(table(rows))
    return 0


def _wanted(entry: dict[str, Any], chosen: str, only: Sequence[str]) -> bool:
    if only:
        return entry["name"] in only
    return chosen == "all" or entry.get("kept_back", False) == (chosen == "kept-back")


def result(entry: dict[str, Any], clones: Path, output: Path, *, again: bool) -> dict[str, Any]:
    """The results of a repository's commands, read from `output` if they are there."""
    label = entry["name"].replace("/", "+")
    file = output / f"{label}.json"
    if file.exists() and not again:
        return json.loads(file.read_text())
    output.mkdir(parents=True, exist_ok=True)
    folder = _checked_out(entry, clones / label, output / "clones" / label) / entry.get("folder", "")
    print(f"{entry['name']} ...", file=sys.stderr, flush=True)
    first = _build(folder, output / "tasks" / label, OPTIONS, output / f"{label}.log")
    runs = [first]
    if (further := named_options(first["said"])) and not first["verdict"].startswith("good"):
        runs.append(_build(folder, output / "tasks" / label, [*OPTIONS, *further], output / f"{label}.2.log"))
    row = entry | {"runs": runs}
    file.write_text(json.dumps(row, indent=1) + "\n")
    return row


def _checked_out(entry: dict[str, Any], clone: Path, folder: Path) -> Path:
    """A clone at the commit of the list."""
    if not clone.exists():
        subprocess.run(["git", "clone", "-q", f"https://github.com/{entry['name']}", str(clone)], check=True)
    if not folder.exists():
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(clone), str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "-q", entry["commit"]], check=True)
    return folder


def _build(folder: Path, dataset: Path, options: Sequence[str], log: Path) -> dict[str, Any]:
    """Run one build. `said` is what it printed last, `verdict` that of the dataset or the error."""
    shutil.rmtree(dataset, ignore_errors=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "etude.cli.main", "tasks", "build", str(folder), "-o", str(dataset), *options]
    with log.open("w") as text:
        try:
            done = subprocess.run(command, stdout=text, stderr=subprocess.STDOUT, timeout=SECONDS, check=False)
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = 124
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    verdict = last.removeprefix("verdict: ") if last.startswith("verdict: ") else f"error: {last}"
    if code == 124:
        verdict = f"stopped after {SECONDS:.0f} s: {last}"
    return {
        "options": list(options),
        "exit": code,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "verdict": verdict,
        "said": last,
    }


def named_options(message: str) -> list[str]:
    """The options that a message names in full: `--exclude 'docs'`, and not `--requires PACKAGE`."""
    for option in _OPTION.findall(message):
        if not _PLACEHOLDER.search(option):
            return shlex.split(option)
    return []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each command, and the numbers of good datasets."""
    lines = []
    for row in rows:
        for run in row["runs"]:
            named = " ".join(run["options"][len(OPTIONS) :])
            lines.append(f"{row['name']} ({row['kind']}): {run['minutes']} min {named}\n    {run['verdict']}")
    good = [[run["verdict"].startswith("good") for run in row["runs"]] for row in rows]
    lines.append(f"{sum(runs[0] for runs in good)} of {len(rows)} good at the first command, ")
    lines[-1] += f"{sum(any(runs) for runs in good)} at the first or second."
    return "\n".join(lines)


def record(output: Path, file: Path) -> dict[str, Any]:
    """The results as a section of `docs/figures`; its title, text and level stay as they are in `file`."""
    section = results.load(file) if file.exists() else {"title": "Thirty repositories", "level": 3, "records": []}
    records = []
    for label in ("kept-back", "mend"):
        rows = []
        for entry in json.loads(LIST.read_text())["repositories"]:
            known = output / f"{entry['name'].replace('/', '+')}.json"
            if entry.get("kept_back", False) == (label == "kept-back") and known.exists():
                rows += _cells(json.loads(known.read_text()))
        if not rows:
            continue
        command = f"python -m benchmarks.repositories --clones DIR --output DIR --set {label}"
        about = {"bench": f"repositories/{label}", "command": command, **results.described()}
        records.append(about | {"conditions": f"Options: `{' '.join(OPTIONS)}`.", "by": "repository", "rows": rows})
    return section | {"records": records}


def _cells(row: dict[str, Any]) -> list[dict[str, Any]]:
    name, first, *second = row["name"], *row["runs"]
    last = row["runs"][-1]
    tasks = re.search(r"(\d+) tasks of (\d+) files?, with (\d+)%", last["verdict"])
    cells = {
        "kind": row["kind"],
        "first command": _word(first),
        "second": " ".join(f"`{word}`" for word in second[0]["options"][len(OPTIONS) :]) if second else "",
        "gave": _word(second[0]) if second else "",
        "minutes": first["minutes"],
        "tasks": int(tasks[1]) if tasks else 0,
        "files": int(tasks[2]) if tasks else 0,
        "tests kept, %": int(tasks[3]) if tasks else 0,
    }
    return [{"case": f"{name}/{key}", "value": value, "unit": "", "baseline": ""} for key, value in cells.items()]


def _word(run: dict[str, Any]) -> str:
    """ "good", "thin", "hollow", "refused" or "stopped"."""
    word = re.match(r"good|thin|hollow|stopped", run["verdict"])
    return word[0] if word else "refused"


if __name__ == "__main__":
    sys.exit(main())
