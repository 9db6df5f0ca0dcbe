"""Mutation testing: random one-line mistakes in the code of every room, and whether the tests notice them.

`python -m tests.helpers.mutants outputs/mutants --seed N --count 60` works on a copy of the tracked files. For each
mutant it runs the fast tests that import its module, then those of its room, then the fast suite, each within a bound.
A line of `mutants.jsonl` is written per mutant, and a run that is started again goes on behind the last one. What
survives is printed as a difference: a person decides whether it is equivalent.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude import runfolder
from etude.code.functions import Function, functions
from etude.code.mutate import Mutant, mutants

ROOT = Path(__file__).parents[2]
FAST = "not slow and not gpu and not release"
NEAR = 6  # test files that import a module, at most


@dataclass(frozen=True)
class Place:
    """A mutant of one function; `path` is relative to the root of the checkout."""

    path: str
    function: str
    mutant: Mutant

    @property
    def difference(self) -> str:
        """The mistake, as a unified difference."""
        old, new = self.mutant.source.splitlines(), self.mutant.text.splitlines()
        lines = difflib.unified_diff(old, new, f"a/{self.path}", f"b/{self.path}", n=2, lineterm="")
        return "\n".join(lines)


def drawn(root: Path, seed: int) -> Iterator[Place]:
    """Mutants without end: a room, a function of it, and a mistake in it, each at random; no function twice."""
    rooms: dict[str, list[tuple[str, str, Function]]] = {}
    for file in sorted((root / "src/etude").rglob("*.py")):
        path, text = file.relative_to(root).as_posix(), file.read_text("utf-8")
        if "/audit/packs/" in path:
            continue  # what attackers are given
        rooms.setdefault(path.split("/")[2], []).extend((path, text, function) for function in functions(path, text))
    chance = random.Random(seed)
    while rooms := {room: found for room, found in rooms.items() if found}:
        found = rooms[chance.choice(sorted(rooms))]
        path, text, function = found.pop(chance.randrange(len(found)))
        for mutant in mutants(text, function, seed)[:1]:
            yield Place(path, function.qualname, mutant)


def imports(text: str) -> set[str]:
    """The modules that a source file imports, by their whole names; a name that is imported from one counts as one."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def nearest(root: Path, path: str) -> list[list[str]]:
    """Groups of test files, the nearest first: those that import the module of `path`, then those of its room."""
    module = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    files = sorted((root / "tests").rglob("test_*.py"))
    room = path.split("/")[2].removesuffix(".py")
    importing = [file for file in files if module in imports(file.read_text("utf-8"))]
    importing.sort(key=lambda file: (file.parent.name != room, file.stat().st_size))
    same = [file for file in files if file.parent.name == room or file.stem == f"test_{room}"]
    groups = [importing[:NEAR], [file for file in same if file not in importing[:NEAR]]]
    return [[file.relative_to(root).as_posix() for file in group] for group in groups if group]


def tests_fail(root: Path, tests: Sequence[str], seconds: float) -> list[str] | None:
    """The first failure of a run of fast tests; empty if they pass, None if they do not end in time."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", FAST, "--no-header", "--tb=no"]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=root, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True, preexec_fn=lambda: os.nice(10),
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None
    if process.returncode in (0, 5):  # 5: none of them is fast
        return []
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)[:1] or list(tests)


def tried(root: Path, place: Place, bounds: Sequence[float]) -> str:
    """Either "caught by TEST", "survived", or "undecided: WHY". `bounds` are seconds of the nearest tests, and of the
    suite; without the second the suite is left out."""
    target = root / place.path
    late = False
    groups = [(group, bounds[0]) for group in nearest(root, place.path)]
    groups += [(["tests"], seconds) for seconds in bounds[1:]]
    for tests, seconds in groups:
        try:
            target.write_text(place.mutant.text, "utf-8")
            failed = tests_fail(root, tests, seconds)
        finally:
            target.write_text(place.mutant.source, "utf-8")
        if failed == []:
            continue
        # What fails, or takes as long, without the mistake says nothing about it.
        again = tests_fail(root, failed or tests, seconds)
        if again == []:
            return f"caught by {failed[0] if failed else f'{tests[0]} (it does not end)'}"
        late |= again is None
        if again:
            return f"undecided: {again[0]} fails without it, too"
    return "undecided: the tests take too long" if late else "survived"


def copied(root: Path) -> None:
    """The tracked files of this checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name, follow_symlinks=False)


def main() -> None:
    """Try mutants, and print what survived and how many were caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.mutants", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=240.0, help="of each group of the nearest tests")
    parser.add_argument("--suite-seconds", type=float, default=1800.0, help="of the fast suite; 0: it is left out")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    results = given.output / "mutants.jsonl"
    done = runfolder.read_jsonl(results, ("seed", "number"), ("function", "result"))
    counts = Counter(line["result"].partition(" ")[0].rstrip(":") for line in done if line["seed"] == given.seed)
    bounds = [given.seconds, *([given.suite_seconds] if given.suite_seconds else [])]
    with tempfile.TemporaryDirectory(prefix="etude-mutants-") as scratch:
        root = Path(scratch)
        copied(root)
        for number, place in zip(range(given.count), drawn(root, given.seed), strict=False):
            if number < counts.total():
                continue
            result = tried(root, place, bounds)
            counts[result.partition(" ")[0].rstrip(":")] += 1
            where = f"{place.path}::{place.function} ({place.mutant.operator})"
            line = {"seed": given.seed, "number": number, "function": where, "result": result}
            runfolder.append_json(results, line | {"difference": place.difference})
            print(f"{number + 1:3} {result:60} {where}", flush=True)
            if not result.startswith("caught"):
                print(place.difference, flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))


if __name__ == "__main__":
    main()
