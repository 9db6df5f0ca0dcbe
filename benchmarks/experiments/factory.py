"""Tasks from repositories that nothing in this project was made for: how many, of what kinds, and at what price.

`python -m benchmarks.experiments.factory -o outputs/factory [NAME ...]` fetches releases by digest, builds a small
dataset of each with the environment found by rules, and writes ten random tasks of each to read (`NAME.md`), and a
table (`table.md`).
"""

from __future__ import annotations

import argparse
import base64
import difflib
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from etude.code.packages import fetch_library, unpack
from etude.config import BuildConfig, TaskKind
from etude.errors import UserError
from etude.tasks.build import build
from etude.tasks.dataset import Dataset
from etude.tasks.node import npm

KINDS = get_args(TaskKind)
READ = 10  # tasks to read by eye


def fetch_npm(name: str, version: str, integrity: str, into: Path, timeout: float = 180.0) -> Path:
    """The folder of an npm package, unpacked below `into`; its digest is the field `integrity` (sha512 in base 64).

    `npm pack` runs nothing of the package. Raises UserError if the package has another digest, or npm is missing.
    """
    target = into / f"{name.replace('/', '-').lstrip('@')}-{version}"
    if target.is_dir():
        return target
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".fetch-") as scratch:
        npm(["pack", "--ignore-scripts", f"{name}@{version}"], Path(scratch), timeout)
        (archive,) = Path(scratch).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if f"sha512-{digest}" != integrity:
            raise UserError(f"{name}@{version} has integrity sha512-{digest}, not {integrity}; check both.")
        unpack(archive, Path(scratch) / "unpacked").rename(target)
    return target


@dataclass(frozen=True)
class Release:
    name: str
    version: str
    digest: str  # sha256 of a source package, or the integrity field of an npm one
    npm: bool = False

    def fetch(self, into: Path) -> Path:
        if self.npm:
            return fetch_npm(self.name, self.version, self.digest, into)
        return fetch_library(self.name, self.version, self.digest, into)


RELEASES = (
    Release("inflection", "0.5.1", "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417"),
    Release("humanize", "4.17.0", "1d6a36c453dbfbb3f0b34601d2e0b4ce5d48d780305cd45714843f0068fde6ac"),
    Release("python-slugify", "9.2.0", "cee32948083476013804de1667724fb1362dacb71e47b1d5d92adf8db6ee3298"),
    Release("cachetools", "8.0.1", "deb1d376d4d28c2f33f3e3058043b005e0af75c35c094bd54053e27d2906ad95"),
    Release("xmltodict", "1.0.4", "6d94c9f834dd9e44514162799d344d815a3a4faec913717a9ecbfa5be1bb8e61"),
    Release("parse", "1.22.4", "706d458feed5a81b02768d3156e8070baf6cee7d150a3a3c0cd43101a875c3b5"),
    Release("tabulate", "0.10.0", "e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d"),
    Release(
        "dijkstrajs",
        "1.0.3",
        "sha512-qiSlmBq9+BCdCA/L46dw8Uy93mloxsPSbwnm5yrKn2vMPiy8KyAskTF6zuV/j5BMsmOGZDPs7KjU+mjb670kfA==",
        npm=True,
    ),
    Release(
        "secure-json-parse",
        "4.1.1",
        "sha512-lnd81MQEZKjhW/Gd2TQqdd4XP6QYNdDW/EP+I7nTrFHP9y2LmaGPIHk9xsnzcOiEr1c39c/e84xFgGviQKBTRw==",
        npm=True,
    ),
    Release(
        "fast-content-type-parse",
        "4.0.1",
        "sha512-AAu9Ey/t6KDFqqeCfbwdlASlv7rQBG57gXYf2YU+MXJx1OIJn2q3BEJKmtnZaeGm1y5AYxLzRMmq9VWWXrfRcA==",
        npm=True,
    ),
    Release(
        "fast-uri",
        "4.2.3",
        "sha512-I1PXwP5eAhlNlcdpjt9CgB59op2ZvZfxw+BkqGFVIUOgNpCVTcTqp3HhTX7brxj5vsip+nSY4nTvff+eIA76hg==",
        npm=True,
    ),
    Release(
        "@wry/caches",
        "1.0.1",
        "sha512-bXuaUNLVVkD20wcGBWRyo7j9N3TxePEWFZj2Y+r9OoUzfqmavM84+mFykRicNsBqatba5JLay1t48wxaXaWnlA==",
        npm=True,
    ),
    Release(
        "zod",
        "4.6.7",
        "sha512-g8W2D2kU6a8untc053fX1uVBKzM7yqAxW/3zwk83+6RyF2+SKOuV+c0wBDhUwzV1PaGapmZH+rmcUzPf+3CGwg==",
        npm=True,
    ),
    Release(
        "ts-dedent",
        "2.3.0",
        "sha512-JfJeIHke7y2egdGGgRAvpCwYFUsHlM2gPcrVOxFkznt/4uzQ7HFmvE63iFHVLBJNDuyDOQgijDK/tXH/f6Msjg==",
        npm=True,
    ),
)


def make(release: Release, out: Path, options: BuildConfig) -> dict[str, object]:
    """One row of the table; the dataset and the tasks to read stay in `out`."""
    folder = out / release.name
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    row: dict[str, object] = {"repository": f"{release.name} {release.version}"}
    try:
        data = build(release.fetch(out / "releases"), folder, options, partial(_say, release.name))
    except UserError as e:
        return row | {"left out": str(e), "minutes": round((time.monotonic() - started) / 60, 1)}
    (out / f"{release.name}.md").write_text(_reading(data, options.seed), encoding="utf-8")
    kinds = Counter(task.kind for task in data.tasks)
    counts = data.manifest.counts
    return row | {
        "tasks": len(data.tasks),
        "kinds": {kind: kinds[kind] for kind in KINDS if kinds[kind]},
        "tried": counts["candidates"],
        "survival": round(counts["fit"] / max(1, counts["candidates"]), 2),
        "minutes": round((time.monotonic() - started) / 60, 1),
    }


def _say(name: str, stage: str, done: int, total: int) -> None:
    """Some builds take an hour."""
    print(f"{time.strftime('%H:%M:%S')} {name}: {stage}, {done} of {total}", file=sys.stderr, flush=True)


def _reading(data: Dataset, seed: int) -> str:
    """Ten random tasks: what is asked, the difference from the broken to the right text, and what decides."""
    chosen = random.Random(seed).sample(data.tasks, min(READ, len(data.tasks)))
    parts = [f"# Ten tasks of {data.name}\n"]
    for number, task in enumerate(sorted(chosen, key=lambda t: t.id), 1):
        lines: list[str] = []
        for path, broken in task.changes.items():
            lines += difflib.unified_diff(
                broken.split("\n"), task.solution[path].split("\n"), path, path, "", "", 2, ""
            )
        tests = "\n".join(f"- {test}" for test in task.fail_to_pass[:4])
        facts = f"{task.kind}, {task.operator}; {len(task.fail_to_pass)} to fix, {len(task.pass_to_pass)} to keep"
        shown = f"visible tests: {len(task.visible_tests)}"
        text = "\n".join(lines)
        parts.append(f"## {number}. {task.instruction}\n\n{facts}; {shown}\n\n```diff\n{text}\n```\n\n{tests}\n")
    return "\n".join(parts)


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        "| repository | tasks | by kind | programs tried | survive the gates | minutes |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "left out" in row:
            lines.append(f"| {row['repository']} | 0 | {row['left out']} | | | {row['minutes']} |")
            continue
        kinds = ", ".join(f"{kind} {n}" for kind, n in row["kinds"].items())  # type: ignore[attr-defined]
        cells = (row["repository"], row["tasks"], kinds, row["tried"], f"{row['survival']:.0%}", row["minutes"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="releases to build; default: all")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--max-tasks", type=int, default=20)
    parser.add_argument("--max-functions", type=int, default=24)
    parser.add_argument("--max-lines", type=int, default=30)
    parser.add_argument("--max-test-files", type=int, default=12, help="of JavaScript")
    parser.add_argument("--hang-seconds", type=float, default=5.0, help="more on a machine that does other work too")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    options = BuildConfig(
        max_tasks=arguments.max_tasks,
        max_functions=arguments.max_functions,
        max_lines=arguments.max_lines,
        max_test_files=arguments.max_test_files,
        hang_seconds=arguments.hang_seconds,
        kinds=KINDS,
        per_function=1,
        test_cap=8,
        workers=1,
        bootstrap="rules",
    )
    saved = arguments.output / "rows.json"
    rows = json.loads(saved.read_text()) if saved.is_file() else {}
    for release in RELEASES:
        if not arguments.names or release.name in arguments.names:
            rows[release.name] = make(release, arguments.output, options)
            saved.write_text(json.dumps(rows, indent=1))
            print(table([rows[release.name]]).splitlines()[-1], flush=True)
    (arguments.output / "table.md").write_text(table([rows[r.name] for r in RELEASES if r.name in rows]))


if __name__ == "__main__":
    main()
